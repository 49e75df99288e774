"""One further token of a text whose state is at hand, in as few operations as it takes.

S ← f S + φ(k)[i v, 1]ᵀ,     y reads a·φ(q)ᵀ S

The recurrent form for one token, with φ of key and queries made at once, by tables, and on a GPU one pass
over the state. Most of a step on a CPU is overhead of operations.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.backends.state_step import (
    state_step_serves,
    sums_by_order,
    whole_step,
    whole_step_serves,
)
from maclaurin.backends.window_step import window_step, window_step_serves
from maclaurin.forms.attend import make_stream
from maclaurin.forms.chunked import read_state
from maclaurin.forms.divisors import log_running_sum, visible_keys
from maclaurin.forms.epilogue import finish
from maclaurin.forms.features import symmetric_powers
from maclaurin.forms.inputs import Inputs
from maclaurin.forms.state import State
from maclaurin.forms.stream import Rows, Stream, split_count, values_with_count
from maclaurin.forms.window import window_rows
from maclaurin.spec import AttentionSpec
from maclaurin.spec.multisets import number_of_multisets

#: beyond this many features a table would take more than it saves
MOST_FEATURES = 1 << 15


def is_step(spec: AttentionSpec, q: Tensor, state: State | None, mask: Tensor | None) -> bool:
    """Whether `step` serves: one token after others, without padding or packing."""
    return (
        state is not None
        and q.shape[1] == 1
        and mask is None
        and spec.features(q.shape[3]) <= MOST_FEATURES
        and not torch.compiler.is_compiling()
    )


def step(
    spec: AttentionSpec, inputs: Inputs, state: State, scale: float | None = None
) -> tuple[Tensor, State]:
    """y [B, 1, H, e] in the dtype of q, and the state after it."""
    scale = spec.kernel.default_scale(inputs.q.shape[3]) if scale is None else scale
    if whole_step_serves(spec, inputs, state):
        return whole_step(spec, inputs, state, scale)
    if window_step_serves(spec, inputs, state):
        return window_step(spec, inputs, state, scale)
    with torch.autocast(inputs.q.device.type, enabled=False):
        stream = make_stream(spec, inputs, scale)
        moments, exact, log_decay = state.moments, state.exact, state.log_decay
        if exact is None:
            rows, _, moments = _token_rows(spec, stream, moments)
        else:
            rows, moments, exact = window_rows(spec, stream, state.count, moments, exact, _token_rows, 1)
        if stream.log_forget is not None and log_decay is not None:
            log_decay = log_decay + stream.log_forget[..., 0]
        running = log_running_sum(spec, inputs, state.running, True)
        y = finish(
            spec,
            rows,
            visible_keys=visible_keys(inputs, state.count, True),
            running=running,
            output_gate=None if inputs.output_gate is None else inputs.output_gate.to(stream.q.dtype),
        )
    after = dataclasses.replace(
        state,
        moments=moments,
        count=state.count + 1,
        log_decay=log_decay,
        exact=exact,
        running=None if running is None else running[:, -1],
    )
    return y.to(inputs.q.dtype), after


def _token_rows(spec: AttentionSpec, stream: Stream, moments: Tensor) -> tuple[Rows, Any, Tensor]:
    """(rows, row statistics, moments after it) of one token; the G queries of a head read one state."""
    group = stream.q.shape[2]
    given = (stream.k, stream.q, stream.v, stream.log_forget, stream.mass)
    if state_step_serves(moments, *given, group=group):
        return _fused_rows(spec, stream, moments)
    columns = values_with_count(spec, stream)[:, :, 0]
    forget = None if stream.log_forget is None else stream.log_forget[..., 0].exp()
    both = _powers(torch.cat([stream.k, stream.q[..., 0, :]], dim=2), spec.orders or ())  # [B, K, 1+G, F]
    if forget is not None:
        moments = moments * forget[..., None, None]
    moments = _with_token(moments, both[:, :, 0], columns)
    features, statistics = both[:, :, 1:], None
    if spec.kernel.depends_on_row:
        sums, statistics = read_state(spec, features, moments, stream.key_size)
    else:
        sums = (features * _coefficients(spec, stream.key_size, features.dtype, features.device)) @ moments
    return Rows(*split_count(spec, sums[:, :, :, None])), _of_one_token(statistics), moments


def _fused_rows(spec: AttentionSpec, stream: Stream, moments: Tensor) -> tuple[Rows, Any, Tensor]:
    """The same in one pass over the state: sums of each order, weighed by the kernel's coefficients."""
    orders, statistics = spec.orders or (), None
    log_forget = None if stream.log_forget is None else stream.log_forget[..., 0]
    q, k, v = stream.q[..., 0, :], stream.k[:, :, 0], stream.v[:, :, 0]
    weight = None if stream.mass is None else stream.mass[..., 0]
    if stream.present is not None:
        weight = stream.present[:, :1].to(v.dtype).expand(v.shape[:2]) * (1.0 if weight is None else weight)
    moments, sums = sums_by_order(moments, k, q.flatten(1, 2), v, log_forget, weight, orders)
    sums = sums.unflatten(2, q.shape[1:3])
    if spec.kernel.depends_on_row:
        statistics = spec.kernel.statistics([order[..., -1:] for order in sums])
    known = spec.kernel.coefficients(statistics)
    total = sum(known[n] * order for n, order in zip(orders, sums, strict=True))
    assert isinstance(total, Tensor)
    return Rows(*split_count(spec, total[:, :, :, None])), _of_one_token(statistics), moments


