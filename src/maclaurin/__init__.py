"""Maclaurin writes softmax attention as a recurrent network.

    exp(q·k) = Σ_n (q·k)ⁿ/n! = Σ_n ⟨q^⊗n, k^⊗n⟩/n!

Every variant of attention is a spec, a small frozen value, and the same spec runs in parallel,
in chunks and step by step as an RNN, with the same answer and the same gradients:

    y = maclaurin.attention(q, k, v, "exp/l2")

Specs do not need torch: torch, and the package `study`, are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from maclaurin.errors import (
    InputError,
    MaclaurinError,
    NoFiniteStateError,
    NotationError,
    SpecError,
    StateBudgetError,
)
from maclaurin.spec import AttentionSpec, parse
from maclaurin.spec.catalogue import catalogue, resolve
from maclaurin.transformers_registration import register_with_transformers

if TYPE_CHECKING:
    from maclaurin import study
    from maclaurin.conversion.convert_model import convert
    from maclaurin.conversion.press import press
    from maclaurin.forms.state import State
    from maclaurin.programs.dispatch import attention, plan
    from maclaurin.programs.plan import Plan
    from maclaurin.programs.series import SeriesNotice

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "InputError",
    "MaclaurinError",
    "NoFiniteStateError",
    "NotationError",
    "Plan",
    "SeriesNotice",
    "SpecError",
    "State",
    "StateBudgetError",
    "attention",
    "catalogue",
    "convert",
    "parse",
    "plan",
    "press",
    "resolve",
    "study",
]

#: name → the module that has it, imported when the name is used first
_LAZY = {
    "attention": "maclaurin.programs.dispatch",
    "convert": "maclaurin.conversion.convert_model",
    "press": "maclaurin.conversion.press",
    "plan": "maclaurin.programs.dispatch",
    "Plan": "maclaurin.programs.plan",
    "SeriesNotice": "maclaurin.programs.series",
    "State": "maclaurin.forms.state",
}


def __getattr__(name: str) -> Any:
    if name == "study":
        return importlib.import_module("maclaurin.study")
    if name not in _LAZY:
        raise AttributeError(f"module 'maclaurin' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


register_with_transformers()
