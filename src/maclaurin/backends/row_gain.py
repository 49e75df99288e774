"""Any denominator for exp, as a gain per row on a stock softmax.

    Σ_s e^x v_s / D = e^g softmax(x)V,      g = lse − ln D,    lse = ln Σ_s e^x

Backward, with do = e^g dy and a = ∂g/∂lse: the scores get dx = P∘(do Vᵀ − δ) with
δ = Σ do∘o − a Σ do∘o = Σ do∘(1−a)o, so the stock backward gives the exact gradients when it is handed
do for the gradient and (1−a)o for the output it saved. Where D does not know the row (1, t, a learned
sum, a detached row sum) a = 1, and that output is zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from maclaurin.backends.stock_softmax import stock_softmax
from maclaurin.spec import RowSum


def gained_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    row_sum: RowSum | None,
    log_divisor: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """e^{lse − ln D} softmax(x)V for q, k, v [B, H, T, ·], in their dtype.

    D is the row sum with its floor and eps, or e^log_divisor [B, H, T].
    """
    return _GainedSoftmax.apply(q, k, v, log_divisor, row_sum, scale, causal)  # type: ignore[no-any-return]


class _GainedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_divisor: Tensor | None,
        row_sum: RowSum | None,
        scale: float,
        causal: bool,
    ) -> Tensor:
        stock = stock_softmax(q, k, v)
        assert stock is not None
        o, lse = stock.forward(q, k, v, scale, causal)
        if row_sum is None:
            log_gain = lse if log_divisor is None else lse - log_divisor
            unseen = None
        else:
            log_sum, unseen = _log_row_sum(row_sum, lse)
            log_gain = lse - log_sum
        y = (o * log_gain.exp()[..., None]).to(o.dtype)
        learned = log_divisor is not None and log_divisor.requires_grad
        ctx.save_for_backward(
            q, k, v, None if unseen is None else o, lse, log_gain, unseen, y if learned else None
        )
        ctx.call = (stock, scale, causal, row_sum is not None and row_sum.detach)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, o, lse, log_gain, unseen, y = ctx.saved_tensors
        stock, scale, causal, detached = ctx.call
        do = (dy * log_gain.exp()[..., None]).to(dy.dtype)
        if o is None or detached:
            kept = torch.zeros_like(v) if v.shape == dy.shape else torch.zeros_like(dy)
        else:
            kept = (o * unseen[..., None]).to(o.dtype)
        dq, dk, dv = stock.backward(do, q, k, v, kept, lse, scale, causal)
        d_divisor = None if y is None else -(dy.to(lse.dtype) * y.to(lse.dtype)).sum(-1)
        return dq, dk, dv, d_divisor, None, None, None


def _log_row_sum(row_sum: RowSum, lse: Tensor) -> tuple[Tensor, Tensor]:
    """ln max(e^lse + eps, floor), and its slope in lse (1 − a in the formula above)."""
    log_sum, slope = lse, torch.ones_like(lse)
    if row_sum.eps is not None:
        log_sum = torch.logaddexp(lse, lse.new_tensor(math.log(row_sum.eps)))
        slope = (lse - log_sum).exp()
    if row_sum.floor is not None:
        lowest = math.log(row_sum.floor)
        slope = torch.where(log_sum > lowest, slope, 0.0)
        log_sum = log_sum.clamp(min=lowest)
    return log_sum, slope
