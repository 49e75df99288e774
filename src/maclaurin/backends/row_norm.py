"""Gates and norms of finished rows, fused where a GPU program serves, else in plain torch.

Operators (operators.py), so torch.compile keeps them whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maclaurin.backends import triton as programs
from maclaurin.backends.operators import operator
from maclaurin.forms.epilogue import gated_and_normed
from maclaurin.forms.inputs import working_dtype
from maclaurin.spec import AttentionSpec


def finish_rows(spec: AttentionSpec, y: Tensor, output_gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """p_t N(o_t y_t) in `dtype`, for y [B, T, H, e] and a gate [B, T, H] or [B, T, H, e]."""
    if spec.norm is None and not spec.output_gate:
        return y.to(dtype)
    if _is_fused(spec, y):
        assert spec.norm is not None
        length = spec.norm.length(y.shape[-1])
        assert length is not None
        gate = output_gate.contiguous() if spec.gate_after_norm and output_gate is not None else None
        return row_norm(programs.dense(y), gate, length, spec.norm.centred).to(dtype)
    wide = working_dtype(dtype)
    gate = None if output_gate is None else output_gate.to(wide)
    return gated_and_normed(spec, y.to(wide), gate).to(dtype)


def _is_fused(spec: AttentionSpec, y: Tensor) -> bool:
    known = spec.norm is not None and spec.norm.length(y.shape[-1]) is not None
    served = programs.runs_on(y.device) and y.dtype != torch.float64 and y.shape[-1] <= 1024
    return known and served and not spec.output_gate and y.shape[1] > 0


@operator("maclaurin::row_norm")
def row_norm(y: Tensor, gate: Tensor | None, length: float, centred: bool) -> Tensor:
    """p·N(y), contiguous, in the dtype of y."""
    from maclaurin.backends.triton import row_norm as program

    return program.forward(y, gate, length, centred)[0]


@operator("maclaurin::row_norm_backward")
def row_norm_backward(
    dout: Tensor, y: Tensor, gate: Tensor | None, length: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """dy, and dgate (empty without a gate)."""
    from maclaurin.backends.triton import row_norm as program

    dy, dgate = program.backward(dout, y, gate, length, centred)
    return dy, y.new_empty(0) if dgate is None else dgate


@row_norm.register_fake
def _(y: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape)


@row_norm_backward.register_fake
def _(dout: Tensor, y: Tensor, gate: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    dy = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)
    return dy, y.new_empty(0) if gate is None else torch.empty_like(gate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, gate, ctx.length, ctx.centred = inputs
    ctx.save_for_backward(y, gate)


def _backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    y, gate = ctx.saved_tensors
    dy, dgate = row_norm_backward(dout, y, gate, ctx.length, ctx.centred)
    return dy, None if gate is None else dgate, None, None


row_norm.register_autograd(_backward, setup_context=_save)
