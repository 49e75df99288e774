"""What is done to finished rows, one row at a time: a gain, a gate, a norm. Fused on a GPU, else plain torch.

Operators (operators.py), so torch.compile keeps them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maclaurin.forms.inputs import working_dtype
from maclaurin.forms.output import gated_and_normed
from maclaurin.programs import triton as gpu
from maclaurin.programs.operators import operator
from maclaurin.spec import AttentionSpec


def finish_rows(spec: AttentionSpec, y: Tensor, gates: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """p_t N(o_t y_t) in `dtype`, for y [B, T, H, e] and gates [B, T, H] or [B, T, H, e]."""
    if spec.norm is None and not spec.gates_before_norm:
        return y.to(dtype)
    length = fused_length(spec, y)
    if length is not None and spec.norm is not None:
        after = [gates[gate.argument.name].contiguous() for gate in spec.gates_after_norm]
        return row_norm(gpu.dense(y), after[0] if after else None, length, spec.norm.centred).to(dtype)
    return gated_and_normed(spec, y.to(working_dtype(dtype)), gates).to(dtype)


def fused_length(spec: AttentionSpec, y: Tensor) -> float | None:
    """The length that the fused norm gives each row; None where it is not all that follows on the rows."""
    if spec.norm is None or spec.gates_before_norm or len(spec.gates_after_norm) > 1:
        return None
    if not all(gate.multiplies for gate in spec.gates_after_norm):
        return None
    fits = gpu.runs_on(y.device) and y.dtype != torch.float64 and y.shape[-1] <= 1024 and y.shape[1] > 0
    return spec.norm.length(y.shape[-1]) if fits else None


def scaled_rows(o: Tensor, log_gain: Tensor, gate: Tensor | None) -> Tensor:
    """y = p e^g o for o [B, H, T, e]."""
    if gpu.runs_on(o.device) and o.dtype != torch.float64:
        return fused_scaled_rows(o, log_gain, gate)
    factor = log_gain.exp() if gate is None else log_gain.exp() * gate
    return (o * factor[..., None]).to(o.dtype)


def scaled_rows_backward(
    dy: Tensor, o: Tensor, log_gain: Tensor, gate: Tensor | None, unseen: Tensor | None, *, sums: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """do = p e^g dy, the output a stock backward is to see (None for zeros), and e^g Σ dy∘o if asked for."""
    if gpu.runs_on(o.device) and o.dtype != torch.float64:
        do, kept, total = fused_scaled_rows_backward(dy, o, log_gain, gate, unseen, sums)
        return do, None if unseen is None else kept, total if sums else None
    gain = log_gain.exp()
    factor = gain if gate is None else gain * gate
    do = (dy * factor[..., None]).to(dy.dtype)
    kept = None if unseen is None else (o * unseen[..., None]).to(o.dtype)
    total = (dy.to(gain.dtype) * o.to(gain.dtype)).sum(-1) * gain if sums else None
    return do, kept, total


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::row_norm")
def row_norm(y: Tensor, gate: Tensor | None, length: float, centred: bool) -> Tensor:
    """p·N(y), contiguous, in the dtype of y."""
    from maclaurin.programs.triton import row_norm as program

    return program.forward(y, gate, length, centred)[0]


@operator("maclaurin::row_norm_backward")
def row_norm_backward(
    dout: Tensor, y: Tensor, gate: Tensor | None, length: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """dy, and dgate (empty without a gate)."""
    from maclaurin.programs.triton import row_norm as program

    dy, dgate = program.backward(dout, y, gate, length, centred)
    return dy, y.new_empty(0) if dgate is None else dgate


@row_norm.register_fake
def _(y: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape)


@row_norm_backward.register_fake
def _(dout: Tensor, y: Tensor, gate: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    dy = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)
    return dy, y.new_empty(0) if gate is None else torch.empty_like(gate)


def _save_row_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, gate, ctx.length, ctx.centred = inputs
    ctx.save_for_backward(y, gate)


def _row_norm_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    y, gate = ctx.saved_tensors
    dy, dgate = row_norm_backward(dout, y, gate, ctx.length, ctx.centred)
    return dy, None if gate is None else dgate, None, None


row_norm.register_autograd(_row_norm_backward, setup_context=_save_row_norm)


@operator("maclaurin::normed_rows")
def normed_rows(y: Tensor, length: float, centred: bool) -> tuple[Tensor, Tensor]:
    """N(y) for y [B, T, H, e], contiguous, and length/‖y‖ [B, T, H]."""
    from maclaurin.programs.triton import row_norm as program

    out, gain = program.forward(gpu.dense(y), None, length, centred, keep=True)
    assert gain is not None
    return out, gain


@operator("maclaurin::normed_rows_backward")
def normed_rows_backward(
    dout: Tensor, out: Tensor, gain: Tensor, centred: bool, layout: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """dy and y (less its mean, if centred), laid out as asked for."""
    from maclaurin.programs.triton import row_norm as program

    return program.backward_from_answer(dout, out, gain, centred, layout)


@normed_rows.register_fake
def _(y: Tensor, length: float, centred: bool) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape[:3], dtype=torch.float32)


@normed_rows_backward.register_fake
def _(dout: Tensor, out: Tensor, gain: Tensor, centred: bool, layout: Sequence[int]) -> tuple[Tensor, Tensor]:
    return out.new_empty_strided(out.shape, layout), out.new_empty_strided(out.shape, layout)


@operator("maclaurin::scaled_rows")
def fused_scaled_rows(o: Tensor, log_gain: Tensor, gate: Tensor | None) -> Tensor:
    """p e^g o in the layout of o."""
    from maclaurin.programs.triton import row_scale

    return row_scale.forward(o, log_gain, gate)


@operator("maclaurin::scaled_rows_backward")
def fused_scaled_rows_backward(
    dy: Tensor, o: Tensor, log_gain: Tensor, gate: Tensor | None, unseen: Tensor | None, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """do, what a stock backward is to see, and e^g Σ dy∘o; empty where not asked for."""
    from maclaurin.programs.triton import row_scale

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


@operator("maclaurin::row_products")
def row_products(do: Tensor, o: Tensor) -> Tensor:
    """Σ do∘o [B, H, T] in fp32."""
    from maclaurin.programs.triton import row_scale as program

    return program.delta(do, o, None)


@row_products.register_fake
def _(do: Tensor, o: Tensor) -> Tensor:
    return o.new_empty(o.shape[:3], dtype=torch.float32)
