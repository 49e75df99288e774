"""An exact window with sinks beside a polynomial tail, both on fused programs.

    y = (e^{lse − r} o + z y_tail) / (e^{lse − r} + z) = g o + (1 − g) y_tail,       g = σ(lse − r − ln z)

o, lse are softmax rows over the exact keys (changed_score.py). The tail of query t are the keys from the
first after the sinks up to t − w: queries from w + sinks on and those keys, laid side by side, are causal
attention of their own, in linear time (linear_time.py), with rows y_tail of weight z. The tail stands for
e^{x − r}, r the row's mean score in it, or 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.backends.changed_score import exact_rows
from maclaurin.backends.fused_inputs import operands, tensors_are_served
from maclaurin.backends.linear_operator import linear_polynomial
from maclaurin.backends.linear_time import (
    chunk_for,
    head_is_served,
    mean_score,
    padded_series,
    row_coefficients,
    scores_of_own_key,
)
from maclaurin.backends.row_norm import finish_rows
from maclaurin.forms.inputs import Inputs, mean_key
from maclaurin.spec import AttentionSpec, RowSum, Taylor
from maclaurin.spec.sign import Sign


def window_tail_serves(spec: AttentionSpec, inputs: Inputs, causal: bool) -> bool:
    """Whether this is a window beside a tail that the fused programs know, in a text that starts here."""
    if spec.window is None or not isinstance(spec.kernel, Taylor) or spec.forget_gate or not causal:
        return False
    order, d = max(spec.orders or (0,)), inputs.q.shape[3]
    low = order < 3 and head_is_served(order, d)
    per_head = spec.norm is None or spec.norm.per_head
    positive = spec.kernel.row_sum_sign is Sign.POSITIVE
    return low and per_head and positive and _is_normalised(spec) and tensors_are_served(inputs, causal)


def window_tail_attend(spec: AttentionSpec, inputs: Inputs, *, scale: float, chunk: int | None) -> Tensor:
    """y [B, T, H, e] in the dtype of q."""
    assert spec.window is not None
    exact, lse = exact_rows(spec, inputs, scale=scale, causal=True)
    o = exact.transpose(1, 2)
    first = spec.window.size + spec.window.sinks
    if first < inputs.q.shape[1]:
        tail, log_mass = _tail_rows(spec, inputs, scale, chunk)
        share = torch.sigmoid(lse[:, :, first:] - log_mass).transpose(1, 2)[..., None]
        o = torch.cat([o[:, :first], (share * o[:, first:] + (1 - share) * tail).to(o.dtype)], dim=1)
    return finish_rows(spec, o, inputs.output_gate, inputs.q.dtype)


def _is_normalised(spec: AttentionSpec) -> bool:
    """Whether rows are divided by their plain sum, or by nothing that a norm would see."""
    if isinstance(spec.denominator, RowSum):
        return not spec.denominator.sees_row_scale
    return spec.ignores_row_scale


def _tail_rows(spec: AttentionSpec, inputs: Inputs, scale: float, chunk: int | None) -> tuple[Tensor, Tensor]:
    """Rows of the tail [B, T', H, e] and ln(e^r z), what they weigh [B, H, T'], of the last T' queries."""
    assert spec.window is not None
    size, sinks = spec.window.size, spec.window.sinks
    q, k, v = operands(spec, inputs)
    tokens = q.shape[1]
    q, k, v = q[:, size + sinks :], k[:, sinks : tokens - size], v[:, sinks : tokens - size]
    alpha, reference = None, 0.0
    if spec.kernel.depends_on_row:
        present = None if inputs.present is None else inputs.present[:, sinks : tokens - size]
        centre = mean_key(k, present).to(k.dtype)
        k = k - centre
        mean = mean_score(q, k, scale)
        alpha = row_coefficients(spec, mean, scale)
        reference = mean + scores_of_own_key(q, centre, scale)
    y, z, *_ = linear_polynomial(
        q,
        k,
        v,
        alpha,
        None,
        None,
        padded_series(spec, scale),
        "sum",
        0.0,
        chunk_for(spec, chunk, q.shape[1]),
        list(spec.orders or ()),
        False,
        False,
    )
    return y, z.log() + reference
