"""Shipped oracles, tolerances, strategies and the laws that every spec inherits.

`SpecLaws` needs the extra `testing` (hypothesis and pytest); the rest needs no extra.
"""

from typing import TYPE_CHECKING, Any

from maclaurin.testing.agreement import Agreement, agreement, convergence, softmax_against_torch
from maclaurin.testing.cases import Shape, TensorCase, random_tensors
from maclaurin.testing.tolerances import TOLERANCE, assert_same, relative_error

if TYPE_CHECKING:
    from maclaurin.testing.laws import SpecLaws

__all__ = [
    "TOLERANCE",
    "Agreement",
    "Shape",
    "SpecLaws",
    "TensorCase",
    "agreement",
    "assert_same",
    "convergence",
    "random_tensors",
    "relative_error",
    "softmax_against_torch",
]


def __getattr__(name: str) -> Any:
    if name == "SpecLaws":
        from maclaurin.testing.laws import SpecLaws

        return SpecLaws
    raise AttributeError(f"module 'maclaurin.testing' has no attribute {name!r}")