def _of_one_token(statistics: Any) -> Any:
    """Row statistics [B, K, G, 1] as [B, K, G, T = 1, 1]."""
    if isinstance(statistics, Tensor):
        return statistics[..., None, :]
    return tuple(map(_of_one_token, statistics)) if isinstance(statistics, tuple) else statistics


def _with_token(moments: Tensor, features: Tensor, columns: Tensor) -> Tensor:
    """S + φ(k)[v, 1]ᵀ in one pass over S [B, K, F, e+1]."""
    rows = moments.shape[0] * moments.shape[1]
    flat = torch.baddbmm(
        moments.reshape(rows, *moments.shape[2:]),
        features.reshape(rows, -1, 1),
        columns.reshape(rows, 1, -1),
    )
    return flat.view(moments.shape)


class _Table(NamedTuple):
    """Where each monomial of one order comes from: uᵢ times a monomial of the order below, and its weight."""

    first: Tensor
    rest: Tensor
    weights: Tensor


def _powers(u: Tensor, orders: tuple[int, ...]) -> Tensor:
    """symmetric_powers by tables."""
    d, wanted = u.shape[-1], []
    current = torch.ones_like(u[..., :1])
    for n in range(max(orders, default=-1) + 1):
        if n == 1:
            current = u
        elif n > 1:
            table = _table(d, n, u.dtype, u.device)
            current = u.index_select(-1, table.first) * current.index_select(-1, table.rest)
        if n in orders:
            wanted.append(current if n < 2 else current * _table(d, n, u.dtype, u.device).weights)
    return torch.cat(wanted, dim=-1) if wanted else u[..., :0]


@cache  # recorded steps read it where it is
def _table(d: int, n: int, dtype: torch.dtype, device: torch.device) -> _Table:
    """The multisets of size n that begin with i are i with a suffix of those of size n − 1."""
    with torch.inference_mode(False):
        total = number_of_multisets(d, n - 1)
        suffixes = [torch.arange(total - number_of_multisets(d - i, n - 1), total) for i in range(d)]
        first = torch.cat([torch.full_like(suffix, i) for i, suffix in enumerate(suffixes)])
        weights = symmetric_powers(torch.ones(d, dtype=dtype), (n,))
        return _Table(first.to(device), torch.cat(suffixes).to(device), weights.to(device))


@cache  # recorded steps read it where it is
def _coefficients(spec: AttentionSpec, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """aₙ for every feature of order n."""
    with torch.inference_mode(False):
        known = spec.kernel.coefficients(None)
        sizes = [(float(known[n]), number_of_multisets(d, n)) for n in spec.orders or ()]
        every = [torch.full((size,), a, dtype=dtype) for a, size in sizes]
        return (torch.cat(every) if every else torch.empty(0, dtype=dtype)).to(device)
