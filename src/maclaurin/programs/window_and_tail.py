"""An exact window with sinks beside a polynomial tail, both on fused programs.

    y = (e^{lse − r} o + z y_tail) / (e^{lse − r} + z) = g o + (1 − g) y_tail,       g = σ(lse − r − ln z)

o, lse are softmax rows over the exact keys (score_mod.py). The tail of query t are the keys from the first
after the sinks up to t − w: queries from w + sinks on and those keys, laid side by side, are causal attention
of their own, in linear time (linear_time.py), with rows y_tail of weight z. The tail stands for e^{x − r}, r
the row's mean score in it, or 0.

A text that goes on from a state is laid behind the keys the state keeps, sinks and window, as if it began
with them; the tail begins with the state's moments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.inputs import Inputs
from maclaurin.forms.state import State
from maclaurin.forms.tracing import is_tracing
from maclaurin.forms.window import ExactKeys
from maclaurin.programs.linear_time import (
    chunk_for,
    linear_cost,
    linear_sums,
    refuse_head,
    refuse_moving,
    scores_of_own_key,
)
from maclaurin.programs.operands import finish_rows, operands, refuse_tensors
from maclaurin.programs.program import Call, Cost, Program
from maclaurin.programs.score_mod import exact_rows
from maclaurin.spec import AttentionSpec, Sign, Window


class WindowAndTail(Program):
    """A plain window beside a positive tail of order 1 or 2."""

    name = "window and tail"
    backend = "triton"
    form = Form.CHUNKED

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        return (
            _refuse_spec(spec, call.inputs.q.shape[3])
            or ("it is causal" if not call.causal else None)
            or ("a step has programs of its own" if call.is_step else None)
            or refuse_tensors(call)
            or (_refuse_state(call) if call.carries_state else None)
        )

    def chunk(self, call: Call) -> int:
        return chunk_for(call.spec, call.chunk_size, call.queries)

    def cost(self, call: Call) -> Cost:
        return linear_cost(call, self.chunk(call))

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        spec, inputs, state = call.spec, call.inputs, call.state
        line = inputs if state is None else behind_exact_keys(inputs, state)
        with torch.autocast(call.device.type, enabled=False):
            o, moments = _rows(call, line)
            y = finish_rows(spec, o[:, -call.queries :], inputs.gates, inputs.q.dtype)
        if not call.return_state:
            return y, None
        k = inputs.k
        before = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device) if state is None else state.count
        exact = exact_keys_of(_window(spec), line)
        return y, State(spec, moments, before + call.keys, exact=exact, is_full=True)


def _window(spec: AttentionSpec) -> Window:
    assert spec.window is not None
    return spec.window


def _refuse_spec(spec: AttentionSpec, d: int) -> str | None:
    weight = spec.kernel.fused
    if spec.window is None or weight is None or weight.function != "polynomial" or not spec.orders:
        return "it is for a window beside a polynomial tail"
    if not spec.window.is_plain:
        return f"it does not compute {spec.window}"
    if spec.decay_gates:
        return "it has no decay gate"
    if spec.norm is not None and not spec.norm.per_head:
        return "a norm over several heads sees gains that may overflow"
    if spec.kernel.row_sum_sign is not Sign.POSITIVE:
        return "the tail's row sum must be positive"
    if not spec.ignores_row_scale:
        return "rows must be divided by their plain sum, or a norm must follow"
    return "it goes up to order 2" if spec.highest_order > 2 else refuse_head(spec.highest_order, d)


def _refuse_state(call: Call) -> str | None:
    """Why it does not go on from such a state, or gives none back."""
    spec, state = call.spec, call.state
    if call.inputs.present is not None:
        return "with a state it knows no padding"
    if spec.value_gates:
        return "with a state it has no value gate"
    if why := refuse_moving(spec):
        return why
    first = _window(spec).size + _window(spec).sinks
    if state is None:
        return None if call.queries > first else "the text is shorter than window and sinks"
    if state.moments.dtype != torch.float32:
        return "it keeps states in fp32"
    return refuse_unfilled(state, first)


def refuse_unfilled(state: State, first: int) -> str | None:
    """Why the tail may not have begun: the state holds fewer keys than window and sinks, or nobody knows."""
    if state.is_full:
        return None
    if is_tracing() or state.count.is_meta or bool((state.count < first).any()):
        return "the state may hold fewer keys than window and sinks"
    return None


def behind_exact_keys(inputs: Inputs, state: State) -> Inputs:
    """The text behind sinks and window of the state, with queries of zeros there, whose rows are dropped."""
    exact = state.exact
    assert exact is not None

    def kept(sinks: Tensor, recent: Tensor, new: Tensor) -> Tensor:
        return torch.cat([torch.cat([sinks, recent], dim=2).transpose(1, 2).to(new.dtype), new], dim=1)

    k = kept(exact.sink_k, exact.recent_k, inputs.k)
    idle = inputs.q.new_zeros(inputs.q.shape[0], k.shape[1] - inputs.q.shape[1], *inputs.q.shape[2:])
    return Inputs(torch.cat([idle, inputs.q], dim=1), k, kept(exact.sink_v, exact.recent_v, inputs.v))


def exact_keys_of(window: Window, line: Inputs) -> ExactKeys:
    """The last w and the first keys and values of the line, as a state keeps them."""
    k, v = (u.transpose(1, 2) for u in (line.k, line.v))
    size, sinks = window.size, window.sinks
    return ExactKeys(k[:, :, -size:], v[:, :, -size:], k[:, :, :sinks], v[:, :, :sinks])


def _rows(call: Call, line: Inputs) -> tuple[Tensor, Tensor]:
    """Rows [B, T, H, e] of the line, and, where a state is wanted, the tail's moments after the last one."""
    window = _window(call.spec)
    exact, lse = exact_rows(call.spec, line, scale=call.scale, causal=True)
    o, moments = exact.transpose(1, 2), exact.new_empty(0)
    first = window.size + window.sinks
    if first < line.q.shape[1]:
        tail, log_mass, moments = _tail_rows(call, line)
        share = torch.sigmoid(lse[:, :, first:] - log_mass).transpose(1, 2)[..., None]
        o = torch.cat([o[:, :first], (share * o[:, first:] + (1 - share) * tail).to(o.dtype)], dim=1)
    return o, moments


def _tail_rows(call: Call, line: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the tail [B, T', H, e], what they weigh, ln(e^r z) [B, H, T'], and moments to keep."""
    spec, window = call.spec, _window(call.spec)
    q, k, v = operands(spec, line)
    tail = slice(window.sinks, q.shape[1] - window.size)
    q = q[:, window.size + window.sinks :]
    found = linear_sums(
        spec,
        (q, k[:, tail], v[:, tail]),
        None,
        None if call.state is None else call.state.moments,
        ("sum", 0.0),
        scale=call.scale,
        chunk=call.chunk_size,
        keep=call.return_state,
        final=False,
    )
    log_mass = found.divisors.log()
    if found.centred is not None:
        log_mass = log_mass + found.centred.mean
        if found.centred.offset is not None:
            log_mass = log_mass + scores_of_own_key(q, found.centred.offset, call.scale)
    return found.rows, log_mass, found.moments
