"""Polynomials about the mean score of a row, and an exact window with a polynomial tail: one fused program.

The program (triton/about_mean.py) computes every pair of the tail, or reads chunks of it through moments.
hermite(2), whose weights sum to the number of keys, is the same series minus a constant per row ("balanced").

The program divides rows by their sum, or by t where a norm follows and the sum may vanish. Gates and norms
are applied afterwards. A text that continues from a state with a window is computed as if it began with the
exact keys of the state, sinks and window; its tail begins with the moments of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.exact_keys import ExactKeys
from maclaurin.forms.features import HIGHEST_MOVED, moments_about
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.forms.tracing import is_tracing, without_autocast
from maclaurin.programs.custom_operator import operator, present
from maclaurin.programs.fused_rows import are_operands, finish_rows, operands, refuse_tensors
from maclaurin.programs.linear_time import chunk_for, linear_cost, refuse_head
from maclaurin.programs.program import Call, Cost, Program, Run, dense_flops, first_reason
from maclaurin.programs.triton import dense
from maclaurin.spec import Sign, Window
from maclaurin.spec.polynomials import number_of_multisets

_NOT_BALANCED = (
    "it supports only weights 1 + c + (c² − u)/2, c the score minus the row's mean, u the variance"
)
#: Horner's rule is unrolled, and no higher order was measured
_HIGHEST_ORDER = 12
#: in place of a scale of 0: slopes of the moments are divided by the scale, and gradients multiplied by it
_LEAST_SCALE = 1e-20
#: tensors and other arguments of `mean_polynomial`
_TENSORS, _OPTIONS = 6, 9
#: an optional tensor
_Given = Tensor | None


class PairsAboutMean(Program):
    """Every pair of a polynomial about the mean, or of a tail beside a window."""

    name = "pairs about the mean"
    backend = "triton"
    form = Form.PARALLEL
    reads_packed = True

    def cannot(self, call: Call) -> str | None:
        too_high = call.spec.highest_order > _HIGHEST_ORDER
        return first_reason(
            lambda: _refuse_spec(call),
            lambda: "it carries no state" if call.carries_state else None,
            lambda: f"it supports orders up to {_HIGHEST_ORDER}" if too_high else None,
            lambda: _refuse_packed(call) if call.packing is not None else None,
            lambda: refuse_tensors(call),
        )

    def cost(self, call: Call) -> Cost:
        return Cost(dense_flops(call) / 2, 0.0, 8, 0.0)

    def prepared(self, call: Call) -> Run:
        return _Polynomial.of(call, 0).run


class TailInChunks(Program):
    """Orders 1 and 2 in linear time, with a window or without, from and to a state."""

    name = "tail in chunks"
    backend = "triton"
    form = Form.CHUNKED

    def cannot(self, call: Call) -> str | None:
        order, d = call.spec.highest_order, call.inputs.q.shape[3]
        return first_reason(
            lambda: _refuse_spec(call),
            lambda: (
                refuse_head(order, d)
                if order <= HIGHEST_MOVED
                else f"it supports orders up to {HIGHEST_MOVED}"
            ),
            lambda: None if _sums_are_positive(call) else "the row sum must be positive",
            lambda: "single tokens have their own programs" if call.is_step else None,
            lambda: _refuse_state(call) if call.carries_state else None,
            lambda: refuse_tensors(call),
        )

    def chunk(self, call: Call) -> int:
        return chunk_for(call.spec, call.chunk_size, call.queries)

    def cost(self, call: Call) -> Cost:
        return linear_cost(call, self.chunk(call))

    def prepared(self, call: Call) -> Run:
        polynomial = _Polynomial.of(call, self.chunk(call))
        return polynomial.run_with_state if call.carries_state else polynomial.run


class BalancedPairs(Program):
    """Every pair of 1 + c + (c² − u)/2, for c the score minus its row's mean and u the variance."""

    name = "balanced pairs"
    backend = "triton"
    form = Form.PARALLEL
    reads_packed = True

    def cannot(self, call: Call) -> str | None:
        return _refuse_balanced(call)

    def cost(self, call: Call) -> Cost:
        return Cost(dense_flops(call) / 2, 0.0, 10, 0.0)

    def prepared(self, call: Call) -> Run:
        return _Polynomial.of(call, 0).run


class BalancedChunks(Program):
    """The same in linear time."""

    name = "balanced chunks"
    backend = "triton"
    form = Form.CHUNKED

    def cannot(self, call: Call) -> str | None:
        d, order = call.inputs.q.shape[3], call.spec.highest_order
        return first_reason(lambda: _refuse_balanced(call), lambda: refuse_head(order, d))

    def chunk(self, call: Call) -> int:
        return chunk_for(call.spec, call.chunk_size, call.queries)

    def cost(self, call: Call) -> Cost:
        return linear_cost(call, self.chunk(call))

    def prepared(self, call: Call) -> Run:
        return _Polynomial.of(call, self.chunk(call)).run


