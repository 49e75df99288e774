"""The plain forms: one right-padded batch through one form, in plain torch, on any device.

inputs → stream → rows (parallel, blocked, chunked or recurrent) → denominator, gates, norm → output
"""

from __future__ import annotations

import dataclasses
import enum
from functools import partial

from torch import Tensor

from maclaurin.forms.chunked import blocked_rows, chunked_rows
from maclaurin.forms.kept import rows_of_window_and_tail
from maclaurin.forms.output import SeenByRows, finish, running_log_sum
from maclaurin.forms.parallel import parallel_rows
from maclaurin.forms.recurrent import recurrent_rows
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs, Rows, Stream, make_stream
from maclaurin.spec import AttentionSpec


class Form(enum.Enum):
    """The ways to compute one spec; blocked is parallel with a block of queries at a time."""

    PARALLEL = "parallel"
    BLOCKED = "blocked"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"


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
    """The output [B, T, H, e] in the dtype of q, and the state after the last token if requested.

    The recurrent form, and any form that returns a state, needs a spec with a finite state.
    """
    stream = make_stream(spec, inputs, scale)
    after = None
    if form is Form.PARALLEL:
        rows = parallel_rows(spec, stream, causal=causal)
    elif form is Form.BLOCKED:
        rows = blocked_rows(spec, stream, chunk, causal=causal)
    else:
        before = state
        if before is None:
            before = State.empty(spec, stream, inputs.q.shape[2], inputs.q.dtype)
        keeps_state = state is not None or return_state
        rows, after = _rows_with_state(spec, stream, form, before, chunk, causal, keeps_state, return_state)
    y, running = output_of(spec, rows, inputs, state, causal)
    if after is not None and return_state:
        after = dataclasses.replace(after, running=None if running is None else running[:, -1])
    return y.to(inputs.q.dtype), after if return_state else None


def output_of(
    spec: AttentionSpec, rows: Rows, inputs: Inputs, state: State | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, H, e] of the rows, and the running sum of the denominator, if it has one."""
    running = running_log_sum(spec, inputs, None if state is None else state.running, causal)
    seen = SeenByRows(spec, inputs, causal, None if state is None else state.count, running)
    return finish(spec, rows, seen), running


def _rows_with_state(
    spec: AttentionSpec,
    stream: Stream,
    form: Form,
    state: State,
    chunk: int,
    causal: bool,
    keeps_state: bool,
    return_state: bool,
) -> tuple[Rows, State]:
    """Rows and, if it is returned, the state after them, by the chunked or the recurrent form."""
    chunk = 1 if form is Form.RECURRENT else min(chunk, stream.q.shape[-2])
    exact = state.exact
    if exact is None:
        if form is Form.RECURRENT:
            rows, _, moments = recurrent_rows(spec, stream, state.moments)
        else:
            rows, _, moments = chunked_rows(
                spec,
                stream,
                state.moments,
                chunk,
                causal=causal,
                keeps_state=keeps_state,
                needs_moments=return_state,
            )
    elif form is Form.RECURRENT:
        parts, moments, count = [], state.moments, state.count
        for t in range(stream.q.shape[-2]):
            token = stream.tokens(t, t + 1)
            part, moments, exact = rows_of_window_and_tail(
                spec, token, count, moments, exact, recurrent_rows, 1
            )
            count = count + token.lengths
            parts.append(part)
        rows = Rows.concatenate(parts)
    else:
        in_pieces = spec.window is not None and spec.window.kept > 0
        tail = partial(chunked_rows, chunk=chunk, keeps_state=keeps_state or in_pieces)
        last = partial(tail, needs_moments=return_state)
        rows, moments, exact = rows_of_window_and_tail(
            spec, stream, state.count, state.moments, exact, tail, chunk, last
        )
    log_decay = state.log_decay
    if log_decay is not None and stream.log_forget is not None:
        log_decay = log_decay + stream.log_forget.sum(-1)
    count = state.count + stream.lengths
    filled = exact is not None and stream.present is None and stream.q.shape[-2] >= exact.number
    return rows, dataclasses.replace(
        state,
        moments=moments,
        count=count,
        log_decay=log_decay,
        exact=exact,
        is_full=state.is_full or filled,
    )
