"""The exp family through torch's fused softmax attention.

L2, RMS and LayerNorm ignore a positive factor per row, and so does the row sum:

    N(Σ e^x v) = N(softmax(x) V)

so one call to a fused softmax serves exp under a row sum and under any norm per head. Every other
denominator is a gain per row on the same call (backends/row_gain.py).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from maclaurin.backends.normed_softmax import normed_softmax, normed_softmax_serves
from maclaurin.backends.row_gain import gained_softmax
from maclaurin.backends.row_norm import finish_rows
from maclaurin.backends.stock_softmax import stock_softmax
from maclaurin.forms.divisors import log_divisor
from maclaurin.forms.inputs import Inputs, working_dtype
from maclaurin.forms.stream import causal_mask
from maclaurin.spec import AttentionSpec, RowSum


def flash_serves(spec: AttentionSpec, inputs: Inputs, causal: bool) -> bool:
    """Whether softmax(x)V and a function of its rows is all that the spec asks for."""
    if not spec.has_series or spec.forget_gate:
        return False
    return _needs_no_gain(spec) or _gain_serves(spec, inputs, causal)


def flash_attend(spec: AttentionSpec, inputs: Inputs, *, scale: float, causal: bool) -> Tensor:
    """y [B, T, H, e] in the dtype of q."""
    if inputs.input_gate is not None:
        v = inputs.v * inputs.input_gate[..., None].to(inputs.v.dtype)
        inputs = inputs.with_values(v)
    if _needs_no_gain(spec):
        if normed_softmax_serves(spec, inputs, causal):
            return normed_softmax(spec, inputs, scale=scale, causal=causal)
        y = _softmax(inputs, scale, causal)
        return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype)
    gate = inputs.output_gate
    if spec.norm is None and spec.output_gate and gate is not None and gate.dim() == 3:
        return _gained(spec, inputs, gate, scale, causal)
    return finish_rows(spec, _gained(spec, inputs, None, scale, causal), gate, inputs.q.dtype)


def _needs_no_gain(spec: AttentionSpec) -> bool:
    detached = isinstance(spec.denominator, RowSum) and spec.denominator.detach and spec.norm is None
    return spec.ignores_row_scale and not detached


def _softmax(inputs: Inputs, scale: float, causal: bool) -> Tensor:
    q, k, v = inputs.q, inputs.k, inputs.v
    mask, is_causal = _mask(inputs, causal)
    grouped = True if q.shape[2] != k.shape[2] else False  # noqa: SIM210 (a plain bool for symbolic sizes)
    return scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=grouped,
    ).transpose(1, 2)


def _gain_serves(spec: AttentionSpec, inputs: Inputs, causal: bool) -> bool:
    """A norm over several heads sees their relative gains, which may overflow: that stays with the forms."""
    over_heads = spec.norm is not None and not spec.norm.per_head
    aligned = inputs.q.shape[1] == inputs.k.shape[1] if causal else inputs.present is None
    return not over_heads and aligned and stock_softmax(inputs.q, inputs.k, inputs.v) is not None


def _gained(spec: AttentionSpec, inputs: Inputs, gate: Tensor | None, scale: float, causal: bool) -> Tensor:
    """The rows over their denominator, times a gate per head where one is given."""
    row_sum = spec.denominator if isinstance(spec.denominator, RowSum) else None
    divisor = log_divisor(spec, inputs, causal)
    q, k, v = (u.transpose(1, 2) for u in (inputs.q, inputs.k, inputs.v))
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    e = v.shape[-1]
    size = max(q.shape[-1], e)
    size += -size % (8 if q.device.type == "cuda" else 1)  # what fused programs take
    y = gained_softmax(
        *(_padded(u, size) for u in (q, k, v)),
        row_sum=row_sum,
        log_divisor=None if divisor is None else divisor.transpose(1, 2).expand(q.shape[:3]).contiguous(),
        gate=None if gate is None else gate.to(working_dtype(q.dtype)).transpose(1, 2).contiguous(),
        scale=scale,
        causal=causal,
    )
    return y[..., :e].transpose(1, 2)


def _padded(u: Tensor, size: int) -> Tensor:
    return u if u.shape[-1] == size else pad(u, (0, size - u.shape[-1]))


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
