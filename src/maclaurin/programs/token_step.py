"""One further token of a text whose state is at hand, for every spec, in as few operations as it takes.

S ← f S + φ(k)[i v, 1]ᵀ,     y reads a·φ(q)ᵀ S

The recurrent form for one token, with φ of key and queries made at once, by tables, and on a GPU one pass
over the state. Most of a step on a CPU is overhead of operations.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.attend import Form, output_of
from maclaurin.forms.chunked import read_state
from maclaurin.forms.features import symmetric_powers
from maclaurin.forms.inputs import make_stream
from maclaurin.forms.kept import rows_beside_exact_keys
from maclaurin.forms.recurrent import recurrent_rows
from maclaurin.forms.state import State
from maclaurin.forms.stream import Rows, Stream, split_count, values_with_count
from maclaurin.forms.window import TailForm
from maclaurin.programs.fused_step import refuse_state_on_gpu, sums_by_order
from maclaurin.programs.program import Call, Cost, Program
from maclaurin.spec import AttentionSpec, RowStatistics
from maclaurin.spec.polynomials import number_of_multisets

#: beyond this many features a table would take more than it saves
MOST_FEATURES = 1 << 15


class TokenStep(Program):
    """Any spec with a finite state."""

    name = "token step"
    backend = "torch"
    form = Form.RECURRENT

    def cannot(self, call: Call) -> str | None:
        if not call.is_step:
            return "it is for one token after others"
        many = call.spec.features(call.inputs.q.shape[3]) > MOST_FEATURES
        return "the state has too many features for tables" if many else None

    def cost(self, call: Call) -> Cost:
        k, v = call.inputs.k, call.inputs.v
        size = float(k.shape[0] * k.shape[2] * call.spec.state_size(k.shape[3], v.shape[3]))
        return Cost(2 * size * (call.group + 1), 12 * size, 10, 4 * size)

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        spec, inputs, state = call.spec, call.inputs, call.state
        assert state is not None
        with torch.autocast(call.device.type, enabled=False):
            stream = make_stream(spec, inputs, call.scale)
            moments, exact, decay = state.moments, state.exact, state.log_decay
            one_token = _one_token(call)
            if exact is None:
                rows, _, moments = one_token(spec, stream, moments)
            else:
                rows, moments, exact = rows_beside_exact_keys(
                    spec, stream, state.count, moments, exact, one_token, 1
                )
            if stream.log_forget is not None and decay is not None:
                decay = decay + stream.log_forget[..., 0]
            y, running = output_of(spec, rows, inputs, state, True)
        after = dataclasses.replace(
            state,
            moments=moments,
            count=state.count + 1,
            log_decay=decay,
            running=None if running is None else running[:, -1],
            exact=exact,
        )
        return y.to(inputs.q.dtype), after


def _one_token(call: Call) -> TailForm:
    """How one token goes into the moments and its queries come out."""
    assert call.state is not None
    if call.spec.orders and refuse_state_on_gpu(call, call.state.moments) is None:
        return _fused_rows
    return recurrent_rows if torch.compiler.is_compiling() else _rows_by_tables


def _rows_by_tables(
    spec: AttentionSpec, stream: Stream, moments: Tensor
) -> tuple[Rows, RowStatistics | None, Tensor]:
    """(rows, row statistics, moments after it) of one token; the G queries of a head read one state."""
    columns = values_with_count(spec, stream)[:, :, 0]
    both = _powers(torch.cat([stream.k, stream.q[..., 0, :]], dim=2), spec.orders)  # [B, K, 1+G, F]
    if stream.log_forget is not None:
        moments = moments * stream.log_forget[..., 0, None, None].exp()
    moments = _with_token(moments, both[:, :, 0], columns)
    features, statistics = both[:, :, 1:], None
    if spec.kernel.depends_on_row:
        sums, statistics = read_state(spec, features, moments, stream.key_size)
    else:
        sums = (features * _coefficients(spec, stream.key_size, features.dtype, features.device)) @ moments
    return Rows(*split_count(spec, sums[:, :, :, None])), _of_one_token(statistics), moments


def _fused_rows(
    spec: AttentionSpec, stream: Stream, moments: Tensor
) -> tuple[Rows, RowStatistics | None, Tensor]:
    """The same in one pass over the state: sums of each order, weighed by the kernel's coefficients."""
    statistics = None
    log_forget = None if stream.log_forget is None else stream.log_forget[..., 0]
    q, k, v = stream.q[..., 0, :], stream.k[:, :, 0], stream.v[:, :, 0]
    weight = None if stream.mass is None else stream.mass[..., 0]
    if stream.present is not None:
        weight = stream.present[:, :1].to(v.dtype).expand(v.shape[:2]) * (1.0 if weight is None else weight)
    moments, sums = sums_by_order(moments, k, q.flatten(1, 2), v, log_forget, weight, spec.orders)
    sums = sums.unflatten(2, q.shape[1:3])
    if spec.kernel.depends_on_row:
        statistics = spec.kernel.statistics([order[..., -1:] for order in sums])
    known = spec.kernel.coefficients(statistics)
    total = sum(known[n] * order for n, order in zip(spec.orders, sums, strict=True))
    assert isinstance(total, Tensor)
    return Rows(*split_count(spec, total[:, :, :, None])), _of_one_token(statistics), moments


def _of_one_token(statistics: RowStatistics | None) -> RowStatistics | None:
    """Row statistics [B, K, G, 1] as [B, K, G, T = 1, 1]."""
    return None if statistics is None else statistics.map(lambda u: u[..., None, :])


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
        sizes = [(float(known[n]), number_of_multisets(d, n)) for n in spec.orders]
        every = [torch.full((size,), a, dtype=dtype) for a, size in sizes]
        return (torch.cat(every) if every else torch.empty(0, dtype=dtype)).to(device)
