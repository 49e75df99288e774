"""One right-padded batch through one form: inputs → stream → rows → output and state."""

from __future__ import annotations

import dataclasses
import enum
from functools import partial

from torch import Tensor

from maclaurin.forms.chunked import blocked_rows, chunked_rows
from maclaurin.forms.divisors import log_running_sum, visible_keys
from maclaurin.forms.epilogue import finish
from maclaurin.forms.inputs import Inputs, clamped_log_forget, mean_key, working_dtype
from maclaurin.forms.parallel import parallel_rows
from maclaurin.forms.recurrent import recurrent_rows
from maclaurin.forms.state import State
from maclaurin.forms.stream import Rows, Stream
from maclaurin.forms.window import window_rows
from maclaurin.spec import AttentionSpec


class Form(enum.Enum):
    """The ways to compute one spec; blocked is parallel with a block of queries at a time."""

    PARALLEL = "parallel"
    BLOCKED = "blocked"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"


def make_stream(spec: AttentionSpec, inputs: Inputs, scale: float) -> Stream:
    """φ, the scale and the input gate applied; heads before tokens; fp32 or fp64."""
    dtype = working_dtype(inputs.q.dtype)
    q, k, v = (u.to(dtype).transpose(1, 2) for u in (inputs.q, inputs.k, inputs.v))
    if spec.kernel.feature_map is not None:
        q, k = spec.kernel.feature_map(q), spec.kernel.feature_map(k)
    if inputs.input_gate is not None:
        v = v * inputs.input_gate.to(dtype).transpose(1, 2)[..., None]
    q = (q * scale).unflatten(1, (k.shape[1], -1))
    return Stream(q, k, v, clamped_log_forget(inputs), inputs.present)


def attend(
    spec: AttentionSpec,
    inputs: Inputs,
    form: Form,
    *,
    scale: float,
    causal: bool,
    chunk: int,
    state: State | None,
    return_state: bool,
) -> tuple[Tensor, State | None]:
    """The output [B, T, H, e] in the dtype of q, and the state after the last token if wanted.

    The recurrent form, and any form with a state, needs a spec with a finite one.
    """
    stream = make_stream(spec, inputs, scale)
    heads = inputs.q.shape[2]
    if spec.kernel.depends_on_row and state is None and not return_state:
        stream = _with_centred_keys(stream)
    after = None
    if form is Form.PARALLEL:
        rows = parallel_rows(spec, stream, causal=causal)
    elif form is Form.BLOCKED:
        rows = blocked_rows(spec, stream, chunk, causal=causal)
    else:
        before = State.empty(spec, stream, heads) if state is None else state
        rows, after = _rows_with_state(spec, stream, form, before, chunk, causal)
    running = log_running_sum(spec, inputs, None if state is None else state.running, causal)
    y = finish(
        spec,
        rows,
        visible_keys=visible_keys(inputs, None if state is None else state.count, causal),
        running=running,
        output_gate=None if inputs.output_gate is None else inputs.output_gate.to(stream.q.dtype),
    )
    if after is not None and return_state:
        after = dataclasses.replace(after, running=None if running is None else running[:, -1])
    return y.to(inputs.q.dtype), after if return_state else None


def _with_centred_keys(stream: Stream) -> Stream:
    """The mean key taken off every key, which kernels that look at their row do not see.

    Their moments are then those of small scores: re-centring cancels less. A state must add up with
    others, so it is made of the keys as they are.
    """
    mean = mean_key(stream.k.transpose(1, 2), stream.present).transpose(1, 2)
    return dataclasses.replace(stream, k=stream.k - mean)


def _rows_with_state(
    spec: AttentionSpec, stream: Stream, form: Form, state: State, chunk: int, causal: bool
) -> tuple[Rows, State]:
    """Rows and the state after them, by the chunked or the recurrent form."""
    chunk = 1 if form is Form.RECURRENT else min(chunk, stream.q.shape[-2])
    exact = state.exact
    if exact is None:
        if form is Form.RECURRENT:
            rows, _, moments = recurrent_rows(spec, stream, state.moments)
        else:
            rows, _, moments = chunked_rows(spec, stream, state.moments, chunk, causal=causal)
    elif form is Form.RECURRENT:
        parts, moments, count = [], state.moments, state.count
        for t in range(stream.q.shape[-2]):
            token = stream.tokens(t, t + 1)
            part, moments, exact = window_rows(spec, token, count, moments, exact, recurrent_rows, 1)
            count = count + token.lengths
            parts.append(part)
        rows = Rows.concatenate(parts)
    else:
        tail = partial(chunked_rows, chunk=chunk)
        rows, moments, exact = window_rows(spec, stream, state.count, state.moments, exact, tail, chunk)
    log_decay = state.log_decay
    if log_decay is not None and stream.log_forget is not None:
        log_decay = log_decay + stream.log_forget.sum(-1)
    count = state.count + stream.lengths
    return rows, dataclasses.replace(state, moments=moments, count=count, log_decay=log_decay, exact=exact)
