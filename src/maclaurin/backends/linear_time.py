"""Polynomials of low order in linear time through the fused program (backends/triton/polynomial_linear.py).

Kernels that expand about the row's mean score hand the program a polynomial per row:

    T_N(x − c_t) = Σ_n α_n(t) xⁿ,       c_t = scale · q_t·(mean of the keys up to t)

Registered as custom operators, so torch.compile keeps them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maclaurin.backends import triton as programs
from maclaurin.backends.polynomial import HALF_OR_SINGLE, loses_digits, polynomial_operands, row_sum_is_served
from maclaurin.backends.row_norm import finish_rows
from maclaurin.forms.divisors import visible_keys
from maclaurin.forms.inputs import Inputs, clamped_log_forget
from maclaurin.forms.state import State
from maclaurin.spec import AttentionSpec, RowSum, Taylor
from maclaurin.spec.multisets import number_of_multisets

#: head sizes up to which an order is served: beyond, its blocks no longer fit the program's registers
LARGEST_HEAD = {0: 128, 1: 128, 2: 128, 3: 32}
#: tokens per chunk by order: the larger the state, the fewer of them should be written down
CHUNK = {0: 256, 1: 256, 2: 1024, 3: 1024}


def linear_serves(spec: AttentionSpec, inputs: Inputs, causal: bool) -> bool:
    """Whether the fused program computes this spec for such tensors, in a text that starts here."""
    if not causal or spec.window is not None or loses_digits(spec, inputs):
        return False
    return (
        _kernel_is_served(spec, inputs.q.shape[3]) and row_sum_is_served(spec) and _tensors_are_served(inputs)
    )


def linear_attend(spec: AttentionSpec, inputs: Inputs, *, scale: float, chunk: int | None = None) -> Tensor:
    """y [B, T, H, e] in the dtype of q."""
    y, _ = _attend(spec, inputs, scale, chunk, None, False)
    if spec.denominator is None and not spec.ignores_row_scale:
        y = y * visible_keys(inputs, None, True)[..., None, None]
    return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype)


def linear_carries_state(spec: AttentionSpec, inputs: Inputs, state: State | None) -> bool:
    """Whether the program takes up such a state, and gives one back."""
    wide = state is None or state.moments.dtype == torch.float32
    return wide and inputs.present is None and not spec.kernel.depends_on_row


def linear_attend_from_state(
    spec: AttentionSpec, inputs: Inputs, state: State | None, *, scale: float, chunk: int | None = None
) -> tuple[Tensor, State]:
    """y [B, T, H, e] in the dtype of q, and the state after the last token."""
    batch, tokens = inputs.k.shape[:2]
    count = torch.zeros(batch, dtype=torch.int64, device=inputs.k.device) if state is None else state.count
    y, moments = _attend(spec, inputs, scale, chunk, None if state is None else state.moments, True)
    if not isinstance(spec.denominator, RowSum) and not spec.ignores_row_scale:
        y = y * visible_keys(inputs, None, True)[..., None, None]
        if spec.denominator is not None:
            y = y / visible_keys(inputs, count, True)[..., None, None]
    log_forget, log_decay = clamped_log_forget(inputs), None
    if log_forget is not None:
        earlier = None if state is None else state.log_decay
        log_decay = log_forget.sum(-1) if earlier is None else earlier + log_forget.sum(-1)
    after = State(spec, moments, count + tokens, log_decay)
    return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype), after


def _attend(
    spec: AttentionSpec, inputs: Inputs, scale: float, chunk: int | None, initial: Tensor | None, state: bool
) -> tuple[Tensor, Tensor]:
    """Rows over their sum, or over the number of keys of this call; and the moments after it."""
    q, k, v = polynomial_operands(spec, inputs)
    row_sum = spec.denominator if isinstance(spec.denominator, RowSum) else None
    alpha = None
    if spec.kernel.depends_on_row:
        k = k - mean_key(k, inputs.present)
        alpha = row_coefficients(spec, mean_score(q, k, scale), scale)
    log_forget = clamped_log_forget(inputs)
    y, _, after, *_ = linear_polynomial(
        q,
        k,
        v,
        alpha,
        None if log_forget is None else log_forget.float().contiguous(),
        initial,
        padded_series(spec, scale),
        row_sum is not None,
        0.0 if row_sum is None or row_sum.eps is None else row_sum.eps,
        chunk_for(spec, chunk, q.shape[1]),
        list(spec.orders or ()),
        state,
    )
    return y, after


def chunk_for(spec: AttentionSpec, asked: int | None, tokens: int) -> int:
    """Tokens per chunk: what was asked for, up to the text's length, in a size the program's tiles divide."""
    wanted = CHUNK[max(spec.orders or (0,))] if asked is None else asked
    return max(64, _power_of_two(min(wanted, tokens)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _kernel_is_served(spec: AttentionSpec, d: int) -> bool:
    if not spec.orders or max(spec.orders) not in LARGEST_HEAD or d > LARGEST_HEAD[max(spec.orders)]:
        return False
    if not spec.kernel.depends_on_row:
        return True
    return isinstance(spec.kernel, Taylor) and not spec.forget_gate  # the mean is that of all keys alike


def _tensors_are_served(inputs: Inputs) -> bool:
    q, k, v = inputs.q, inputs.k, inputs.v
    same = q.dtype == k.dtype == v.dtype and q.dtype in HALF_OR_SINGLE
    reached = programs.runs_on(q.device) and programs.addresses_fit(q, k, v)
    return same and q.shape[1] == k.shape[1] > 0 and v.shape[3] <= 128 and reached


def padded_series(spec: AttentionSpec, scale: float) -> list[float]:
    """c₀, c₁, … of the score without its scale; where rows have their own, only how many there are counts."""
    if spec.kernel.depends_on_row:
        return [1.0] * (max(*(spec.orders or ()), 1) + 1)
    known = spec.kernel.coefficients()[: max(spec.orders or (0,)) + 1]
    series = [float(c) * scale**n for n, c in enumerate(known)]
    return series + [0.0] * (2 - len(series))


def mean_key(k: Tensor, present: Tensor | None) -> Tensor:
    """The mean of all keys [B, 1, K, d] in their dtype, without a gradient.

    Kernels that expand about the row's mean do not see it taken off, and smaller scores cancel less.
    """
    wide = k.detach().float()
    if present is None:
        mean = wide.mean(1, keepdim=True)
    else:
        real = present[:, :, None, None]
        mean = torch.where(real, wide, 0.0).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
    return mean.to(k.dtype)


def mean_score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """c [B, H, T], the mean score of every query over the keys up to its own."""
    count = torch.arange(1, k.shape[1] + 1, device=k.device)[:, None, None]
    return scores_of_own_key(q, k.float().cumsum(1) / count, scale)


def scores_of_own_key(q: Tensor, key: Tensor, scale: float) -> Tensor:
    """scale·q_t·key_t [B, H, T] for a key [B, T or 1, K, d] of its own for each query."""
    grouped = q.float().unflatten(2, (key.shape[2], -1))
    own = key.float().expand(-1, q.shape[1], -1, -1)
    return torch.einsum("btkgd,btkd->bkgt", grouped, own).flatten(1, 2) * scale


def row_coefficients(spec: AttentionSpec, mean: Tensor, scale: float) -> Tensor:
    """α [N+1, B, H, T]: the coefficients about the mean, in powers of the score without its scale."""
    alpha = spec.kernel.coefficients(mean)
    return torch.stack([(a + torch.zeros_like(mean)) * scale**n for n, a in enumerate(alpha)])


# -------------------------------------------------------------------------------- the operators


@torch.library.custom_op("maclaurin::linear_polynomial", mutates_args=())
def linear_polynomial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    initial: Tensor | None,
    coefficients: Sequence[float],
    divide_by_sum: bool,
    eps: float,
    chunk: int,
    orders: Sequence[int],
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, H, e] and D [B, H, T] in fp32; the state after the text [B, K, F, e (+ 1)], or empty.

    The state holds these orders, as `initial` does, and a column for the row sum where that divides.
    And the keys' moments for the way back: small ones, orders 2 and 3, or empty.
    """
    from maclaurin.backends.triton import polynomial_linear as program
    from maclaurin.backends.triton import state_layout

    call = program.Call(tuple(coefficients), divide_by_sum, eps, chunk)
    d, e = q.shape[3], v.shape[3]
    start = None
    if initial is not None:
        start = state_layout.unpacked(initial.flatten(0, 1), orders, d, e, call.order)
    y, divisor, past, after = program.forward(
        q, k, v, program.Rows(alpha, log_forget), call, initial=start, totals=return_state
    )
    state = q.new_empty(0, dtype=torch.float32)
    if after is not None:
        state = state_layout.packed(after, orders, d, e, sums=divide_by_sum).unflatten(0, k.shape[::2])
    second, third = (past.high.get(n, q.new_empty(0)) for n in (2, 3))
    return y, divisor, state, past.small, second, third


