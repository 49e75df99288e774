"""Decoding: one more token after a state. On a GPU this takes two launches per layer.

StateStep is for a state alone, WindowStep for exact keys beside it (triton/decode_step.py).

TokenStep is for every spec, on every device: the recurrent form for one token,

    S ← f S + φ(k)[i v, 1]ᵀ,     y reads a·φ(q)ᵀ S

with φ of key and queries computed together from tables, on a GPU in one pass over the state
(`sums_by_order`). On a CPU, most of a step's time is the overhead of launching operations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.attend import Form, output_of
from maclaurin.forms.chunked import read_state
from maclaurin.forms.exact_keys import ExactKeys, TailForm
from maclaurin.forms.features import symmetric_powers
from maclaurin.forms.kept import rows_of_window_and_tail
from maclaurin.forms.recurrent import recurrent_rows
from maclaurin.forms.state import State
from maclaurin.forms.stream import Rows, Stream, log_decay, make_stream, split_count, values_with_count
from maclaurin.forms.tracing import are_traced, is_tracing, untraced, without_autocast
from maclaurin.programs import triton as gpu
from maclaurin.programs.custom_operator import operator
from maclaurin.programs.fused_rows import finish_rows, refuse_dtypes, row_divisor, rows_are_divided
from maclaurin.programs.program import Call, Cost, Program, Run, first_reason
from maclaurin.spec import AttentionSpec, RowStatistics
from maclaurin.spec.polynomials import number_of_multisets

if TYPE_CHECKING:
    from maclaurin.programs.triton.decode_step import Layout, Table

#: the program makes one pass per query of a group
_LARGEST_GROUP = 16
#: all sinks are read at once
_MOST_SINKS = 64


class StateStep(Program):
    """A state, with or without decay gates, divided by the row sum, t or nothing; norms follow."""

    name = "state step"
    backend = "triton"
    form = Form.RECURRENT
    has_fixed_work = True

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        exact = spec.window is not None or len(spec.orders) == 0
        return first_reason(
            lambda: refuse_step(call),
            lambda: "it supports only states without exact keys" if exact else None,
            lambda: None if _divides_itself(spec) else f"it does not divide by {spec.denominator}",
            lambda: "it does not support value gates" if spec.value_gates else None,
            lambda: _refuse_coefficients(spec),
        )

    def cost(self, call: Call) -> Cost:
        return _step_cost(call)

    def prepared(self, call: Call) -> Run:
        spec, q = call.spec, call.inputs.q
        is_final = spec.norm is None and not spec.gates_before_norm
        dtype = q.dtype if is_final else torch.float32
        return _Step(_known_table(spec), *row_divisor(spec), spec.orders, dtype, is_final).run


class _Step(NamedTuple):
    """What a step needs from its spec."""

    table: Table
    divisor: str
    eps: float
    orders: tuple[int, ...]
    dtype: torch.dtype
    is_final: bool

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        from maclaurin.programs.triton import decode_step as program

        spec, inputs, state = call.spec, call.inputs, call.state
        assert state is not None
        q, k, v = gpu.dense(inputs.q), gpu.dense(inputs.k), gpu.dense(inputs.v)
        decay = log_decay(spec, inputs)
        decay = None if decay is None else decay[..., 0]
        y, moments, count = program.rows(
            state.moments.contiguous(),
            state.count.contiguous(),
            program.Token(k, q, v, decay),
            step_layout(k.shape[-1], self.orders, call.device),
            call.scale,
            self.table,
            self.divisor,
            self.eps,
            dtype=self.dtype,
        )
        if not self.is_final:
            y = finish_rows(spec, y, inputs.gates, q.dtype)
        total = state.log_decay
        if total is not None and decay is not None:
            total = total + decay
        return y, _after(state, moments, count, total, None)


class WindowStep(Program):
    """Exact keys beside a polynomial tail, over a row sum."""

    name = "window step"
    backend = "triton"
    form = Form.RECURRENT
    has_fixed_work = True

    def cannot(self, call: Call) -> str | None:
        spec, window = call.spec, call.spec.window
        divided = None if spec.denominator is None else spec.denominator.fused
        by_sum = divided is not None and divided.by == "sum" and len(spec.arguments) == 0
        return first_reason(
            lambda: refuse_step(call),
            lambda: "it supports only a plain window" if window is None or not window.is_plain else None,
            lambda: None if spec.orders else "it supports only a window beside a tail",
            lambda: (
                None
                if window is None or window.sinks <= _MOST_SINKS
                else f"it supports up to {_MOST_SINKS} sinks"
            ),
            lambda: None if by_sum else "it supports only a row sum, without gates",
            lambda: "it does not support a norm" if spec.norm is not None else None,
            lambda: _refuse_coefficients(spec),
        )

    def cost(self, call: Call) -> Cost:
        return _step_cost(call)

    def prepared(self, call: Call) -> Run:
        spec = call.spec
        return _StepBesideWindow(_known_table(spec), row_divisor(spec)[1], spec.orders).run


class _StepBesideWindow(NamedTuple):
    """What a step with exact keys needs from its spec."""

    table: Table
    eps: float
    orders: tuple[int, ...]

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        from maclaurin.programs.triton import decode_step as program

        inputs, state = call.inputs, call.state
        assert state is not None
        assert state.exact is not None
        q, k, v = gpu.dense(inputs.q), gpu.dense(inputs.k), gpu.dense(inputs.v)
        held = state.exact
        y, moments, count, exact = program.window_rows(
            state.moments.contiguous(),
            state.count.contiguous(),
            program.Exact(
                held.recent_k.contiguous(),
                held.recent_v.contiguous(),
                held.sink_k.contiguous(),
                held.sink_v.contiguous(),
            ),
            program.Token(k, q, v),
            step_layout(k.shape[-1], self.orders, call.device),
            call.scale,
            self.table,
            self.eps,
        )
        return y, _after(state, moments, count, state.log_decay, ExactKeys(*exact))


def _after(
    state: State, moments: Tensor, count: Tensor, log_decay: Tensor | None, exact: ExactKeys | None
) -> State:
    """The state after a token; `dataclasses.replace` would take several microseconds."""
    return State(
        state.spec,
        moments,
        count,
        log_decay,
        state.running,
        exact,
        state.is_full,
        state.certificate,
        state.key_bound,
    )


# ------------------------------------------------------------------------------------ refusals


def refuse_state_on_gpu(call: Call, moments: Tensor) -> str | None:
    """Why the programs for a step do not run on such a state; they have no backward pass."""
    if not gpu.runs_on(call.device):
        return gpu.why_not_on(call.device)
    if moments.dtype != torch.float32:
        return "it keeps states in fp32"
    if moments.shape[3] > 1024 or call.group > _LARGEST_GROUP:
        return f"it supports value sizes up to 1024 and {_LARGEST_GROUP} queries per key-value head"
    return "it has no backward pass" if call.needs_gradient else None


def refuse_step(call: Call) -> str | None:
    """Why fused programs cannot run the call as one step."""
    state = call.state
    if state is None or not call.is_step:
        return "it supports only one more token after a state"
    return first_reason(
        lambda: refuse_dtypes(call),
        lambda: "it cannot be traced" if are_traced((call.inputs.q, state.moments)) else None,
        lambda: refuse_state_on_gpu(call, state.moments),
    )


def _refuse_coefficients(spec: AttentionSpec) -> str | None:
    if spec.orders and coefficient_table(spec) is None:
        return f"it does not support the coefficients of {spec.kernel}"
    return None


def _known_table(spec: AttentionSpec) -> Table:
    """The coefficients of a spec that has not been refused for them."""
    table = coefficient_table(spec)
    assert table is not None
    return table


def _divides_itself(spec: AttentionSpec) -> bool:
    """Whether the program divides rows by the spec's denominator, if there is one."""
    if spec.denominator is None or spec.running_argument is not None:
        return spec.running_argument is None
    return spec.denominator.fused is not None and rows_are_divided(spec)


