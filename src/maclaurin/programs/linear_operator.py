"""The fused program for polynomials in linear time (triton/polynomial_linear.py) as an operator.

States go in and out as they are kept between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maclaurin.programs.operators import operator
from maclaurin.spec.polynomials import number_of_multisets


@operator("maclaurin::linear_polynomial")
def linear_polynomial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    initial: Tensor | None,
    coefficients: Sequence[float],
    divisor: str,
    eps: float,
    chunk: int,
    orders: Sequence[int],
    return_state: bool,
    narrow: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, H, e] and D [B, H, T] in fp32; the state after the text [B, K, F, e (+ 1)], or empty.

    `narrow`: y in bf16, and behind D what rounding took from it, for the backward pass; else that is empty.
    The state holds these orders, as `initial` does, and a column for the row sum where that divides.
    And the keys' moments for the backward pass: small ones, orders 2 and 3, or empty.
    """
    from maclaurin.programs.triton import polynomial_linear as program
    from maclaurin.programs.triton import state_layout

    call = program.Call(tuple(coefficients), divisor, eps, chunk, narrow)
    d, e = q.shape[3], v.shape[3]
    start = None
    if initial is not None:
        start = state_layout.unpacked(initial.flatten(0, 1), orders, d, e, call.order)
    y, rest, z, past, after = program.forward(
        q, k, v, program.Rows(alpha, log_forget), call, initial=start, totals=return_state
    )
    state = q.new_empty(0, dtype=torch.float32)
    if after is not None:
        state = state_layout.packed(after, orders, d, e, sums=call.by_sum).unflatten(0, k.shape[::2])
    second, third = (past.high.get(n, q.new_empty(0)) for n in (2, 3))
    return y, z, q.new_empty(0) if rest is None else rest, state, past.small, second, third


@operator("maclaurin::linear_polynomial_backward")
def linear_polynomial_backward(
    dy: Tensor,
    d_divisor: Tensor | None,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    z: Tensor,
    rest: Tensor,
    state: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    moments: Sequence[Tensor],
    started: bool,
    coefficients: Sequence[float],
    divisor: str,
    chunk: int,
    orders: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dα, and the gradients of the log forget gate and of the state before, or empty."""
    from maclaurin.programs.triton import polynomial_linear as program
    from maclaurin.programs.triton import state_layout

    call = program.Call(tuple(coefficients), divisor, 0.0, chunk)
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
        rest if rest.numel() else None,
        z,
        program.Rows(alpha, log_forget),
        program.Moments(small, {n: u for n, u in zip((2, 3), high, strict=True) if u.numel()}),
        call,
        started=started,
        totals=after,
        d_totals=d_after,
    )
    d_initial = None
    if before is not None:
        d_initial = state_layout.packed(before, orders, d, e, sums=call.by_sum)
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
    divisor: str,
    eps: float,
    chunk: int,
    orders: Sequence[int],
    return_state: bool,
    narrow: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from maclaurin.programs.triton import block_layout, moments, tiles

    batch, tokens, heads, d = q.shape
    e, kv_heads, chunks = v.shape[3], k.shape[2], -(-tokens // chunk)
    rows, wide = batch * kv_heads, torch.float32
    features = sum(number_of_multisets(d, n) for n in orders)
    state = (batch, kv_heads, features, e + int(divisor == "sum")) if return_state else (0,)
    high = [
        q.new_empty(
            rows,
            chunks,
            block_layout.blocks(int(d), n),
            block_layout.block_rows(int(d), n),
            e,
            dtype=tiles.operand(q),
        )
        if n < len(coefficients)
        else q.new_empty(0)
        for n in (2, 3)
    ]
    y = q.new_empty(batch, tokens, heads, e, dtype=torch.bfloat16 if narrow else wide)
    return (
        y,
        q.new_empty(batch, heads, tokens, dtype=wide),
        torch.empty_like(y) if narrow else q.new_empty(0),
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
    z: Tensor,
    rest: Tensor,
    state: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    moments: Sequence[Tensor],
    started: bool,
    coefficients: Sequence[float],
    divisor: str,
    chunk: int,
    orders: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_alpha, d_forget = (q.new_empty(0) if u is None else torch.empty_like(u) for u in (alpha, log_forget))
    features = sum(number_of_multisets(q.shape[3], n) for n in orders)
    shape = (k.shape[0], k.shape[2], features, v.shape[3] + int(divisor == "sum")) if started else (0,)
    d_initial = q.new_empty(shape, dtype=torch.float32 if started else q.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_alpha, d_forget, d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, alpha, log_forget, initial, coefficients, divisor, _, *sizes, ctx.return_state, _ = inputs
    ctx.call = (coefficients, divisor, *sizes)
    ctx.started = initial is not None
    y, z, rest, state, *moments = output
    ctx.save_for_backward(q, k, v, y, z, rest, state, alpha, log_forget, *moments)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, dz: Tensor | None, _: Any, d_state: Tensor | None, *__: Any
) -> tuple[Any, ...]:
    q, k, v, y, z, rest, state, alpha, log_forget, *moments = ctx.saved_tensors
    if dy is None and dz is None and d_state is None:
        return (None,) * 13
    dy = torch.zeros_like(y) if dy is None else dy
    d_state = d_state if ctx.return_state else None  # traced, an empty one has a gradient too
    dq, dk, dv, d_alpha, d_forget, d_initial = linear_polynomial_backward(
        dy, dz, d_state, q, k, v, y, z, rest, state, alpha, log_forget, moments, ctx.started, *ctx.call
    )
    d_alpha = None if alpha is None else d_alpha
    d_forget = None if log_forget is None else d_forget
    return dq, dk, dv, d_alpha, d_forget, d_initial if ctx.started else None, *(None,) * 7


linear_polynomial.register_autograd(_backward, setup_context=_save)
