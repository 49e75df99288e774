"""Polynomials of low order in linear time, on a fused program (triton/linear_time.py).

Kernels that expand about the row's mean score use separate coefficients for each row:

    T_N(x − c_t) = Σ_n α_n(t) xⁿ,       c_t = scale · q_t·(mean of the keys up to t)

After a state, keys and moments are shifted by the mean key of the state: small numbers lose less in low
precision.

Without a causal mask, all queries read one state of the whole text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.features import HIGHEST_MOVED, moments_about
from maclaurin.forms.state import State
from maclaurin.forms.stream import log_decay
from maclaurin.forms.tracing import without_autocast
from maclaurin.programs.custom_operator import operator, present
from maclaurin.programs.fused_rows import (
    are_operands,
    finish_rows,
    operands,
    over_denominator,
    refuse_denominator,
    refuse_features,
    refuse_tensors,
    row_divisor,
    rows_are_final,
)
from maclaurin.programs.program import Call, Cost, Program, Run, first_reason
from maclaurin.spec import AttentionSpec, RowStatistics
from maclaurin.spec.polynomials import number_of_multisets

#: largest head size per order: beyond it, the program's blocks do not fit in registers
LARGEST_HEAD = {0: 128, 1: 128, 2: 128, 3: 32}
#: tokens per chunk by order: the larger the state, the fewer states should be written to memory
CHUNK = {0: 256, 1: 256, 2: 1024, 3: 1024}
#: in texts this long, moments of order 2 are most of the memory, so fewer of them are written
LONG, CHUNK_OF_LONG = 1 << 15, 1280
#: how much faster products with moments are than the rate of all work of a call: 1.56 ms forward without a
#: mask at 8 × 4,096 tokens of 16 heads of 64 (benchmarks/results/gpu_bench_short_calls.json)
_FASTER_WITHOUT_PAIRS = 1.06


class LinearTime(Program):
    """Polynomials up to order 3, from and to a state."""

    name = "linear time"
    backend = "triton"
    form = Form.CHUNKED

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        if spec.window is not None:
            return "it does not support a window"
        return first_reason(
            lambda: refuse_kernel(spec, spec.kernel.key_size(call.inputs.q.shape[3])),
            lambda: _refuse_whole_text(call) if not call.causal else None,
            lambda: "single tokens have their own programs" if call.is_step else None,
            lambda: refuse_denominator(spec),
            lambda: refuse_features(spec, call.inputs.q.dtype),
            lambda: _refuse_state(call) if call.carries_state else None,
            lambda: refuse_tensors(call),
        )

    def chunk(self, call: Call) -> int:
        return chunk_for(call.spec, call.chunk_size, call.queries)

    def cost(self, call: Call) -> Cost:
        return linear_cost(call, self.chunk(call))

    def prepared(self, call: Call) -> Run:
        spec, inputs = call.spec, call.inputs
        before = None if call.state is None else call.state.count
        return _Linear(
            row_divisor(spec, before),
            self.chunk(call),
            rows_are_final(spec, inputs.q.dtype, before) and spec.running_argument is None,
            are_operands(spec, inputs),
        ).run


class _Linear(NamedTuple):
    """What a call needs from its spec and its tensors' layout."""

    divisor: tuple[str, float]
    chunk: int
    is_final: bool
    as_given: bool

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        spec, inputs, state = call.spec, call.inputs, call.state
        with without_autocast(call.device):
            decay = log_decay(spec, inputs)
            sums = linear_sums(
                spec,
                inputs[:3] if self.as_given else operands(spec, inputs),
                None if decay is None else decay.float().contiguous(),
                None if state is None else state.moments,
                self.divisor,
                scale=call.scale,
                chunk=self.chunk,
                keep=call.return_state,
                final=self.is_final,
                causal=call.causal,
            )
            y, running = sums.rows, None
            if not self.is_final:
                y, running = over_denominator(spec, inputs, y, call.causal, state)
                y = finish_rows(spec, y, inputs.gates, inputs.q.dtype)
            return y, _state_after(call, sums.moments, running) if call.return_state else None


def refuse_kernel(spec: AttentionSpec, d: int) -> str | None:
    """Why the operator does not support this kernel for heads of size d; None if it does."""
    weight = spec.kernel.fused
    if weight is None or weight.function != "polynomial" or not spec.orders:
        return "it supports only polynomials of the score"
    if weight.about_mean and spec.decay_gates:
        return "about the mean it supports no decay gate, since its mean weighs all keys alike"
    return refuse_head(spec.highest_order, d)