@torch.library.custom_op("maclaurin::linear_polynomial_backward", mutates_args=())
def linear_polynomial_backward(
    dy: Tensor,
    d_divisor: Tensor | None,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    divisor: Tensor,
    state: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    moments: Sequence[Tensor],
    started: bool,
    coefficients: Sequence[float],
    divide_by_sum: bool,
    eps: float,
    chunk: int,
    orders: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dα, and the gradients of the log forget gate and of the state before, or empty."""
    from maclaurin.backends.triton import polynomial_linear as program
    from maclaurin.backends.triton import state_layout

    call = program.Call(tuple(coefficients), divide_by_sum, eps, chunk)
    d, e = q.shape[3], v.shape[3]
    small, *high = moments
    after = d_after = None
    if d_state is not None:
        after, d_after = (
            state_layout.unpacked(u.flatten(0, 1), orders, d, e, call.order) for u in (state, d_state)
        )
    found, before = program.backward(
        dy,
        d_divisor,
        q,
        k,
        v,
        y,
        divisor,
        program.Rows(alpha, log_forget),
        program.Moments(small, {n: u for n, u in zip((2, 3), high, strict=True) if u.numel()}),
        call,
        started=started,
        totals=after,
        d_totals=d_after,
    )
    d_initial = None
    if before is not None:
        d_initial = state_layout.packed(before, orders, d, e, sums=divide_by_sum)
        d_initial = d_initial.unflatten(0, k.shape[::2])
    return tuple(q.new_empty(0) if u is None else u for u in (*found, d_initial))  # type: ignore[return-value]


@linear_polynomial.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    initial: Tensor | None,
    coefficients: Sequence[float],
    divide_by_sum: bool,
    eps: float,
    chunk: int,
    orders: Sequence[int],
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from maclaurin.backends.triton import moments

    batch, tokens, heads, d = q.shape
    e, kv_heads, chunks = v.shape[3], k.shape[2], -(-tokens // chunk)
    rows, wide = batch * kv_heads, torch.float32
    features = sum(number_of_multisets(d, n) for n in orders)
    state = (batch, kv_heads, features, e + int(divide_by_sum)) if return_state else (0,)
    high = [
        q.new_empty(rows, chunks, moments.blocks(d, n), d, e, dtype=moments.operand(q.dtype))
        if n < len(coefficients)
        else q.new_empty(0)
        for n in (2, 3)
    ]
    return (
        q.new_empty(batch, tokens, heads, e, dtype=wide),
        q.new_empty(batch, heads, tokens, dtype=wide),
        q.new_empty(state, dtype=wide),
        q.new_empty(rows, chunks, moments.small_size(d, e), dtype=wide),
        high[0],
        high[1],
    )


@linear_polynomial_backward.register_fake
def _(
    dy: Tensor,
    d_divisor: Tensor | None,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    divisor: Tensor,
    state: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    moments: Sequence[Tensor],
    started: bool,
    coefficients: Sequence[float],
    divide_by_sum: bool,
    eps: float,
    chunk: int,
    orders: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_alpha, d_forget = (q.new_empty(0) if u is None else torch.empty_like(u) for u in (alpha, log_forget))
    features = sum(number_of_multisets(q.shape[3], n) for n in orders)
    shape = (k.shape[0], k.shape[2], features, v.shape[3] + int(divide_by_sum)) if started else (0,)
    d_initial = q.new_empty(shape, dtype=torch.float32 if started else q.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_alpha, d_forget, d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, alpha, log_forget, initial, *ctx.call, ctx.return_state = inputs
    ctx.started = initial is not None
    y, divisor, state, *moments = output
    ctx.save_for_backward(q, k, v, y, divisor, state, alpha, log_forget, *moments)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, d_divisor: Tensor | None, d_state: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    q, k, v, y, divisor, state, alpha, log_forget, *moments = ctx.saved_tensors
    if dy is None and d_divisor is None and d_state is None:
        return (None,) * 12
    dy = torch.zeros_like(y) if dy is None else dy
    d_state = d_state if ctx.return_state else None  # traced, an empty one has a gradient too
    dq, dk, dv, d_alpha, d_forget, d_initial = linear_polynomial_backward(
        dy, d_divisor, d_state, q, k, v, y, divisor, state, alpha, log_forget, moments, ctx.started, *ctx.call
    )
    d_alpha = None if alpha is None else d_alpha
    d_forget = None if log_forget is None else d_forget
    return dq, dk, dv, d_alpha, d_forget, d_initial if ctx.started else None, *(None,) * 6


linear_polynomial.register_autograd(_backward, setup_context=_save)