def _refuse_balanced(call: Call) -> str | None:
    """Why the spec is not hermite(2) divided by the number of keys; None if it is."""
    spec = call.spec
    divided = None if spec.denominator is None else spec.denominator.fused
    by_count = divided is not None and divided.eps == 0  # weights sum to the number of keys
    by_norm = spec.denominator is None and spec.norm_cancels_row_scale
    weight = spec.kernel.fused
    return first_reason(
        lambda: None if weight is not None and weight.function == "balanced" else _NOT_BALANCED,
        lambda: "it does not support a window" if spec.window is not None else None,
        lambda: "it does not support decay gates" if spec.decay_gates else None,
        lambda: "it divides rows only by the number of their keys" if not (by_count or by_norm) else None,
        lambda: "it supports only causal attention" if not call.causal else None,
        lambda: "it carries no state" if call.carries_state else None,
        lambda: refuse_tensors(call),
    )


def _refuse_spec(call: Call) -> str | None:
    """Why the spec is not a polynomial about the mean, or beside a window, over its sum; None if it is."""
    spec, weight, window = call.spec, call.spec.kernel.fused, call.spec.window
    if weight is None or weight.function != "polynomial" or not (weight.about_mean or window is not None):
        return "it supports only polynomials about the mean score, or beside a window"
    if len(weight.coefficients) < 2:
        return "order-0 tails are not supported"
    if window is not None and not window.is_plain:
        return f"it does not compute {window}"
    if spec.decay_gates:
        return "it does not support decay gates"
    if spec.norm is not None and not spec.norm.per_head:
        return "a norm over several heads depends on the sum that rows are divided by"
    if window is not None and not _sums_are_positive(call):
        return "beside a window the row sum must be positive"
    if not spec.rows_are_means:
        return "rows must be divided by their plain sum, or a norm must follow"
    return None if call.causal else "it supports only causal attention"


def _refuse_packed(call: Call) -> str | None:
    return None if call.spec.window is None else "with a window it does not read packed sequences"


def _sums_are_positive(call: Call) -> bool:
    return call.spec.kernel.row_sum_sign is Sign.POSITIVE


def _refuse_state(call: Call) -> str | None:
    """Why it cannot continue from such a state, or return one."""
    spec, state, window = call.spec, call.state, call.spec.window
    if call.inputs.present is not None:
        return "with a state it does not support padding"
    if not spec.needs_row_sum or spec.orders != tuple(range(spec.highest_order + 1)):
        return "this spec's state lacks the key count or a lower order"
    if state is not None and state.moments.dtype != torch.float32:
        return "it keeps states in fp32"
    if window is None:
        return None
    if spec.value_gates:
        return "with a window and a value gate it carries no state"
    first = window.size + window.sinks
    if state is None:
        return None if call.queries > first else "the text is shorter than window and sinks"
    return _refuse_unfilled(state, first)


def _refuse_unfilled(state: State, first: int) -> str | None:
    """Why the tail may be empty: the state holds too few keys, or their number is unknown."""
    if state.is_full:
        return None
    if is_tracing() or state.count.is_meta or bool((state.count < first).any()):
        return "the state may hold fewer keys than window and sinks"
    return None


def _behind_exact_keys(inputs: Inputs, state: State) -> Inputs:
    """Sinks and window of the state, then the text. These keys get zero queries, whose rows are dropped."""
    exact = state.exact
    assert exact is not None

    def kept(sinks: Tensor, recent: Tensor, new: Tensor) -> Tensor:
        return torch.cat([torch.cat([sinks, recent], dim=2).transpose(1, 2).to(new.dtype), new], dim=1)

    k = kept(exact.sink_k, exact.recent_k, inputs.k)
    idle = inputs.q.new_zeros(inputs.q.shape[0], k.shape[1] - inputs.q.shape[1], *inputs.q.shape[2:])
    return Inputs(torch.cat([idle, inputs.q], dim=1), k, kept(exact.sink_v, exact.recent_v, inputs.v))


def _exact_keys_of(window: Window, line: Inputs) -> ExactKeys:
    """The last w and the first keys and values of the line, as a state keeps them."""
    k, v = (u.transpose(1, 2) for u in (line.k, line.v))
    size, sinks = window.size, window.sinks
    return ExactKeys(k[:, :, -size:], v[:, :, -size:], k[:, :, :sinks], v[:, :, :sinks])


