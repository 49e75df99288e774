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
from maclaurin.spec import AttentionSpec, RowSum, Taylor

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
    q, k, v = polynomial_operands(spec, inputs)
    row_sum = spec.denominator if isinstance(spec.denominator, RowSum) else None
    alpha = None
    if spec.kernel.depends_on_row:
        k = k - mean_key(k, inputs.present)
        alpha = row_coefficients(spec, mean_score(q, k, scale), scale)
    log_forget = clamped_log_forget(inputs)
    y, *_ = linear_polynomial(
        q,
        k,
        v,
        alpha,
        None if log_forget is None else log_forget.float(),
        padded_series(spec, scale),
        row_sum is not None,
        0.0 if row_sum is None or row_sum.eps is None else row_sum.eps,
        chunk_for(spec, chunk),
    )
    if spec.denominator is None and not spec.ignores_row_scale:
        y = y * visible_keys(inputs, None, True)[..., None, None]
    return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype)


def chunk_for(spec: AttentionSpec, asked: int | None) -> int:
    """Tokens per chunk: what was asked for, rounded up to a size the program's tiles divide."""
    if asked is None:
        return CHUNK[max(spec.orders or (0,))]
    return max(64, 1 << (asked - 1).bit_length())


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
    series = [float(c) * scale**n for n, c in enumerate(spec.kernel.coefficients())]
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
    coefficients: Sequence[float],
    divide_by_sum: bool,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, H, e] and D [B, H, T] in fp32; and the keys' moments: small ones, orders 2 and 3, or empty."""
    from maclaurin.backends.triton import polynomial_linear as program

    call = program.Call(tuple(coefficients), divide_by_sum, eps, chunk)
    y, divisor, past = program.forward(q, k, v, program.Rows(alpha, log_forget), call)
    second, third = (past.high.get(n, q.new_empty(0)) for n in (2, 3))
    return y, divisor, past.small, second, third


@torch.library.custom_op("maclaurin::linear_polynomial_backward", mutates_args=())
def linear_polynomial_backward(
    dy: Tensor,
    d_divisor: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    divisor: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    moments: Sequence[Tensor],
    coefficients: Sequence[float],
    divide_by_sum: bool,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dα and the gradient of the log forget gate (empty where there is none)."""
    from maclaurin.backends.triton import polynomial_linear as program

    call = program.Call(tuple(coefficients), divide_by_sum, eps, chunk)
    small, *high = moments
    past = program.Moments(small, {n: u for n, u in zip((2, 3), high, strict=True) if u.numel()})
    rows = program.Rows(alpha, log_forget)
    found = program.backward(dy, d_divisor, q, k, v, y, divisor, rows, past, call)
    return tuple(q.new_empty(0) if u is None else u for u in found)  # type: ignore[return-value]


@linear_polynomial.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    coefficients: Sequence[float],
    divide_by_sum: bool,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from maclaurin.backends.triton import moments

    batch, tokens, heads, d = q.shape
    e, rows, chunks = v.shape[3], batch * k.shape[2], -(-tokens // chunk)
    high = [
        q.new_empty(rows, chunks, moments.blocks(d, n), d, e, dtype=moments.operand(q.dtype))
        if n < len(coefficients)
        else q.new_empty(0)
        for n in (2, 3)
    ]
    return (
        q.new_empty(batch, tokens, heads, e, dtype=torch.float32),
        q.new_empty(batch, heads, tokens, dtype=torch.float32),
        q.new_empty(rows, chunks, moments.small_size(d, e), dtype=torch.float32),
        high[0],
        high[1],
    )


@linear_polynomial_backward.register_fake
def _(
    dy: Tensor,
    d_divisor: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    divisor: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_alpha, d_forget = (q.new_empty(0) if u is None else torch.empty_like(u) for u in (alpha, log_forget))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_alpha, d_forget


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, alpha, log_forget, *ctx.call = inputs
    y, divisor, *moments = output
    ctx.save_for_backward(q, k, v, y, divisor, alpha, log_forget, *moments)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, d_divisor: Tensor | None, *_: Any) -> tuple[Any, ...]:
    q, k, v, y, divisor, alpha, log_forget, *moments = ctx.saved_tensors
    if dy is None and d_divisor is None:
        return (None,) * 9
    dy = torch.zeros_like(y) if dy is None else dy
    dq, dk, dv, d_alpha, d_forget = linear_polynomial_backward(
        dy, d_divisor, q, k, v, y, divisor, alpha, log_forget, moments, *ctx.call
    )
    d_alpha = None if alpha is None else d_alpha
    return dq, dk, dv, d_alpha, None if log_forget is None else d_forget, None, None, None, None


linear_polynomial.register_autograd(_backward, setup_context=_save)
