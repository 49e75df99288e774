"""From sums over keys to the output:  y_t = p_t N( o_t Σ_s w_s v_s / denominator )."""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.forms.divisors import counts_keys, floored
from maclaurin.forms.stream import Rows
from maclaurin.spec import AttentionSpec, RowSum, RunningSum


def finish(
    spec: AttentionSpec,
    rows: Rows,
    *,
    visible_keys: Tensor,
    running: Tensor | None,
    output_gate: Tensor | None,
) -> Tensor:
    """y [B, T, H, e] from rows [B, K, G, T, …].

    visible_keys [B, T], running [B, T, H] (ln of the learned denominator), output_gate [B, T, H].
    """
    y = divided(spec, rows, visible_keys, running).flatten(1, 2).transpose(1, 2)
    return gated_and_normed(spec, y, output_gate)


def gated_and_normed(spec: AttentionSpec, y: Tensor, output_gate: Tensor | None) -> Tensor:
    """p_t N(o_t y_t) for y [B, T, H, e] and a gate [B, T, H] or [B, T, H, e]."""
    if output_gate is not None and output_gate.dim() == 3:
        output_gate = output_gate[..., None]
    if spec.output_gate and output_gate is not None:
        y = y * output_gate
    if spec.norm is not None:
        y = spec.norm(y)
    if spec.gate_after_norm and output_gate is not None:
        y = y * output_gate
    return y


def divided(spec: AttentionSpec, rows: Rows, visible_keys: Tensor, running: Tensor | None) -> Tensor:
    """The numerator over the denominator; where both are zero, zero."""
    if isinstance(spec.denominator, RowSum):
        return rows.numerator / _row_sum(spec.denominator, rows)[..., None]
    y = rows.numerator
    log_gain = None if spec.ignores_row_scale else rows.log_scale
    if log_gain is not None and spec.norm is not None and spec.norm.ignores_row_scale:
        log_gain = log_gain - log_gain.amax((1, 2), keepdim=True)  # a norm over the heads sees ratios only
    if counts_keys(spec):
        y = y / visible_keys.clamp(min=1)[:, None, None, :, None]
    if isinstance(spec.denominator, RunningSum):
        assert running is not None
        log_sum = floored(spec.denominator, running).transpose(1, 2).unflatten(1, y.shape[1:3])
        log_gain = -log_sum if log_gain is None else log_gain - log_sum
    return y if log_gain is None else y * log_gain.exp()[..., None]


def _row_sum(denominator: RowSum, rows: Rows) -> Tensor:
    """max(row sum + eps, floor) in the units of the numerator, 1 where it is zero."""
    assert rows.row_sum is not None
    unit = 1.0 if rows.log_scale is None else (-rows.log_scale).exp()
    total = rows.row_sum
    if denominator.eps is not None:
        total = total + denominator.eps * unit
    if denominator.floor is not None:
        total = total.clamp(min=denominator.floor * unit)  # type: ignore[call-overload]
    if denominator.detach:
        total = total.detach()
    return torch.where(total == 0, 1.0, total)