def _step_cost(call: Call) -> Cost:
    k, v = call.inputs.k, call.inputs.v
    size = float(k.shape[0] * k.shape[2] * call.spec.state_size(k.shape[3], v.shape[3]))
    return Cost(2 * size * (call.group + 1), 8 * size, 2, 4 * size)


# ------------------------------------------------------------------------- sums of each order


def sums_by_order(
    moments: Tensor,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    weight: Tensor | None,
    orders: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """S' = f S + w φ(k)[v, 1]ᵀ [B, K, F, E]; φₙ(q)ᵀ S' for q [B, H, d] and each order n [orders, B, H, E]."""
    layout = step_layout(k.shape[-1], tuple(orders), moments.device)
    k, q, v = (gpu.dense(u) for u in (k, q, v))
    return state_step(moments.contiguous(), k, q, v, log_forget, weight, *layout)  # type: ignore[no-any-return]


@operator("maclaurin::state_step")
def state_step(
    moments: Tensor,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    weight: Tensor | None,
    entries: Tensor,
    roots: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The state after the token, and its product with the queries' features, per order [orders, B, H, E]."""
    from maclaurin.programs.triton import decode_step as program

    layout = program.Layout(entries, roots, tuple(sizes))
    return program.sums(moments, program.Token(k, q, v, log_forget, weight), layout)


@state_step.register_fake
def _(moments: Tensor, k: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    orders = len(rest[-1])
    return torch.empty_like(moments), moments.new_empty(orders, *q.shape[:2], moments.shape[3])


@lru_cache(maxsize=256)
def coefficient_table(spec: AttentionSpec) -> Table | None:
    """The factor on each order's sums: a number, or a polynomial in −c for a series about the mean score c.

    Σ bₙ (x − c)ⁿ = Σ_j xʲ Σ_{n≥j} bₙ C(n, j) (−c)^{n−j}. None for kernels that need more of the row.
    """
    weight, orders = spec.kernel.fused, spec.orders
    if weight is None or weight.function != "polynomial" or spec.kernel.feature_map is not None:
        return None
    if not weight.about_mean:
        return tuple((weight.coefficients[n],) for n in orders)
    series = (*weight.coefficients, *(0.0,) * len(orders))
    return tuple(
        tuple(series[n] * math.comb(n, j) for n in range(j, len(orders))) for j in range(len(orders))
    )


# ------------------------------------------------------------------------------------- how features are made


class _Layouts:
    """Layouts as attributes: torch.compile takes an attribute of a global object as an input of its graph."""


_layouts = _Layouts()


def step_layout(d: int, orders: tuple[int, ...], device: torch.device) -> Layout:
    """The layout of features for heads of size d, cached per device."""
    if torch.compiler.is_compiling():
        name = f"d{d}_{'_'.join(map(str, orders))}_{device.type}{device.index}"
        _tabulate(name, d, orders, device)
        return getattr(_layouts, name)
    make = _step_layout.__wrapped__ if is_tracing() else _step_layout
    return make(d, orders, device)


@untraced
def _tabulate(name: str, d: int, orders: tuple[int, ...], device: torch.device) -> bool:
    setattr(_layouts, name, _step_layout(d, orders, device))
    return True


@cache  # a recorded graph reads it at this address
def _step_layout(d: int, orders: tuple[int, ...], device: torch.device) -> Layout:
    from maclaurin.programs.triton.decode_step import Layout

    degree = max(*orders, 1)
    entries = [
        (*multiset, *(d,) * (degree - n))
        for n in orders
        for multiset in itertools.combinations_with_replacement(range(d), n)
    ]
    sizes = tuple(number_of_multisets(d, n) for n in orders)
    with torch.inference_mode(False):
        roots = symmetric_powers(torch.ones(d), orders).to(device)
        return Layout(torch.tensor(entries, dtype=torch.int32, device=device), roots, sizes)


# --------------------------------------------------------------------------------------------- the plain step


#: with more features than this, a table takes more time than it saves
MOST_FEATURES = 1 << 15


class TokenStep(Program):
    """Any spec with a finite state."""

    name = "token step"
    backend = "torch"
    form = Form.RECURRENT
    has_fixed_work = True

    def cannot(self, call: Call) -> str | None:
        if not call.is_step:
            return "it supports only one more token after a state"
        many = call.spec.features(call.inputs.q.shape[3]) > MOST_FEATURES
        return "the state has too many features for tables" if many else None

    def cost(self, call: Call) -> Cost:
        k, v = call.inputs.k, call.inputs.v
        size = float(k.shape[0] * k.shape[2] * call.spec.state_size(k.shape[3], v.shape[3]))
        return Cost(2 * size * (call.group + 1), 12 * size, 10, 4 * size)

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        spec, inputs, state = call.spec, call.inputs, call.state
        assert state is not None
        with without_autocast(call.device):
            stream = make_stream(spec, inputs, call.scale)
            moments, exact, decay = state.moments, state.exact, state.log_decay
            one_token = _one_token(call)
            if exact is None:
                rows, _, moments = one_token(spec, stream, moments)
            else:
                rows, moments, exact = rows_of_window_and_tail(
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
    """The polynomial form for one token."""
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
    """The same in one pass over the state: sums of each order, times the kernel's coefficients."""
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


@cache  # a recorded graph reads it at this address
def _table(d: int, n: int, dtype: torch.dtype, device: torch.device) -> _Table:
    """The multisets of size n that begin with i are i with a suffix of those of size n − 1."""
    with torch.inference_mode(False):
        total = number_of_multisets(d, n - 1)
        suffixes = [torch.arange(total - number_of_multisets(d - i, n - 1), total) for i in range(d)]
        first = torch.cat([torch.full_like(suffix, i) for i, suffix in enumerate(suffixes)])
        weights = symmetric_powers(torch.ones(d, dtype=dtype), (n,))
        return _Table(first.to(device), torch.cat(suffixes).to(device), weights.to(device))


@cache  # a recorded graph reads it at this address
def _coefficients(spec: AttentionSpec, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """aₙ for every feature of order n."""
    with torch.inference_mode(False):
        known = spec.kernel.coefficients(None)
        sizes = [(float(known[n]), number_of_multisets(d, n)) for n in spec.orders]
        every = [torch.full((size,), a, dtype=dtype) for a, size in sizes]
        return (torch.cat(every) if every else torch.empty(0, dtype=dtype)).to(device)
