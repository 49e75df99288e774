"""An exact window with sinks beside a polynomial tail, both on fused programs.

    y = (e^{lse − r} o + z y_tail) / (e^{lse − r} + z) = g o + (1 − g) y_tail,       g = σ(lse − r − ln z)

o, lse are softmax rows over the exact keys (changed_score.py). The tail of query t are the keys from the
first after the sinks up to t − w: queries from w + sinks on and those keys, laid side by side, are causal
attention of their own, in linear time (linear_time.py), with rows y_tail of weight z. The tail stands for
e^{x − r}, r the row's mean score in it, or 0.

A text that goes on from a state is laid behind the keys the state keeps, sinks and window, as if it began
with them; the tail begins with the state's moments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.backends import triton as programs
from maclaurin.backends.changed_score import exact_rows
from maclaurin.backends.fused_inputs import operands, tensors_are_served
from maclaurin.backends.linear_time import head_is_served, linear_sums, moments_can_move, scores_of_own_key
from maclaurin.backends.operators import is_recording
from maclaurin.backends.row_norm import finish_rows
from maclaurin.forms.inputs import Inputs, working_dtype
from maclaurin.forms.state import State
from maclaurin.forms.window import ExactKeys
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
    o, _ = _rows(spec, inputs, scale, chunk, None, False)
    return finish_rows(spec, o, inputs.output_gate, inputs.q.dtype)


def window_tail_carries_state(spec: AttentionSpec, inputs: Inputs, state: State | None) -> bool:
    """Whether the tail has begun in this state, or begins in this text that has none."""
    assert spec.window is not None
    known = programs.runs_on(inputs.q.device) and moments_can_move(spec) and not spec.input_gate
    if not known or inputs.present is not None or is_recording():
        return False
    first = spec.window.size + spec.window.sinks
    if state is None:
        return inputs.q.shape[1] > first
    return state.moments.dtype == torch.float32 and bool((state.count >= first).all())


def window_tail_from_state(
    spec: AttentionSpec, inputs: Inputs, state: State | None, *, scale: float, chunk: int | None
) -> tuple[Tensor, State]:
    """y [B, T, H, e] in the dtype of q, and the state after the last token."""
    batch, tokens = inputs.k.shape[:2]
    line = inputs if state is None else _behind_kept_keys(inputs, state)
    o, moments = _rows(spec, line, scale, chunk, None if state is None else state.moments, True)
    before = torch.zeros(batch, dtype=torch.int64, device=o.device) if state is None else state.count
    after = State(spec, moments, before + tokens, exact=_kept_keys(spec, line))
    return finish_rows(spec, o[:, -tokens:], inputs.output_gate, inputs.q.dtype), after


def _behind_kept_keys(inputs: Inputs, state: State) -> Inputs:
    """The text behind sinks and window of the state, with queries there that nobody asks."""
    exact = state.exact
    assert exact is not None

    def kept(sinks: Tensor, recent: Tensor, new: Tensor) -> Tensor:
        return torch.cat([torch.cat([sinks, recent], dim=2).transpose(1, 2).to(new.dtype), new], dim=1)

    k = kept(exact.sink_k, exact.recent_k, inputs.k)
    idle = inputs.q.new_zeros(inputs.q.shape[0], k.shape[1] - inputs.q.shape[1], *inputs.q.shape[2:])
    return Inputs(torch.cat([idle, inputs.q], dim=1), k, kept(exact.sink_v, exact.recent_v, inputs.v))


def _kept_keys(spec: AttentionSpec, line: Inputs) -> ExactKeys:
    """The last w and the first keys and values of the line, as a state keeps them."""
    assert spec.window is not None
    k, v = (u.to(working_dtype(u.dtype)).transpose(1, 2) for u in (line.k, line.v))
    size, sinks = spec.window.size, spec.window.sinks
    return ExactKeys(k[:, :, -size:], v[:, :, -size:], k[:, :, :sinks], v[:, :, :sinks])


def _rows(
    spec: AttentionSpec, inputs: Inputs, scale: float, chunk: int | None, initial: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """Rows [B, T, H, e], and, to keep, the moments of the tail after the last of them."""
    assert spec.window is not None
    exact, lse = exact_rows(spec, inputs, scale=scale, causal=True)
    o, moments = exact.transpose(1, 2), exact.new_empty(0)
    first = spec.window.size + spec.window.sinks
    if first < inputs.q.shape[1]:
        tail, log_mass, moments = _tail_rows(spec, inputs, scale, chunk, initial, keep)
        share = torch.sigmoid(lse[:, :, first:] - log_mass).transpose(1, 2)[..., None]
        o = torch.cat([o[:, :first], (share * o[:, first:] + (1 - share) * tail).to(o.dtype)], dim=1)
    return o, moments


def _is_normalised(spec: AttentionSpec) -> bool:
    """Whether rows are divided by their plain sum, or by nothing that a norm would see."""
    if isinstance(spec.denominator, RowSum):
        return not spec.denominator.sees_row_scale
    return spec.ignores_row_scale


def _tail_rows(
    spec: AttentionSpec, inputs: Inputs, scale: float, chunk: int | None, initial: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the tail [B, T', H, e], what they weigh, ln(e^r z) [B, H, T'], and moments to keep."""
    assert spec.window is not None
    size, sinks = spec.window.size, spec.window.sinks
    q, k, v = operands(spec, inputs)
    tail = slice(sinks, q.shape[1] - size)
    present = None if inputs.present is None else inputs.present[:, tail]
    q = q[:, size + sinks :]
    found = linear_sums(
        spec,
        (q, k[:, tail], v[:, tail]),
        present,
        None,
        initial,
        ("sum", 0.0),
        scale=scale,
        chunk=chunk,
        keep=keep,
        final=False,
    )
    log_mass = found.divisors.log()
    if found.centred is not None:
        log_mass = log_mass + found.centred.mean + scores_of_own_key(q, found.centred.offset, scale)
    return found.rows, log_mass, found.moments
