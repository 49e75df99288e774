"""Any denominator for exp, as a gain per row on a stock softmax.

    Σ_s e^x v_s / D = e^g softmax(x)V,      g = lse − ln D,    lse = ln Σ_s e^x

Backward, with do = e^g dy and a = ∂g/∂lse: the scores get dx = P∘(do Vᵀ − δ) with
δ = Σ do∘o − a Σ do∘o = Σ do∘(1−a)o, so the stock backward gives the exact gradients when it is handed
do for the gradient and (1−a)o for the output it saved. Where D does not know the row (1, t, a learned
sum, a detached row sum) a = 1, and that output is zero.

Where D is also no variable and there is no gate, dx = e^{x − ln D}∘(dy Vᵀ): the stock backward is handed dy
itself and ln D for the log-sum-exp it saved, and nothing of the rows is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maclaurin.backends import triton as programs
from maclaurin.backends.operators import operator
from maclaurin.backends.stock_softmax import stock_softmax, zeros_in_layout
from maclaurin.spec import RowSum


def gained_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    row_sum: RowSum | None,
    log_divisor: Tensor | None,
    gate: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """p e^{lse − ln D} softmax(x)V for q, k, v [B, H, T, ·], in their dtype.

    D is the row sum with its floor and eps, or e^log_divisor [B, H, T]; p is the gate [B, H, T].
    """
    return _GainedSoftmax.apply(q, k, v, log_divisor, gate, row_sum, scale, causal)  # type: ignore[no-any-return]


class _GainedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_divisor: Tensor | None,
        gate: Tensor | None,
        row_sum: RowSum | None,
        scale: float,
        causal: bool,
    ) -> Tensor:
        stock = stock_softmax(q, k, v)
        assert stock is not None
        o, lse = stock.forward(q, k, v, scale, causal)
        lse, unseen = lse.contiguous(), None
        if row_sum is not None:
            log_divisor, unseen = log_row_sum(row_sum, lse)
        log_gain = lse if log_divisor is None else lse - log_divisor
        ctx.call, ctx.layout = (stock, scale, causal), o.stride()
        ctx.is_direct = _is_direct(q, row_sum, gate, ctx.needs_input_grad[3])
        if ctx.is_direct:
            ctx.save_for_backward(q, k, v, torch.zeros_like(lse) if log_divisor is None else log_divisor)
        else:
            ctx.save_for_backward(q, k, v, o, lse, log_gain, gate, unseen)
        return scaled_rows(o, log_gain, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        stock, scale, causal = ctx.call
        if ctx.is_direct:
            q, k, v, log_divisor = ctx.saved_tensors
            dy = dy if dy.stride(-1) == 1 and min(dy.stride()) > 0 else dy.contiguous()
            unseen = zeros_in_layout(dy, ctx.layout)
            return *stock.backward(dy, q, k, v, unseen, log_divisor, scale, causal), *(None,) * 5
        q, k, v, o, lse, log_gain, gate, unseen = ctx.saved_tensors
        of_divisor, of_gate = ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        do, kept, sums = scaled_rows_backward(dy, o, log_gain, gate, unseen, sums=of_divisor or of_gate)
        kept = zeros_in_layout(o, ctx.layout) if kept is None else kept
        dq, dk, dv = stock.backward(do, q, k, v, kept, lse, scale, causal)
        d_divisor = d_gate = None
        if of_divisor and sums is not None:
            d_divisor = -sums if gate is None else -sums * gate
        if of_gate and sums is not None:
            d_gate = sums
        return dq, dk, dv, d_divisor, d_gate, None, None, None


def _is_direct(q: Tensor, row_sum: RowSum | None, gate: Tensor | None, of_divisor: bool) -> bool:
    return row_sum is None and gate is None and not of_divisor and weights_fit(q)


def weights_fit(like: Tensor) -> bool:
    """Whether weights over a D that does not know them are multiplied as they are: fp16 has no range."""
    return like.dtype != torch.float16


def scaled_rows(o: Tensor, log_gain: Tensor, gate: Tensor | None) -> Tensor:
    """y = p e^g o for o [B, H, T, e]."""
    if programs.runs_on(o.device) and o.dtype != torch.float64:
        return fused_scaled_rows(o, log_gain, gate)
    factor = log_gain.exp() if gate is None else log_gain.exp() * gate
    return (o * factor[..., None]).to(o.dtype)


def scaled_rows_backward(
    dy: Tensor, o: Tensor, log_gain: Tensor, gate: Tensor | None, unseen: Tensor | None, *, sums: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """do = p e^g dy, the output a stock backward is to see (None for zeros), and e^g Σ dy∘o if asked for."""
    if programs.runs_on(o.device) and o.dtype != torch.float64:
        do, kept, total = fused_scaled_rows_backward(dy, o, log_gain, gate, unseen, sums)
        return do, None if unseen is None else kept, total if sums else None
    gain = log_gain.exp()
    factor = gain if gate is None else gain * gate
    do = (dy * factor[..., None]).to(dy.dtype)
    kept = None if unseen is None else (o * unseen[..., None]).to(o.dtype)
    total = (dy.to(gain.dtype) * o.to(gain.dtype)).sum(-1) * gain if sums else None
    return do, kept, total


def log_row_sum(row_sum: RowSum, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """ln max(e^lse + eps, floor), and its slope in lse (1 − a in the formula above; None where it is 0)."""
    log_sum, slope = lse, torch.ones_like(lse)
    if row_sum.eps is not None:
        log_sum = torch.logaddexp(lse, lse.new_tensor(math.log(row_sum.eps)))
        slope = (lse - log_sum).exp()
    if row_sum.floor is not None:
        lowest = math.log(row_sum.floor)
        slope = torch.where(log_sum > lowest, slope, 0.0)
        log_sum = log_sum.clamp(min=lowest)
    return log_sum, None if row_sum.detach else slope


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::scaled_rows")
def fused_scaled_rows(o: Tensor, log_gain: Tensor, gate: Tensor | None) -> Tensor:
    """p e^g o in the layout of o."""
    from maclaurin.backends.triton import row_scale

    return row_scale.forward(o, log_gain, gate)


@operator("maclaurin::scaled_rows_backward")
def fused_scaled_rows_backward(
    dy: Tensor, o: Tensor, log_gain: Tensor, gate: Tensor | None, unseen: Tensor | None, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """do, what a stock backward is to see, and e^g Σ dy∘o; empty where not asked for."""
    from maclaurin.backends.triton import row_scale

    do, kept, total = row_scale.backward(dy, o, log_gain, gate, unseen, sums=sums)
    return do, o.new_empty(0) if kept is None else kept, log_gain.new_empty(0) if total is None else total


@fused_scaled_rows.register_fake
def _(o: Tensor, *_: Any) -> Tensor:
    return torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device)


@fused_scaled_rows_backward.register_fake
def _(
    dy: Tensor, o: Tensor, log_gain: Tensor, gate: Tensor | None, unseen: Tensor | None, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    do = torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device)
    kept = o.new_empty(0) if unseen is None else torch.empty_like(do)
    read = sums or unseen is not None
    return do, kept, log_gain.new_empty(log_gain.shape if read else (0,), dtype=torch.float32)
