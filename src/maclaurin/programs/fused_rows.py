"""From a spec's tensors to the operands of a fused program, and from its rows to the output.

Factor, gate and norm of rows are fused on a GPU (triton/rows.py), and plain torch elsewhere. They are
operators (custom_operator.py), which torch.compile does not trace into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maclaurin.forms.output import SeenByRows, gated_and_normed, running_log_sum
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs, gated_values, working_dtype
from maclaurin.programs import triton as gpu
from maclaurin.programs.custom_operator import operator
from maclaurin.programs.program import Call, first_reason
from maclaurin.spec import AttentionSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_HEAD = 128


def refuse_tensors(call: Call) -> str | None:
    """Why fused programs do not take such tensors; None if they do."""
    padded = call.inputs.present is not None and not call.causal
    return first_reason(
        lambda: refuse_kind(call),
        lambda: None if call.is_aligned else "it needs one query per key",
        lambda: "without a causal mask it does not support padding" if padded else None,
        lambda: gpu.why_addresses_do_not_fit(*call.inputs[:3]),
    )


def refuse_kind(call: Call) -> str | None:
    """Why fused programs do not run on this device, in these dtypes or with such heads; None if they do."""
    return first_reason(
        lambda: gpu.why_not_on(call.device), lambda: refuse_dtypes(call), lambda: refuse_head_size(call)
    )


def refuse_dtypes(call: Call) -> str | None:
    """Why fused programs do not compute in these dtypes; None if they do."""
    q, k, v = call.inputs[:3]
    same = q.dtype == k.dtype == v.dtype
    return None if same and q.dtype in DTYPES else "it computes in fp32, fp16 or bf16"


def refuse_head_size(call: Call) -> str | None:
    """Why heads are too large for fused programs; None if they are not."""
    size = max(call.spec.kernel.key_size(call.inputs.q.shape[3]), call.inputs.v.shape[3])
    return None if size <= _LARGEST_HEAD else f"it supports head sizes up to {_LARGEST_HEAD}"


def refuse_features(spec: AttentionSpec, dtype: torch.dtype) -> str | None:
    """Why φ(q) and φ(k) cannot be operands: they would lose precision in the dtype of the products."""
    feature_map = spec.kernel.feature_map
    loses = feature_map is not None and not feature_map.keeps_digits and dtype != torch.float32
    return f"the features of {feature_map} would lose precision in 16 bits" if loses else None


def operands(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with φ and the value gates applied, rounded to the dtype a program multiplies in."""
    q, k, v = inputs.q, inputs.k, inputs.v
    feature_map, dtype = spec.kernel.feature_map, working_dtype(q.dtype)
    if feature_map is not None and not feature_map.is_identity:
        q, k = (spec.kernel.mapped(u.to(dtype)).to(u.dtype) for u in (q, k))
    if spec.value_gates:
        v = gated_values(spec, v.to(dtype), inputs.gates, v.dtype)
    return gpu.dense(q), gpu.dense(k), gpu.dense(v)


def are_operands(spec: AttentionSpec, inputs: Inputs) -> bool:
    """Whether q, k and v are operands already, so that `operands` would not change them."""
    feature_map = spec.kernel.feature_map
    changed = feature_map is not None and not feature_map.is_identity
    return not changed and not spec.value_gates and all(u.stride(-1) == 1 for u in inputs[:3])


# ------------------------------------------------- rows divided by their sum, by t, or not at all


def refuse_denominator(spec: AttentionSpec) -> str | None:
    """Why the denominator cannot be applied to a program's rows; None if it can."""
    denominator = spec.denominator
    if denominator is None or denominator.fused is not None or not denominator.uses_row_sum:
        return None
    return f"it does not divide by {denominator}"


def row_divisor(spec: AttentionSpec, before: Tensor | None = None) -> tuple[str, float]:
    """What a program divides rows by ("sum", "count" or "one"), and what is added to a sum.

    The count is of this call's keys alone: if others came `before` [B], it is not the spec's count. Under a
    norm, which ignores it, dividing by it keeps numbers small.
    """
    fused = None if spec.denominator is None else spec.denominator.fused
    if fused is not None and fused.by == "sum":
        return "sum", fused.eps
    counted = fused is not None and before is None
    return ("count" if counted or spec.norm_cancels_row_scale else "one"), 0.0


def rows_are_divided(spec: AttentionSpec, before: Tensor | None = None) -> bool:
    """Whether a program's rows are already divided by the spec's whole denominator."""
    if spec.denominator is None or spec.norm_cancels_row_scale:
        return True
    return spec.denominator.fused is not None and row_divisor(spec, before)[0] != "one"