def _refuse_whole_text(call: Call) -> str | None:
    """Why the operator cannot compute such a call without a causal mask; None if it can."""
    if call.spec.kernel.depends_on_row:
        return "without a causal mask it supports only polynomials that are the same for every row"
    return "without a causal mask it carries no state" if call.carries_state else None


def linear_cost(call: Call, chunk: int) -> Cost:
    """Moments written and read, half the pairs within a chunk, and the moments of every chunk in memory.

    Without a causal mask there are no pairs, and there is one state.
    """
    spec = call.spec
    batch, tokens, heads, d = call.inputs.q.shape
    kv_heads, e, order = call.inputs.k.shape[2], call.inputs.v.shape[3], spec.highest_order
    chunk = min(chunk, tokens)
    features = d ** min(order, 2) * ((d + 1) / 2 if order > 2 else 1)
    rows, keys = float(batch * heads * tokens), float(batch * kv_heads * tokens)
    beside = chunk if spec.window is None else chunk + 2 * spec.window.size
    flops = 2 * (rows + keys) * features * e
    flops = flops + rows * beside * (d + e) if call.causal else flops / _FASTER_WITHOUT_PAIRS
    chunks = tokens // chunk if call.causal else 1
    states = float(batch * kv_heads) * chunks * features * e * call.inputs.q.element_size()
    size = call.inputs.q.element_size()
    moved = size * (rows * (d + e) + 2 * keys * (d + e)) + 2 * states
    return Cost(flops, moved, 8, states)


def _refuse_state(call: Call) -> str | None:
    """Why the operator cannot start from such a state, or return one."""
    if call.state is not None and call.state.moments.dtype != torch.float32:
        return "it keeps states in fp32"
    if call.inputs.present is not None:
        return "with a state it does not support padding"
    return refuse_moving(call.spec) if call.spec.kernel.depends_on_row else None


def refuse_moving(spec: AttentionSpec) -> str | None:
    """Why moments of this spec's state cannot be shifted to another point; None if they can."""
    divides = spec.denominator is not None and spec.denominator.uses_row_sum
    if not divides:
        return "about the mean it supports a state only with a row sum"
    return None if spec.highest_order <= HIGHEST_MOVED else f"it shifts moments up to order {HIGHEST_MOVED}"


def _state_after(call: Call, moments: Tensor | None, running: Tensor | None) -> State:
    """The state after the last token, given its moments and the running sum of its denominator."""
    assert moments is not None
    state, k = call.state, call.inputs.k
    count = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device) if state is None else state.count
    decay = log_decay(call.spec, call.inputs)
    if decay is not None:
        decay = decay.sum(-1)
        decay = decay if state is None or state.log_decay is None else state.log_decay + decay
    after = State(call.spec, moments, count + call.keys, decay)
    return after if running is None else dataclasses.replace(after, running=running[:, -1])


class LinearSums(NamedTuple):
    """Rows [B, T, H, e] over their divisors [B, H, T]; for a state, the moments of all keys [B, K, F, E]."""

    rows: Tensor
    divisors: Tensor
    moments: Tensor | None
    centred: CentredKeys | None


def linear_sums(
    spec: AttentionSpec,
    tensors: tuple[Tensor, Tensor, Tensor],
    log_forget: Tensor | None,
    initial: Tensor | None,
    divisor: tuple[str, float],
    *,
    scale: float,
    chunk: int,
    keep: bool,
    final: bool,
    causal: bool,
) -> LinearSums:
    """The operator on q, k, v, about the mean of the keys if the kernel needs it; `final` rounds rows."""
    q, k, v = tensors
    alpha = centred = None
    if spec.kernel.depends_on_row:
        centred = centred_keys(q, k, initial, scale)
        k, initial = centred.k, centred.initial
        alpha = row_coefficients(spec, centred.mean, scale)
    rows, divisors, _, after, *_ = linear_polynomial(
        q,
        k,
        v,
        alpha,
        log_forget,
        initial,
        padded_series(spec, scale),
        *divisor,
        chunk,
        list(spec.orders),
        keep,
        final,
        causal,
    )
    if keep and after is not None and centred is not None and centred.offset is not None:
        after = moments_about(after, -centred.offset[:, 0])
    return LinearSums(rows, divisors, after, centred)


