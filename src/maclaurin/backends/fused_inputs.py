"""What the fused programs take: which tensors, and how a spec's tensors become theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.backends import triton as programs
from maclaurin.forms.divisors import visible_keys
from maclaurin.forms.inputs import Inputs, working_dtype
from maclaurin.spec import AttentionSpec, RowSum, VisibleKeys
from maclaurin.spec.feature_map import Identity

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_HEAD = 128


def tensors_are_served(inputs: Inputs, causal: bool) -> bool:
    """Whether programs take such tensors; without a causal mask they know no padding."""
    q, k, v = inputs.q, inputs.k, inputs.v
    aligned = q.shape[1] == k.shape[1] > 0 and (causal or inputs.present is None)
    same = q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES
    small = max(q.shape[3], v.shape[3]) <= _LARGEST_HEAD
    return aligned and same and small and programs.runs_on(q.device) and programs.addresses_fit(q, k, v)


def loses_digits(spec: AttentionSpec, inputs: Inputs) -> bool:
    """Whether φ(q) and φ(k) would lose digits in the dtype a program multiplies in."""
    feature_map = spec.kernel.feature_map
    return feature_map is not None and not feature_map.keeps_digits and inputs.q.dtype != torch.float32


def operands(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with φ and the input gate applied, rounded to the dtype a program multiplies in."""
    q, k, v = inputs.q, inputs.k, inputs.v
    feature_map, dtype = spec.kernel.feature_map, working_dtype(q.dtype)
    if feature_map is not None and not isinstance(feature_map, Identity):
        q, k = (feature_map(u.to(dtype)).to(u.dtype) for u in (q, k))
    if inputs.input_gate is not None:
        v = (v.to(dtype) * inputs.input_gate.to(dtype)[..., None]).to(v.dtype)
    return programs.dense(q), programs.dense(k), programs.dense(v)


# ------------------------------------------------- rows over their sum, over t, or as they are


def denominator_is_served(spec: AttentionSpec) -> bool:
    """Whether a program that divides by the row sum and eps, by t, or not at all, knows the denominator."""
    denominator = spec.denominator
    if isinstance(denominator, RowSum):
        return denominator.floor is None and not denominator.detach
    return denominator is None or isinstance(denominator, VisibleKeys)


def row_divisor(spec: AttentionSpec, before: Tensor | None = None) -> tuple[str, float]:
    """What a program divides rows by ("sum", "count" or "one"), and what is added to a sum.

    The count is that of this call's keys: where others came `before` [B], it is not the spec's. Under a norm
    that does not see it, it keeps numbers small.
    """
    if isinstance(spec.denominator, RowSum):
        return "sum", spec.denominator.eps or 0.0
    counted = spec.denominator is not None and before is None
    return "count" if counted or spec.ignores_row_scale else "one", 0.0


def over_denominator(
    spec: AttentionSpec, inputs: Inputs, y: Tensor, causal: bool, before: Tensor | None
) -> Tensor:
    """The rows of such a program over what is left of the spec's denominator."""
    if _is_divided(spec, before):
        return y
    return y / visible_keys(inputs, before, causal)[..., None, None]


def rows_are_final(spec: AttentionSpec, inputs: Inputs, before: Tensor | None = None) -> bool:
    """Whether nothing follows on a program's rows but rounding to bf16, which it then does itself."""
    alone = spec.norm is None and not spec.output_gate
    return alone and _is_divided(spec, before) and inputs.q.dtype == torch.bfloat16


def _is_divided(spec: AttentionSpec, before: Tensor | None) -> bool:
    """Whether a program's rows lack nothing of the spec's denominator."""
    return spec.denominator is None or row_divisor(spec, before)[0] != "one"
