"""How a spec's tensors become the operands of a fused program, and what follows on the program's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.forms.inputs import Inputs, gated_values, working_dtype
from maclaurin.forms.output import SeenByRows, running_log_sum
from maclaurin.forms.state import State
from maclaurin.programs import triton as gpu
from maclaurin.programs.program import Call
from maclaurin.spec import AttentionSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_HEAD = 128


def refuse_tensors(call: Call) -> str | None:
    """Why fused programs do not take such tensors; None if they do."""
    q, k, v = call.inputs.q, call.inputs.k, call.inputs.v
    if not gpu.runs_on(call.device):
        return gpu.why_not_on(call.device)
    if q.dtype not in DTYPES or q.dtype != k.dtype or q.dtype != v.dtype:
        return "it computes in fp32, fp16 or bf16"
    if not call.is_aligned:
        return "it takes a query with every key"
    if not call.causal and call.inputs.present is not None:
        return "without a causal mask it knows no padding"
    if max(q.shape[3], v.shape[3]) > _LARGEST_HEAD:
        return f"it takes heads of up to {_LARGEST_HEAD}"
    return gpu.why_addresses_do_not_fit(q, k, v)


def refuse_features(spec: AttentionSpec, dtype: torch.dtype) -> str | None:
    """Why φ(q) and φ(k) cannot be operands: they would lose digits in the dtype a program multiplies in."""
    feature_map = spec.kernel.feature_map
    loses = feature_map is not None and not feature_map.keeps_digits and dtype != torch.float32
    return f"the features of {feature_map} would lose digits in 16 bits" if loses else None


def operands(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with φ and the value gates applied, rounded to the dtype a program multiplies in."""
    q, k, v = inputs.q, inputs.k, inputs.v
    feature_map, dtype = spec.kernel.feature_map, working_dtype(q.dtype)
    if feature_map is not None and not feature_map.is_identity:
        q, k = (feature_map(u.to(dtype)).to(u.dtype) for u in (q, k))
    if spec.value_gates:
        v = gated_values(spec, v.to(dtype), inputs.gates).to(v.dtype)
    return gpu.dense(q), gpu.dense(k), gpu.dense(v)


# ------------------------------------------------- rows over their sum, over t, or as they are


def refuse_denominator(spec: AttentionSpec) -> str | None:
    """Why a program cannot leave rows that the denominator still divides; None if it can."""
    denominator = spec.denominator
    if denominator is None or denominator.fused is not None or not denominator.uses_row_sum:
        return None
    return f"it does not divide by {denominator}"


def row_divisor(spec: AttentionSpec, before: Tensor | None = None) -> tuple[str, float]:
    """What a program divides rows by ("sum", "count" or "one"), and what is added to a sum.

    The count is that of this call's keys: where others came `before` [B], it is not the spec's. Under a norm
    that does not see it, dividing by it keeps numbers small.
    """
    fused = None if spec.denominator is None else spec.denominator.fused
    if fused is not None and fused.by == "sum":
        return "sum", fused.eps
    counted = fused is not None and before is None
    return ("count" if counted or spec.ignores_row_scale else "one"), 0.0


def rows_are_divided(spec: AttentionSpec, before: Tensor | None = None) -> bool:
    """Whether a program's rows lack nothing of the spec's denominator."""
    if spec.denominator is None or spec.ignores_row_scale:
        return True
    return spec.denominator.fused is not None and row_divisor(spec, before)[0] != "one"


def rows_are_final(spec: AttentionSpec, dtype: torch.dtype, before: Tensor | None = None) -> bool:
    """Whether nothing follows on a program's rows but rounding to bf16, which it then does itself."""
    alone = spec.norm is None and not spec.gates_before_norm
    return alone and rows_are_divided(spec, before) and dtype == torch.bfloat16


def over_denominator(
    spec: AttentionSpec, inputs: Inputs, y: Tensor, causal: bool, state: State | None = None
) -> tuple[Tensor, Tensor | None]:
    """A program's rows [B, T, H, e] over what is left of the denominator, and its running sum, if any."""
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
