"""One token of an exact window beside a polynomial tail, on the fused program (triton/window_step.py)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from maclaurin.backends import triton as programs
from maclaurin.backends.operators import are_traced
from maclaurin.backends.state_step import DTYPES, coefficient_table, step_layout, tensors_fit_a_step
from maclaurin.forms.inputs import Inputs
from maclaurin.forms.state import State
from maclaurin.forms.window import ExactKeys
from maclaurin.spec import AttentionSpec, RowSum

#: sinks are looked at all together
MOST_SINKS = 64


def window_step_serves(spec: AttentionSpec, inputs: Inputs, state: State) -> bool:
    """Whether there is a window under a row sum, with no gate or norm, and the tail is a series it knows."""
    q, k, v = inputs.q, inputs.k, inputs.v
    denominator = spec.denominator
    bare = (
        isinstance(denominator, RowSum) and denominator.floor is None and not spec.gates and spec.norm is None
    )
    if state.exact is None or not bare or are_traced((q, state.moments)):
        return False
    tail = not spec.orders or coefficient_table(spec) is not None
    same = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES
    group = q.shape[2] // k.shape[2]
    held = (state.exact.recent_k, state.exact.recent_v, state.exact.sink_k, state.exact.sink_v)
    few = state.exact.sink_k.shape[2] <= MOST_SINKS
    return tail and same and few and tensors_fit_a_step(state.moments, q, k, v, *held, group=group)


def window_step(spec: AttentionSpec, inputs: Inputs, state: State, scale: float) -> tuple[Tensor, State]:
    """y [B, 1, H, e] in the dtype of q, and the state after it, in two launches."""
    from maclaurin.backends.triton import window_step as program

    assert state.exact is not None
    assert isinstance(spec.denominator, RowSum)
    orders = tuple(spec.orders or ())
    k, q, v = (programs.dense(u[:, 0]) for u in (inputs.k, inputs.q, inputs.v))
    held = (state.exact.recent_k, state.exact.recent_v, state.exact.sink_k, state.exact.sink_v)
    y, moments, count, exact = program.window_rows(
        state.moments.contiguous(),
        state.count.contiguous(),
        program.Exact(*(u.contiguous() for u in held)),
        program.Token(k, q, v),
        step_layout(k.shape[-1], orders, k.device) if orders else None,
        scale,
        (coefficient_table(spec) or ()) if orders else (),
        spec.denominator.eps or 0.0,
    )
    return y, dataclasses.replace(state, moments=moments, count=count, exact=ExactKeys(*exact))