class _Polynomial(NamedTuple):
    """What a call needs from its spec and its tensors' layout."""

    coefficients: list[float]
    about_mean: bool
    window: int
    sinks: int
    #: tokens per chunk; 0 for every pair
    chunk: int
    #: rows in bf16, where nothing else is applied to them
    narrow: bool
    divisor: str
    #: whether the program takes q, k and v unchanged
    as_given: bool

    @staticmethod
    def of(call: Call, chunk: int) -> _Polynomial:
        spec, weight, window = call.spec, call.spec.kernel.fused, call.spec.window
        assert weight is not None
        balanced, alone = weight.function == "balanced", spec.norm is None and not spec.gates_before_norm
        return _Polynomial(
            [float(c) for c in weight.coefficients],
            balanced or weight.about_mean,
            0 if window is None else window.size,
            0 if window is None else window.sinks,
            chunk,
            alone and call.inputs.q.dtype == torch.bfloat16,
            "balanced" if balanced else "sum" if _sums_are_positive(call) else "count",
            are_operands(spec, call.inputs),
        )

    def run(self, call: Call) -> tuple[Tensor, None]:
        """The output of a call without a state."""
        inputs = call.inputs
        with without_autocast(call.device):
            rows, _ = self.rows(call, inputs)
            if self.narrow:
                return rows, None
            return finish_rows(call.spec, rows, inputs.gates, inputs.q.dtype), None

    def run_with_state(self, call: Call) -> tuple[Tensor, State | None]:
        """The output of a call that continues from a state or returns one."""
        spec, inputs, state, window = call.spec, call.inputs, call.state, call.spec.window
        line = inputs if state is None or window is None else _behind_exact_keys(inputs, state)
        with without_autocast(call.device):
            rows, moments = self.rows(call, line)
            y = finish_rows(spec, rows[:, -call.queries :], inputs.gates, inputs.q.dtype)
        if moments is None:
            return y, None
        k = inputs.k
        before = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device) if state is None else state.count
        if window is None:
            return y, State(spec, moments, before + call.keys)
        return y, State(spec, moments, before + call.keys, exact=_exact_keys_of(window, line), is_full=True)

    def rows(self, call: Call, line: Inputs) -> tuple[Tensor, Tensor | None]:
        """Rows [B, T, H, e] over their sums, and, if a state is requested, the moments of the tail after."""
        q, k, v = line[:3] if self.as_given else operands(call.spec, line)
        initial = None if call.state is None else call.state.moments
        short = q.shape[1] - self.window - self.sinks <= self.chunk
        offset = None
        if initial is not None:
            offset = _mean_of(initial, k) if self.about_mean else torch.zeros_like(k[:, 0])
            initial = moments_about(initial, offset)
        rows, state, origin, *_ = mean_polynomial(
            q,
            k,
            v,
            initial,
            offset,
            None if call.packing is None else call.packing.cuts,
            call.scale or _LEAST_SCALE,
            self.coefficients,
            self.about_mean,
            self.window,
            self.sinks,
            0 if short and not call.carries_state else self.chunk,
            self.narrow,
            self.divisor,
            call.return_state,
        )
        if not call.return_state or state is None or origin is None:
            return rows, None
        return rows, moments_about(state, -origin)


def _mean_of(moments: Tensor, k: Tensor) -> Tensor:
    """The mean [B, K, d] of the keys that moments hold, in the dtype of k and without a gradient."""
    held = moments.detach()[..., -1]
    return (held[:, :, 1 : 1 + k.shape[3]] / held[:, :, :1].clamp(min=1)).to(k.dtype)


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::mean_polynomial", results=3)
def mean_polynomial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    offset: Tensor | None,
    cuts: Tensor | None,
    scale: float,
    coefficients: Sequence[float],
    about_mean: bool,
    window: int,
    sinks: int,
    chunk: int,
    narrow: bool,
    divisor: str,
    return_state: bool,
) -> tuple[Tensor, _Given, _Given, _Given, _Given, Tensor, _Given, _Given, _Given, _Given, _Given]:
    """y [B, T, H, e] in fp32 (`narrow`: in bf16); the last state, if requested; the offset it is about.

    States are [B, K, F, e + 1], about the offset [B, K, d] that follows them: the given one, which
    belongs to `initial`, or the mean of the first chunk. The other outputs are for the backward pass: the
    rounding error of y, and Rows.
    `cuts` [n + 1] are those of sequences packed into one row (B = 1): every pair, without a window.
    """
    from maclaurin.programs.triton import about_mean as program
    from maclaurin.programs.triton import moments as layout

    call = program.Call(scale, tuple(coefficients), about_mean, window, sinks, chunk, narrow, divisor)
    start = program.start_from(initial, offset, call.order, v.shape[3])
    y, rest, rows, origin, after = program.forward(q, k, v, call, start, totals=return_state, cuts=cuts)
    state = None
    if after is not None:
        state = layout.packed(after, range(call.order + 1), q.shape[3], v.shape[3], sums=True)
        state = state.unflatten(0, k.shape[::2])
    if origin is not None:
        origin = origin.view(k.shape[0], k.shape[2], -1)
        origin = origin if offset is None else origin.clone()  # an operator must not return its inputs
    return y, state, origin, rest, *rows  # type: ignore[return-value]


