"""Shipped oracles, tolerances, strategies and the laws that every spec inherits.

Needs the extra `testing` (hypothesis and pytest).
"""

from maclaurin.testing.cases import Shape, TensorCase, random_tensors
from maclaurin.testing.laws import SpecLaws
from maclaurin.testing.tolerances import TOLERANCE, assert_same, relative_error

__all__ = [
    "TOLERANCE",
    "Shape",
    "SpecLaws",
    "TensorCase",
    "assert_same",
    "random_tensors",
    "relative_error",
]
