"""One token into a state and its queries out of it, on the fused program (triton/state_step.py)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maclaurin.backends import triton as programs
from maclaurin.backends.fused_inputs import denominator_is_served, row_divisor
from maclaurin.backends.operators import are_traced, is_recording, operator
from maclaurin.forms.features import feature_slices, symmetric_powers
from maclaurin.forms.inputs import Inputs, clamped_log_forget
from maclaurin.forms.state import State
from maclaurin.spec import AttentionSpec
from maclaurin.spec.kernel import Taylor

if TYPE_CHECKING:
    from maclaurin.backends.triton.state_step import Layout, Table

#: a program makes one pass per query of a group
_LARGEST_GROUP = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def state_step_serves(moments: Tensor, *given: Tensor | None, group: int) -> bool:
    """Whether the fused program takes this state [B, K, F, E], which holds something, and token."""
    return moments.shape[2] > 0 and tensors_fit_a_step(moments, *given, group=group)


def tensors_fit_a_step(moments: Tensor, *given: Tensor | None, group: int) -> bool:
    """Whether programs that make a step run on this state and token; they have no gradient."""
    graded = torch.is_grad_enabled() and any(u is not None and u.requires_grad for u in (moments, *given))
    sizes = moments.shape[3] <= 1024 and group <= _LARGEST_GROUP
    return programs.runs_on(moments.device) and moments.dtype == torch.float32 and sizes and not graded


# ------------------------------------------------------------------------- what queries read of each order


def sums_by_order(
    moments: Tensor,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    weight: Tensor | None,
    orders: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """S' = f S + w φ(k)[v, 1]ᵀ [B, K, F, E]; what q [B, H, d] reads of each order [orders, B, H, E]."""
    layout = step_layout(k.shape[-1], tuple(orders), moments.device)
    k, q, v = (programs.dense(u) for u in (k, q, v))
    return state_step(moments.contiguous(), k, q, v, log_forget, weight, *layout)  # type: ignore[no-any-return]


@operator("maclaurin::state_step")
def state_step(
    moments: Tensor,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    weight: Tensor | None,
    entries: Tensor,
    roots: Tensor,
    starts: Tensor,
    stops: Tensor,
    cuts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The state after the token, and what queries read of each order [orders, B, H, E]."""
    from maclaurin.backends.triton import state_step as program

    layout = program.Layout(entries, roots, starts, stops, cuts)
    return program.sums(moments, program.Token(k, q, v, log_forget, weight), layout)


@state_step.register_fake
def _(moments: Tensor, k: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    orders = rest[-1].numel() - 1
    return torch.empty_like(moments), moments.new_empty(orders, *q.shape[:2], moments.shape[3])


# -------------------------------------------------------------------------------------------- whole steps


def whole_step_serves(spec: AttentionSpec, inputs: Inputs, state: State) -> bool:
    """Whether around the state lie only coefficients it knows, a forget gate and a simple denominator."""
    q, k, v = inputs.q, inputs.k, inputs.v
    kernel = bool(spec.orders) and coefficient_table(spec) is not None
    bare = spec.window is None and spec.norm is None and not spec.output_gate and not spec.input_gate
    same = q.dtype == k.dtype == v.dtype and q.dtype in DTYPES and state.running is None
    group = q.shape[2] // k.shape[2]
    return (
        kernel
        and bare
        and same
        and denominator_is_served(spec)
        and not are_traced((q, state.moments))
        and state_step_serves(state.moments, q, k, v, inputs.log_forget, group=group)
    )


def whole_step(spec: AttentionSpec, inputs: Inputs, state: State, scale: float) -> tuple[Tensor, State]:
    """y [B, 1, H, e] in the dtype of q, and the state after it, in two launches."""
    from maclaurin.backends.triton import state_step as program

    k, q, v = (programs.dense(u[:, 0]) for u in (inputs.k, inputs.q, inputs.v))
    log_forget = clamped_log_forget(inputs)
    log_forget = None if log_forget is None else log_forget[..., 0]
    table, orders = coefficient_table(spec), tuple(spec.orders or ())
    assert table is not None
    divisor, eps = row_divisor(spec)
    y, moments, count = program.rows(
        state.moments.contiguous(),
        state.count.contiguous(),
        program.Token(k, q, v, log_forget),
        step_layout(k.shape[-1], orders, k.device),
        scale,
        table,
        divisor,
        eps,
    )
    decay = state.log_decay
    if decay is not None and log_forget is not None:
        decay = decay + log_forget
    return y, dataclasses.replace(state, moments=moments, count=count, log_decay=decay)


@lru_cache(maxsize=256)
def coefficient_table(spec: AttentionSpec) -> Table | None:
    """What the sums of each order weigh: numbers, or polynomials in −c for a series about the mean score c.

    Σ bₙ (x − c)ⁿ = Σ_j xʲ Σ_{n≥j} bₙ C(n, j) (−c)^{n−j}. None for kernels that need more of the row.
    """
    kernel, orders = spec.kernel, tuple(spec.orders or ())
    if kernel.feature_map is not None:
        return None
    if not kernel.depends_on_row:
        known = kernel.coefficients(None)
        return tuple((float(known[n]),) for n in orders)
    if not isinstance(kernel, Taylor):
        return None
    series = (*kernel.series, *(0.0,) * len(orders))
    return tuple(
        tuple(series[n] * math.comb(n, j) for n in range(j, len(orders))) for j in range(len(orders))
    )


# ------------------------------------------------------------------------------------- how features are made


def step_layout(d: int, orders: tuple[int, ...], device: torch.device) -> Layout:
    """For heads of size d; made anew where tensors may not be what they seem."""
    make = _step_layout.__wrapped__ if is_recording() else _step_layout
    return make(d, orders, device)


@cache  # recorded steps read it where it is
def _step_layout(d: int, orders: tuple[int, ...], device: torch.device) -> Layout:
    from maclaurin.backends.triton.state_step import BLOCK, Layout

    degree = max(*orders, 1)
    entries = [
        (*multiset, *(d,) * (degree - n))
        for n in orders
        for multiset in itertools.combinations_with_replacement(range(d), n)
    ]
    slices = feature_slices(d, orders)
    blocks = [
        [(start, min(start + BLOCK, s.stop)) for start in range(s.start, s.stop, BLOCK)] for s in slices
    ]
    starts, stops = zip(*itertools.chain(*blocks), strict=True)
    cuts = itertools.accumulate(map(len, blocks), initial=0)
    with torch.inference_mode(False):
        roots = symmetric_powers(torch.ones(d), orders).to(device)
        whole = (torch.tensor(u, dtype=torch.int32, device=device) for u in (starts, stops, list(cuts)))
        return Layout(torch.tensor(entries, dtype=torch.int32, device=device), roots, *whole)
