"""N(softmax(x)V) with little kept for the way back.

The answer and one number per row give back o: y = N(o) = o·length/‖o‖. A mean that the norm takes off is not
among them, but δ = Σ do∘o does not see it, as do has none either. So the stock backward gets what it asks
for, and only the answer is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maclaurin.backends import triton as programs
from maclaurin.backends.operators import operator
from maclaurin.backends.stock_softmax import stock_softmax
from maclaurin.forms.inputs import Inputs
from maclaurin.spec import AttentionSpec


def normed_softmax_serves(spec: AttentionSpec, inputs: Inputs, causal: bool) -> bool:
    """Whether a norm per head is all that follows softmax, and a stock backward takes such tensors."""
    q, k, v = inputs.q, inputs.k, inputs.v
    known = spec.norm is not None and spec.norm.per_head and spec.norm.length(v.shape[3]) is not None
    alone = not spec.output_gate and not spec.gate_after_norm
    plain = q.shape == k.shape == v.shape and q.shape[1] > 0 and q.shape[3] % 8 == 0
    plain = plain and q.dtype != torch.float64 and (causal or inputs.present is None)
    return known and alone and plain and programs.runs_on(q.device) and stock_softmax(q, k, v) is not None


def normed_softmax(spec: AttentionSpec, inputs: Inputs, *, scale: float, causal: bool) -> Tensor:
    """y [B, T, H, e] in the dtype of q."""
    assert spec.norm is not None
    q, k, v = (u.transpose(1, 2) for u in (inputs.q, inputs.k, inputs.v))
    length = spec.norm.length(v.shape[3])
    return _NormedSoftmax.apply(q, k, v, length, spec.norm.centred, scale, causal)  # type: ignore[no-any-return]


class _NormedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, length: float, centred: bool, scale: float, causal: bool
    ) -> Tensor:
        stock = stock_softmax(q, k, v)
        assert stock is not None
        o, lse = stock.forward(q, k, v, scale, causal)
        y, gain = normed_rows(o.transpose(1, 2), length, centred)
        ctx.save_for_backward(q, k, v, y, lse, gain)
        ctx.call, ctx.layout = (stock, centred, scale, causal), o.transpose(1, 2).stride()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, y, lse, gain = ctx.saved_tensors
        stock, centred, scale, causal = ctx.call
        do, o = (u.transpose(1, 2) for u in normed_rows_backward(dy, y, gain, centred, ctx.layout))
        return *stock.backward(do, q, k, v, o, lse, scale, causal), None, None, None, None


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::normed_rows")
def normed_rows(y: Tensor, length: float, centred: bool) -> tuple[Tensor, Tensor]:
    """N(y) for y [B, T, H, e], contiguous, and length/‖y‖ [B, T, H]."""
    from maclaurin.backends.triton import row_norm as program

    out, gain = program.forward(programs.dense(y), None, length, centred, keep=True)
    assert gain is not None
    return out, gain


@operator("maclaurin::normed_rows_backward")
def normed_rows_backward(
    dout: Tensor, out: Tensor, gain: Tensor, centred: bool, layout: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """dy and y (less its mean, if centred), laid out as asked for."""
    from maclaurin.backends.triton import row_norm as program

    return program.backward_from_answer(dout, out, gain, centred, layout)


@normed_rows.register_fake
def _(y: Tensor, length: float, centred: bool) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape[:3], dtype=torch.float32)


@normed_rows_backward.register_fake
def _(dout: Tensor, out: Tensor, gain: Tensor, centred: bool, layout: Sequence[int]) -> tuple[Tensor, Tensor]:
    return out.new_empty_strided(out.shape, layout), out.new_empty_strided(out.shape, layout)
