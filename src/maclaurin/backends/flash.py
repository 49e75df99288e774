"""The exp family through torch's scaled_dot_product_attention.

L2, RMS and LayerNorm ignore a positive factor per row, and so does the row sum:

    N(Σ e^x v) = N(softmax(x) V)

so one call to a fused softmax serves exp under a row sum and under any norm per head.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from maclaurin.forms.attend import Inputs, working_dtype
from maclaurin.forms.epilogue import gated_and_normed
from maclaurin.forms.stream import causal_mask
from maclaurin.spec import AttentionSpec, RowSum


def flash_serves(spec: AttentionSpec) -> bool:
    """Whether softmax(x)V and a function of its rows is all that the spec asks for."""
    detached = isinstance(spec.denominator, RowSum) and spec.denominator.detach and spec.norm is None
    return spec.has_series and not spec.forget_gate and spec.ignores_row_scale and not detached


def flash_attend(spec: AttentionSpec, inputs: Inputs, *, scale: float, causal: bool) -> Tensor:
    """y [B, T, H, e] in the dtype of q."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.input_gate is not None:
        v = v * inputs.input_gate[..., None].to(v.dtype)
    mask, is_causal = _mask(inputs, causal)
    grouped = True if q.shape[2] != k.shape[2] else False  # noqa: SIM210 (a plain bool for symbolic sizes)
    y = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=grouped,
    ).transpose(1, 2)
    if spec.norm is None and not spec.output_gate:
        return y
    gate = inputs.output_gate
    dtype = working_dtype(q.dtype)
    return gated_and_normed(spec, y.to(dtype), None if gate is None else gate.to(dtype)).to(q.dtype)


def _mask(inputs: Inputs, causal: bool) -> tuple[Tensor | None, bool]:
    """The mask SDPA needs beside its own causal flag, which aligns the first query to the first key.

    Right padding needs none when causal: no real query sees a later key.
    """
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    if causal:
        if queries == keys:
            return None, True
        return (None if queries == 1 else causal_mask(queries, keys, inputs.q.device)), False
    if inputs.present is None:
        return None, False
    seen = inputs.present | ~inputs.present.any(-1, keepdim=True)  # an empty row sees zeros
    return seen[:, None, None, :].expand(-1, 1, queries, -1), False