def chunk_for(spec: AttentionSpec, asked: int | None, tokens: int) -> int:
    """Tokens per chunk: the requested number, at most the text's length, rounded to the program's tiles."""
    order = spec.highest_order
    if asked is None and order == 2 and tokens >= LONG:
        return CHUNK_OF_LONG
    wanted = CHUNK[order] if asked is None else asked
    return max(64, _power_of_two(min(wanted, tokens)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def refuse_head(order: int, d: int) -> str | None:
    """Why the program does not take moments of that order for heads of size d; None if it does."""
    largest = LARGEST_HEAD.get(order, 0)
    if largest == 0:
        return f"it supports orders up to {max(LARGEST_HEAD)}, and this is order {order}"
    return None if d <= largest else f"at order {order} it supports head sizes up to {largest}"


def padded_series(spec: AttentionSpec, scale: float) -> list[float]:
    """c₀, c₁, … of the score without its scale; if rows have their own, only the number of these matters."""
    if spec.kernel.depends_on_row:
        return [1.0] * (max(spec.highest_order, 1) + 1)
    known = spec.kernel.series[: spec.highest_order + 1]
    series = [float(c) * scale**n for n, c in enumerate(known)]
    return series + [0.0] * (2 - len(series))


class CentredKeys(NamedTuple):
    """Keys and earlier moments about the mean of the earlier keys [B, 1, K, d], and mean scores [B, H, T]."""

    k: Tensor
    initial: Tensor | None
    offset: Tensor | None
    mean: Tensor


def centred_keys(q: Tensor, k: Tensor, initial: Tensor | None, scale: float) -> CentredKeys:
    """Keys [B, T, K, d] minus the mean of the earlier keys, whose moments are `initial` [B, K, F, e + 1].

    Only earlier keys may be used: a later one, however large, must not change a row before it.
    """
    count = torch.arange(1, k.shape[1] + 1, device=k.device)[:, None, None]
    if initial is None:
        return CentredKeys(k, None, None, scores_of_own_key(q, k.float().cumsum(1) / count, scale))
    d = k.shape[-1]
    seen, total = initial[:, None, :, 0, -1:].detach(), initial[:, None, :, 1 : 1 + d, -1]
    offset = (total.detach() / seen.clamp(min=1)).to(k.dtype)
    k, initial = k - offset, moments_about(initial, offset[:, 0])
    before = initial[:, None, :, 1 : 1 + d, -1]
    return CentredKeys(
        k, initial, offset, scores_of_own_key(q, (before + k.float().cumsum(1)) / (seen + count), scale)
    )


def scores_of_own_key(q: Tensor, key: Tensor, scale: float) -> Tensor:
    """scale·q_t·key_t [B, H, T], where `key` [B, T or 1, K, d] holds one key per query."""
    grouped = q.float().unflatten(2, (key.shape[2], -1))
    own = key.float().expand(-1, q.shape[1], -1, -1)
    return torch.einsum("btkgd,btkd->bkgt", grouped, own).flatten(1, 2) * scale


def row_coefficients(spec: AttentionSpec, mean: Tensor, scale: float) -> Tensor:
    """α [N+1, B, H, T]: the coefficients about the mean, in powers of the score without its scale."""
    alpha = spec.kernel.coefficients(RowStatistics(mean))
    return torch.stack([(a + torch.zeros_like(mean)) * scale**n for n, a in enumerate(alpha)])


# ----------------------------------------------------------------------------------------------- the operator


@operator("maclaurin::linear_polynomial")
def linear_polynomial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    initial: Tensor | None,
    coefficients: Sequence[float],
    divisor: str,
    eps: float,
    chunk: int,
    orders: Sequence[int],
    return_state: bool,
    narrow: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """y [B, T, H, e] and D [B, H, T] in fp32; the state after the text [B, K, F, e (+ 1)], or None.

    `narrow`: y in bf16, and after D its rounding error for the backward pass; else that is None. The state
    holds these orders, as `initial` does, and a column for the row sum if rows are divided by it. Last come
    the keys' moments for the backward pass: small ones, orders 2 and 3, or None.
    """
    from maclaurin.programs.triton import linear_time as program
    from maclaurin.programs.triton import moments as layout

    call = program.Call(tuple(coefficients), divisor, eps, chunk, narrow, causal)
    d, e = q.shape[3], v.shape[3]
    start = None
    if initial is not None:
        start = layout.unpacked(initial.flatten(0, 1), orders, d, e, call.order)
    y, rest, z, past, after = program.forward(
        q, k, v, program.Rows(alpha, log_forget), call, initial=start, totals=return_state
    )
    state = None
    if after is not None:
        state = layout.packed(after, orders, d, e, sums=call.by_sum).unflatten(0, k.shape[::2])
    return y, z, rest, state, past.small, past.high.get(2), past.high.get(3)


@operator("maclaurin::linear_polynomial_backward")
def linear_polynomial_backward(
    dy: Tensor,
    d_divisor: Tensor | None,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    z: Tensor,
    rest: Tensor | None,
    state: Tensor | None,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    moments: Sequence[Tensor | None],
    started: bool,
    coefficients: Sequence[float],
    divisor: str,
    chunk: int,
    orders: Sequence[int],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, dα, and the gradients of the log forget gate and of the state before, or None."""
    from maclaurin.programs.triton import linear_time as program
    from maclaurin.programs.triton import moments as layout

    call = program.Call(tuple(coefficients), divisor, 0.0, chunk, causal=causal)
    d, e = q.shape[3], v.shape[3]
    small, *high = map(present, moments)
    assert small is not None
    after = d_after = None
    if d_state is not None and state is not None:
        after, d_after = (
            layout.unpacked(u.flatten(0, 1), orders, d, e, call.order) for u in (state, d_state)
        )
    found, before = program.backward(
        dy,
        d_divisor,
        q,
        k,
        v,
        y,
        present(rest),
        z,
        program.Rows(alpha, log_forget),
        program.Moments(small, {n: u for n, u in zip((2, 3), high, strict=True) if u is not None}),
        call,
        started=started,
        totals=after,
        d_totals=d_after,
    )
    d_initial = None
    if before is not None:
        d_initial = layout.packed(before, orders, d, e, sums=call.by_sum)
        d_initial = d_initial.unflatten(0, k.shape[::2])
    return *found, d_initial  # type: ignore[return-value]


@linear_polynomial.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    initial: Tensor | None,
    coefficients: Sequence[float],
    divisor: str,
    eps: float,
    chunk: int,
    orders: Sequence[int],
    return_state: bool,
    narrow: bool,
    causal: bool,
) -> tuple[Tensor | None, ...]:
    from maclaurin.programs.triton import block_layout, moments, tiles

    batch, tokens, heads, d = q.shape
    e, kv_heads, chunks = v.shape[3], k.shape[2], -(-tokens // chunk) if causal else 1
    rows, wide = batch * kv_heads, torch.float32
    features = sum(number_of_multisets(d, n) for n in orders)
    state = (batch, kv_heads, features, e + int(divisor == "sum"))
    high = [
        q.new_empty(
            rows,
            chunks,
            block_layout.block_rows(int(d), n),
            e,
            dtype=tiles.operand(q),
        )
        if n < len(coefficients)
        else None
        for n in (2, 3)
    ]
    y = q.new_empty(batch, tokens, heads, e, dtype=torch.bfloat16 if narrow else wide)
    return (
        y,
        q.new_empty(batch, heads, tokens, dtype=wide),
        torch.empty_like(y) if narrow else None,
        q.new_empty(state, dtype=wide) if return_state else None,
        q.new_empty(rows, chunks, moments.small_size(d, e), dtype=wide),
        high[0],
        high[1],
    )


@linear_polynomial_backward.register_fake
def _(
    dy: Tensor,
    d_divisor: Tensor | None,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    z: Tensor,
    rest: Tensor | None,
    state: Tensor | None,
    alpha: Tensor | None,
    log_forget: Tensor | None,
    moments: Sequence[Tensor | None],
    started: bool,
    coefficients: Sequence[float],
    divisor: str,
    chunk: int,
    orders: Sequence[int],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    d_alpha, d_forget = (None if u is None else torch.empty_like(u) for u in (alpha, log_forget))
    features = sum(number_of_multisets(q.shape[3], n) for n in orders)
    shape = (k.shape[0], k.shape[2], features, v.shape[3] + int(divisor == "sum"))
    d_initial = q.new_empty(shape, dtype=torch.float32) if started else None
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_alpha, d_forget, d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    q, k, v, alpha, log_forget, initial, coefficients, divisor, _, *sizes, ctx.return_state, _, causal = (
        inputs
    )
    ctx.call = (coefficients, divisor, *sizes, causal)
    ctx.started = initial is not None
    y, z, rest, state, *moments = output
    ctx.save_for_backward(q, k, v, y, z, rest, state, alpha, log_forget, *moments)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, dz: Tensor | None, _: Any, d_state: Tensor | None, *__: Any
) -> tuple[Any, ...]:
    q, k, v, y, z, rest, state, alpha, log_forget, *moments = ctx.saved_tensors
    if dy is None and dz is None and d_state is None:
        return (None,) * 14
    dy = torch.zeros_like(y) if dy is None else dy
    d_state = d_state if ctx.return_state else None  # when traced, an empty state has a gradient too
    dq, dk, dv, d_alpha, d_forget, d_initial = linear_polynomial_backward(
        dy, dz, d_state, q, k, v, y, z, rest, state, alpha, log_forget, moments, ctx.started, *ctx.call
    )
    d_alpha = None if alpha is None else d_alpha
    d_forget = None if log_forget is None else d_forget
    return dq, dk, dv, d_alpha, d_forget, d_initial if ctx.started else None, *(None,) * 8


linear_polynomial.register_autograd(_backward, setup_context=_save)
