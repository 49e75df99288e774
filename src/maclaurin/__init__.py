"""Maclaurin writes softmax attention as the recurrent network it is.

    exp(q·k) = Σ_n (q·k)ⁿ/n! = Σ_n ⟨q^⊗n, k^⊗n⟩/n!

Every variant of attention is one small piece of data, and the same piece of data runs in parallel,
in chunks and step by step as an RNN, with the same answer and the same gradients:

    y = maclaurin.attention(q, k, v, "exp/l2")
"""

from maclaurin.backends.dispatch import attention, plan
from maclaurin.backends.plan import Plan
from maclaurin.backends.series import SeriesNotice
from maclaurin.errors import (
    InputError,
    MaclaurinError,
    NoFiniteStateError,
    NotationError,
    SpecError,
    StateBudgetError,
)
from maclaurin.forms.state import State
from maclaurin.spec import AttentionSpec, parse
from maclaurin.spec.catalogue import catalogue, resolve

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
    "parse",
    "plan",
    "resolve",
]