def rows_are_final(spec: AttentionSpec, dtype: torch.dtype, before: Tensor | None = None) -> bool:
    """Whether only rounding to bf16 is left to do on a program's rows; the program then does it itself."""
    alone = spec.norm is None and not spec.gates_before_norm
    return alone and rows_are_divided(spec, before) and dtype == torch.bfloat16


def over_denominator(
    spec: AttentionSpec, inputs: Inputs, y: Tensor, causal: bool, state: State | None = None
) -> tuple[Tensor, Tensor | None]:
    """A program's rows [B, T, H, e] over the rest of the denominator, and its running sum, if any."""
    running = running_log_sum(spec, inputs, None if state is None else state.running, causal)
    before = None if state is None else state.count
    if spec.denominator is None or rows_are_divided(spec, before):
        return y, running
    seen = SeenByRows(spec, inputs, causal, before, running)
    if spec.denominator.in_log_domain:
        return y * (-per_token(spec.denominator.log_divisor(seen), inputs)).exp()[..., None], running
    return y / per_token(spec.denominator.divisor(seen), inputs)[..., None], running


def per_token(u: Tensor, inputs: Inputs) -> Tensor:
    """A number per row [B or 1, K or 1, G or 1, T] as [B or 1, T, H or 1]."""
    return per_head(u, inputs).transpose(1, 2)