@operator("maclaurin::mean_polynomial_backward")
def mean_polynomial_backward(
    dy: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    rest: Tensor | None,
    origin: Tensor | None,
    rows: Sequence[Tensor | None],
    initial: Tensor | None,
    cuts: Tensor | None,
    scale: float,
    coefficients: Sequence[float],
    about_mean: bool,
    window: int,
    sinks: int,
    chunk: int,
    divisor: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, and the gradient of the initial state, if there is one."""
    from maclaurin.programs.triton import about_mean as program
    from maclaurin.programs.triton import moments as layout

    call = program.Call(scale, tuple(coefficients), about_mean, window, sinks, chunk, divisor=divisor)
    d, e, orders = q.shape[3], v.shape[3], range(call.order + 1)
    d_totals, origin = None, present(origin)
    if d_state is not None:
        d_totals = layout.unpacked(d_state.flatten(0, 1), orders, d, e, call.order)
    found = program.backward(
        dy,
        q,
        k,
        v,
        y,
        present(rest),
        program.Rows(*map(present, rows)),  # type: ignore[arg-type]
        None if origin is None else origin.flatten(0, 1),
        call,
        program.start_from(initial, origin, call.order, e),
        d_totals=d_totals,
        cuts=cuts,
    )
    d_initial = None
    if found.before is not None:
        d_initial = layout.packed(found.before, orders, d, e, sums=True).unflatten(0, k.shape[::2])
    return found.q, found.k, found.v, d_initial


@mean_polynomial.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    from maclaurin.programs.triton import block_layout, key_sums, moments, packed, tiles

    _, _, cuts, _, coefficients, about_mean, window, sinks, chunk, narrow, divisor, return_state = rest
    batch, tokens, heads, d = q.shape
    kv_heads, e, wide, order = k.shape[2], v.shape[3], torch.float32, len(coefficients) - 1
    rows, tail = batch * kv_heads, max(0, tokens - window - sinks)
    chunks, sums = -(-tail // chunk) if chunk else 0, -(-tail // key_sums.TILE) + 1
    if cuts is not None:
        sums = packed.tiles_of_packed(tokens, cuts.numel() - 1, key_sums.TILE)
    balanced = divisor == "balanced"
    features = sum(number_of_multisets(d, n) for n in range(order + 1))
    y = q.new_empty(batch, tokens, heads, e, dtype=torch.bfloat16 if narrow else wide)
    log = q.new_empty(batch, heads, tokens, dtype=wide)
    second = (rows, chunks, block_layout.block_rows(int(d), 2), e)
    return (
        y,
        q.new_empty((batch, kv_heads, features, e + 1), dtype=wide) if return_state else None,
        k.new_empty((batch, kv_heads, d)) if chunk else None,
        torch.empty_like(y) if narrow and divisor == "sum" else None,
        q.new_empty((batch, heads, tokens), dtype=wide) if about_mean else None,
        log,
        q.new_empty((batch, heads, tokens), dtype=wide) if balanced else None,
        q.new_empty((rows, sums, d), dtype=wide) if about_mean else None,
        q.new_empty((rows, sums, e), dtype=wide) if balanced else None,
        q.new_empty((rows, chunks, moments.small_size(d, e)), dtype=wide) if chunk else None,
        q.new_empty(second, dtype=tiles.operand(q)) if chunk and order > 1 else None,
    )


@mean_polynomial_backward.register_fake
def _(
    dy: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    initial = rest[4]
    d_initial = None if initial is None else torch.empty_like(initial)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    q, k, v, initial, _, cuts, *call, _, divisor, ctx.return_state = inputs
    ctx.call = (*call, divisor)
    y, _, origin, rest, *rows = output
    ctx.save_for_backward(q, k, v, y, rest, origin, initial, cuts, *rows)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, d_state: Tensor | None, *_: Any) -> tuple[Any, ...]:
    d_state = d_state if ctx.return_state else None  # when traced, an empty state has a gradient too
    if dy is None and d_state is None:
        return (None,) * (_TENSORS + _OPTIONS)
    q, k, v, y, rest, origin, initial, cuts, *rows = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dense(dy)
    d_state = None if d_state is None else d_state.contiguous()
    *found, d_initial = mean_polynomial_backward(
        dy, d_state, q, k, v, y, rest, origin, rows, initial, cuts, *ctx.call
    )
    return *found, None if initial is None else d_initial, None, None, *(None,) * _OPTIONS


mean_polynomial.register_autograd(_backward, setup_context=_save)