def per_head(u: Tensor, inputs: Inputs) -> Tensor:
    """A number per row [B or 1, K or 1, G or 1, T] as [B or 1, H or 1, T]."""
    if u.shape[1] == 1 and u.shape[2] == 1:
        return u[:, :, 0]
    kv_heads = inputs.k.shape[2]
    return u.expand(-1, kv_heads, inputs.q.shape[2] // kv_heads, -1).flatten(1, 2)


# ------------------------------------------------------------------------------------------------------- rows


def finish_rows(spec: AttentionSpec, y: Tensor, gates: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """p_t N(o_t y_t) in `dtype`, for y [B, T, H, e] and gates [B, T, H] or [B, T, H, e]."""
    if spec.norm is None and not spec.gates_before_norm:
        return y if y.dtype == dtype else y.to(dtype)
    length = fused_length(spec, y)
    if length is not None and spec.norm is not None:
        after = [gates[gate.argument.name].contiguous() for gate in spec.gates_after_norm]
        return row_norm(gpu.dense(y), after[0] if after else None, length, spec.norm.centred).to(dtype)
    return gated_and_normed(spec, y.to(working_dtype(dtype)), gates).to(dtype)


def fused_length(spec: AttentionSpec, y: Tensor) -> float | None:
    """The length that the fused norm gives each row; None if something else follows on the rows."""
    if spec.norm is None or spec.gates_before_norm or len(spec.gates_after_norm) > 1:
        return None
    if not all(gate.multiplies for gate in spec.gates_after_norm):
        return None
    fits = gpu.runs_on(y.device) and y.dtype != torch.float64 and y.shape[-1] <= 1024 and y.shape[1] > 0
    return spec.norm.length(y.shape[-1]) if fits else None


def scaled_rows(
    o: Tensor, log_gain: Tensor, log_divisor: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """y = p e^g o/D for o [B, H, T, e], g [B, H, T], ln D [B or 1, H or 1, T] and p [B, T, H]."""
    if gpu.runs_on(o.device) and o.dtype != torch.float64:
        return fused_scaled_rows(o, log_gain, log_divisor, gate)
    _, factor = _row_factors(log_gain, log_divisor, gate)
    return (o * factor[..., None]).to(o.dtype)


def _row_factors(log_gain: Tensor, log_divisor: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """e^g/D and p e^g/D, [B, H, T]."""
    gain = (log_gain if log_divisor is None else log_gain - log_divisor).exp()
    return gain, gain if gate is None else gain * _nonzero(gate, gain.dtype)


def _nonzero(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """A gate [B, T, H] as [B, H, T], not zero: y = p u then gives back u."""
    gate = gate.to(dtype).transpose(1, 2)
    return torch.where(gate.abs() < gpu.LEAST_GATE, gpu.LEAST_GATE, gate)


def scaled_rows_backward(
    dy: Tensor,
    o: Tensor,
    log_gain: Tensor,
    log_divisor: Tensor | None = None,
    gate: Tensor | None = None,
    log_slope: Tensor | None = None,
    *,
    sums: bool = False,
    rows_are_output: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """do = p e^g dy/D, the output to pass to torch's attention backward, and Σ dy∘o e^g/D if requested.

    None in place of that output stands for zeros.

    `rows_are_output`: o is y = p e^g o/D instead.
    """
    if gpu.runs_on(o.device) and o.dtype != torch.float64:
        do, kept, total = fused_scaled_rows_backward(
            dy, o, log_gain, log_divisor, gate, log_slope, sums, rows_are_output
        )
        return do, None if log_slope is None else kept, total if sums else None
    gain, factor = _row_factors(log_gain, log_divisor, gate)
    do = (dy * factor[..., None]).to(dy.dtype)
    kept = None if log_slope is None else (o * log_slope[..., None]).to(o.dtype)
    total = (dy.to(gain.dtype) * o.to(gain.dtype)).sum(-1) if sums else None
    if total is not None and not rows_are_output:
        total = total * gain
    elif total is not None and gate is not None:
        total = total / _nonzero(gate, gain.dtype)
    return do, kept, total


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::row_norm")
def row_norm(y: Tensor, gate: Tensor | None, length: float, centred: bool) -> Tensor:
    """p·N(y), contiguous, in the dtype of y."""
    from maclaurin.programs.triton import rows as program

    return program.normed(y, gate, length, centred)[0]


@operator("maclaurin::row_norm_backward")
def row_norm_backward(
    dout: Tensor, y: Tensor, gate: Tensor | None, length: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """dy, and dgate (empty without a gate)."""
    from maclaurin.programs.triton import rows as program

    dy, dgate = program.normed_backward(dout, y, gate, length, centred)
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
    from maclaurin.programs.triton import rows as program

    out, gain = program.normed(gpu.dense(y), None, length, centred, keep=True)
    assert gain is not None
    return out, gain


@operator("maclaurin::normed_rows_backward")
def normed_rows_backward(
    dout: Tensor, out: Tensor, gain: Tensor, centred: bool, layout: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """dy and y (minus its mean, if centred), in the given layout."""
    from maclaurin.programs.triton import rows as program

    return program.normed_backward_from_answer(dout, out, gain, centred, layout)


@normed_rows.register_fake
def _(y: Tensor, length: float, centred: bool) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape[:3], dtype=torch.float32)


@normed_rows_backward.register_fake
def _(dout: Tensor, out: Tensor, gain: Tensor, centred: bool, layout: Sequence[int]) -> tuple[Tensor, Tensor]:
    return out.new_empty_strided(out.shape, layout), out.new_empty_strided(out.shape, layout)


@operator("maclaurin::scaled_rows")
def fused_scaled_rows(o: Tensor, log_gain: Tensor, log_divisor: Tensor | None, gate: Tensor | None) -> Tensor:
    """p e^g o/D in the layout of o."""
    from maclaurin.programs.triton import rows as program

    return program.scaled(o, log_gain, log_divisor, gate)


@operator("maclaurin::scaled_rows_backward")
def fused_scaled_rows_backward(
    dy: Tensor,
    o: Tensor,
    log_gain: Tensor,
    log_divisor: Tensor | None,
    gate: Tensor | None,
    log_slope: Tensor | None,
    sums: bool,
    rows_are_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """do, the output to pass to torch's attention backward, and Σ dy∘o e^g/D; empty if not requested.

    `rows_are_output`: o is y = p e^g o/D instead.
    """
    from maclaurin.programs.triton import rows as program

    do, kept, total = program.scaled_backward(
        dy, o, log_gain, log_divisor, gate, log_slope, sums=sums, rows_are_output=rows_are_output
    )
    return do, o.new_empty(0) if kept is None else kept, log_gain.new_empty(0) if total is None else total


@fused_scaled_rows.register_fake
def _(o: Tensor, *_: Any) -> Tensor:
    return torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device)


@fused_scaled_rows_backward.register_fake
def _(
    dy: Tensor,
    o: Tensor,
    log_gain: Tensor,
    log_divisor: Tensor | None,
    gate: Tensor | None,
    log_slope: Tensor | None,
    sums: bool,
    rows_are_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    do = torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device)
    kept = o.new_empty(0) if log_slope is None else torch.empty_like(do)
    read = sums or log_slope is not None
    return do, kept, log_gain.new_empty(log_gain.shape if read else (0,), dtype=torch.float32)


@operator("maclaurin::row_products")
def row_products(do: Tensor, o: Tensor) -> Tensor:
    """Σ do∘o [B, H, T] in fp32."""
    from maclaurin.programs.triton import rows as program

    return program.delta(do, o, None)


@row_products.register_fake
def _(do: Tensor, o: Tensor) -> Tensor:
    return o.new_empty(o.shape[:3], dtype=torch.float32)
