"""Linear attention with feature maps, gates, denominator and norm inside the programs.

    w_ts = e^{L_t − L_s} scale φ(q_t)·φ(k_s),     y_t = N( Σ_{s≤t} w_ts i_s v_s / D_t ),     D_t = Σ_s w_ts + eps, t, or 1

L is the running total of the log forget gate. The text is cut into chunks. A query reads the keys of its own chunk
pair by pair, and all earlier keys through the state S = Σ_s e^{−L_s} φ(k_s) (i_s v_s)ᵀ at the start of the chunk.

Launches, forward:   states (along the text, segment by segment), [join segments], rows
          backward:  states of the gradients (from the end), [join segments], all gradients of a chunk at once

A segment is a run of chunks that one program processes in order, with states that start from zero. If a text has
several segments, `_join` sums the states of all segments before each one (PAST), and readers add both parts.

Backward, with dn = scale·dy/D (or through the norm) and dz = −Σ dn∘y under a row sum:

    g_ts = e^{L_t − L_s}(dn_t·i_s v_s + dz_t),   dφ(q) = Σ_s g φ(k),   dφ(k) = Σ_t g φ(q),   d(iv) = Σ_t e^{L_t − L_s} φ(q)·φ(k) dn

R is the state of (q, dn) over all later chunks, as S is that of (k, v) over earlier ones. The gradient of ln f_t is
Σ g φ(q)·φ(k) over all pairs of a key s and a query r with s < t ≤ r; the program for t's chunk has all the parts.

Tensors are [B, T, heads, size]; states [B·K, chunks, d, e] in the operands' dtype, their row sums [B·K, chunks, d] in fp32.
In kernels, S are the `Settings`, and STATE and STATE_Z are the states S and their row sums; likewise R, PAST and LATER.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import dense, on_its_device
from maclaurin.programs.triton.launch import Launch, Layout, New, by_shapes, launched, new_tensors, prepared
from maclaurin.programs.triton.tiles import cdiv, operand, operand_options, width

#: a log forget gate below this forgets everything (forms/stream.py has the same limit)
_LOWEST_LOG_FORGET = tl.constexpr(-200.0)
#: how many programs process segments at the same time: enough to fill a large GPU several times
WALKERS = 1024
#: fewest chunks per segment
LEAST_CHUNKS = 4


class Settings(NamedTuple):
    """The compile-time arguments of the kernels (S in kernels) but `_join`.

    GROUP             query heads per key-value head
    D, E, BD, BE      sizes of keys and values, and of their tiles
    C                 tokens per chunk
    PHI               the feature map, by name
    BY_SUM, BY_COUNT  what rows are divided by; states have row sums under BY_SUM
    COUNTED           whether there are keys before the text, which BY_COUNT counts too
    NORM, CENTRED     whether rows are normed, and centred before that
    RESTS             whether y has a rounding error
    GATED, DECAY      whether there is an input gate, and a forget gate
    CAUSAL, JOINED    whether rows read states of chunks, and states of whole segments
    STARTED, TOTALS   whether states start from a given one, and whether those of whole segments are stored
    WIDE              the dtype of totals of the log forget gate
    OPERAND, PRECISION      how products are computed (tiles.py)
    """

    GROUP: int
    D: int
    E: int
    BD: int
    BE: int
    C: int
    PHI: str
    BY_SUM: bool
    BY_COUNT: bool
    COUNTED: bool
    NORM: bool
    CENTRED: bool
    RESTS: bool
    GATED: bool
    DECAY: bool
    CAUSAL: bool
    JOINED: bool
    STARTED: bool
    TOTALS: bool
    WIDE: Any
    OPERAND: Any
    PRECISION: Any


# ------------------------------------------------------------------------------------ shared helpers


@triton.jit
def _first_token(chunk, C: tl.constexpr):
    """The number of a chunk's first token, in 64 bits."""
    return tl.zeros((), tl.int64) + chunk * C


@triton.jit
def _tile(X, first, x_t, i, column, left, SIZE: tl.constexpr):
    """Rows first + i of X, zeros beyond `left` rows and SIZE columns; `first` has 64 bits."""
    inside = (i < left)[:, None] & (column < SIZE)[None, :]
    return tl.load(X + first * x_t + i[:, None] * x_t + column[None, :], mask=inside, other=0.0)


@triton.jit
def _column(X, at, x_t, i, left, PRESENT: tl.constexpr, DEFAULT: tl.constexpr):
    """One number per token in fp32; DEFAULT without the tensor and beyond the end of the text."""
    if PRESENT:
        x = tl.load(X + at + i * x_t, mask=i < left, other=DEFAULT).to(tl.float32)
    else:
        x = tl.full(i.shape, DEFAULT, tl.float32)
    return x


@triton.jit
def _features(u, i, d, left, S: tl.constexpr):
    """φ(u) in fp32, zero outside of the text and the head."""
    PHI: tl.constexpr = S.PHI
    u = u.to(tl.float32)
    if PHI == "elu1":
        inside = (i < left)[:, None] & (d < S.D)[None, :]
        x = tl.where(inside, tl.where(u > 0, u + 1.0, tl.exp(tl.minimum(u, 0.0))), 0.0)
    elif PHI == "relu":
        x = tl.maximum(u, 0.0)
    elif PHI == "cosine":
        x = u * _inverse_length(u)[:, None]
    else:
        x = u
    return x


@triton.jit
def _inverse_length(u):
    """1/‖u‖, 1 for a zero vector."""
    squared = tl.sum(u * u, 1)
    return tl.rsqrt(tl.where(squared == 0, 1.0, squared))


@triton.jit
def _through_features(dx, u, S: tl.constexpr):
    """The gradient of u from that of φ(u)."""
    PHI: tl.constexpr = S.PHI
    u = u.to(tl.float32)
    if PHI == "elu1":
        dx = tl.where(u >= 0, dx, dx * tl.exp(tl.minimum(u, 0.0)))
    elif PHI == "relu":
        dx = tl.where(u > 0, dx, 0.0)
    elif PHI == "cosine":
        inverse = _inverse_length(u)[:, None]
        x = u * inverse
        dx = (dx - x * tl.sum(x * dx, 1)[:, None]) * inverse
    return dx


@triton.jit
def _log_totals(LOG, at, l_t, i, left, S: tl.constexpr):
    """L from the start of the chunk up to and including each token, and at the end of the chunk."""
    WIDE: tl.constexpr = S.WIDE
    if S.DECAY:
        log = tl.load(LOG + at + i * l_t, mask=i < left, other=0.0).to(WIDE)
        log = tl.maximum(log, _LOWEST_LOG_FORGET)
        totals, end = tl.cumsum(log, 0), tl.sum(log, 0)
    else:
        totals = tl.zeros(i.shape, WIDE)
        end = tl.sum(totals, 0)
    return totals, end


# ------------------------------------------------------------------------------------ states


@triton.jit
def _start(INITIAL, row, away, d, e, S: tl.constexpr):
    """State and row sums that a segment starts from: INITIAL for the segment at distance `away` = 0, else zeros."""
    BD: tl.constexpr = S.BD
    BE: tl.constexpr = S.BE
    WIDTH: tl.constexpr = S.E + 1 if S.BY_SUM else S.E
    if S.STARTED:
        at = INITIAL + row * S.D * WIDTH + d * WIDTH
        here = (d < S.D) & (d * 0 + away == 0)
        state = tl.load(at[:, None] + e[None, :], mask=here[:, None] & (e < S.E)[None, :], other=0.0)
        sums = tl.zeros((BD,), tl.float32)
        if S.BY_SUM:
            sums = tl.load(at + S.E, mask=here, other=0.0)
    else:
        state = tl.zeros((BD, BE), tl.float32)
        sums = tl.zeros((BD,), tl.float32)
    return state, sums


@triton.jit
def _store_state(STATE, STATE_Z, place, state, sums, d, e, S: tl.constexpr):
    """Store the state of a chunk in the operands' dtype, its row sums in fp32."""
    inside = (d < S.D)[:, None] & (e < S.E)[None, :]
    at = STATE + place * S.D * S.E + d[:, None] * S.E + e[None, :]
    tl.store(at, state.to(STATE.dtype.element_ty), mask=inside)
    if S.BY_SUM:
        tl.store(STATE_Z + place * S.D + d, sums, mask=d < S.D)


@triton.jit
def _store_total(TOTAL, place, state, sums, d, e, S: tl.constexpr):
    """Store state and row sums side by side in fp32, the layout of a state between calls."""
    WIDTH: tl.constexpr = S.E + 1 if S.BY_SUM else S.E
    at = TOTAL + place * S.D * WIDTH + d * WIDTH
    inside = (d < S.D)[:, None] & (e < S.E)[None, :]
    tl.store(at[:, None] + e[None, :], state, mask=inside)
    if S.BY_SUM:
        tl.store(at + S.E, sums, mask=d < S.D)


@launched
@triton.jit(do_not_specialize=["T", "H", "heads", "chunks", "segments", "per_segment"])
def _key_states(
    K, V, GATE, LOG, INITIAL, STATE, STATE_Z, TOTAL, CHUNK_LOG, SEGMENT_LOG,
    k_strides, v_strides, g_strides, l_strides,
    T, heads, chunks, segments, per_segment, S: tl.constexpr,
):  # fmt: skip
    """States before each chunk of one segment of one key-value head, and the total after it."""
    C: tl.constexpr = S.C
    WIDE: tl.constexpr = S.WIDE
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    g_b, g_t, g_h = g_strides
    l_b, l_t, l_h = l_strides
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = row // heads, row % heads
    i, d, e = tl.arange(0, C), tl.arange(0, S.BD), tl.arange(0, S.BE)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    gate_at, log_at = b * g_b + g * g_h, b * l_b + g * l_h
    state, sums = _start(INITIAL, row, segment, d, e, S)
    since = tl.sum(tl.zeros((C,), WIDE), 0)
    for chunk in range(segment * per_segment, tl.minimum((segment + 1) * per_segment, chunks)):
        first = _first_token(chunk, C)
        left = T - chunk * C
        if S.CAUSAL:
            _store_state(STATE, STATE_Z, row * chunks + chunk, state, sums, d, e, S)
        k = _features(_tile(K, first, k_t, i, d, left, S.D), i, d, left, S).to(OPERAND)
        v = _tile(V, first, v_t, i, e, left, S.E)
        weight = _column(GATE, gate_at + first * g_t, g_t, i, left, S.GATED, 1.0)
        if S.DECAY:
            tl.store(CHUNK_LOG + row * chunks + chunk, since.to(tl.float32))
            log, end = _log_totals(LOG, log_at + first * l_t, l_t, i, left, S)
            kept = tl.exp((end - log).to(tl.float32))
            weight *= kept
            carry = tl.exp(end.to(tl.float32))
            state, sums, since = state * carry, sums * carry, since + end
        if S.GATED or S.DECAY:
            v = v.to(tl.float32) * weight[:, None]
        state = tl.dot(tl.trans(k), v.to(OPERAND), state, input_precision=PRECISION)
        if S.BY_SUM:
            x = k.to(tl.float32)
            if S.DECAY:
                x *= kept[:, None]
            sums += tl.sum(x, 0)
    if S.TOTALS:
        _store_total(TOTAL, row * segments + segment, state, sums, d, e, S)
        if S.DECAY:
            tl.store(SEGMENT_LOG + row * segments + segment, since.to(tl.float32))


@launched
@triton.jit(do_not_specialize=["segments"])
def _join(
    TOTAL, SEGMENT_LOG, PAST, PAST_Z, FINAL, segments,
    D: tl.constexpr, E: tl.constexpr, BY_SUM: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
    ALL: tl.constexpr, ENDED: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The sum over all segments before each one (after it, if REVERSE), and over all. ALL: only the latter, as PAST."""
    WIDTH: tl.constexpr = E + 1 if BY_SUM else E
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D * WIDTH
    d, e = at // WIDTH, at % WIDTH
    ahead = tl.arange(0, AHEAD)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, segments, AHEAD):
        step = start + ahead
        places = row * segments + (segments - 1 - step if REVERSE else step)
        found = tl.load(TOTAL + places[:, None] * (D * WIDTH) + at[None, :],
                        mask=(step < segments)[:, None] & inside[None, :], other=0.0)  # fmt: skip
        if DECAY:
            log = tl.load(SEGMENT_LOG + places, mask=step < segments, other=0.0)
        for j in tl.static_range(AHEAD):
            if not ALL:
                place = row * segments + (segments - 1 - start - j if REVERSE else start + j)
                _store_past(
                    PAST, PAST_Z, place, total, d, e, inside & (at * 0 + start + j < segments), D, E, BY_SUM
                )
            if DECAY:
                total *= tl.exp(tl.sum(tl.where(ahead == j, log, 0.0), 0))
            total += tl.sum(tl.where((ahead == j)[:, None], found, 0.0), 0)
    if ALL:
        _store_past(PAST, PAST_Z, row, total, d, e, inside, D, E, BY_SUM)
    if ENDED:
        tl.store(FINAL + row * D * WIDTH + at, total, mask=inside)


@triton.jit
def _store_past(
    PAST, PAST_Z, place, total, d, e, inside, D: tl.constexpr, E: tl.constexpr, BY_SUM: tl.constexpr
):
    tl.store(PAST + place * D * E + d * E + e, total.to(PAST.dtype.element_ty), mask=inside & (e < E))
    if BY_SUM:
        tl.store(PAST_Z + place * D + d, total, mask=inside & (e == E))


# -------------------------------------------------------------------------------------- rows


@triton.jit
def _state_at(STATE, place, d, e, S: tl.constexpr):
    """A state [d, e] in the operands' dtype."""
    inside = (d < S.D)[:, None] & (e < S.E)[None, :]
    return tl.load(STATE + place * S.D * S.E + d[:, None] * S.E + e[None, :], mask=inside, other=0.0)


@triton.jit
def _sums_at(STATE_Z, place, d, S: tl.constexpr):
    return tl.load(STATE_Z + place * S.D + d, mask=d < S.D, other=0.0)


@triton.jit
def _add_state(acc, z, q, STATE, STATE_Z, place, d, e, S: tl.constexpr):
    """Add keys of earlier chunks to rows: y += Sᵀ φ(q), z += φ(q)·Σ φ(k)."""
    PRECISION: tl.constexpr = S.PRECISION
    acc = tl.dot(q, _state_at(STATE, place, d, e, S), acc, input_precision=PRECISION)
    if S.BY_SUM:
        z += tl.sum(q.to(tl.float32) * _sums_at(STATE_Z, place, d, S)[None, :], 1)
    return acc, z


@triton.jit
def _normed(y, inside, factor, E: tl.constexpr, CENTRED: tl.constexpr):
    """factor·a/‖a‖ and factor/‖a‖ of each row, a = y or y − mean(y); a row of zeros stays zero."""
    if CENTRED:
        y = tl.where(inside, y - tl.sum(y, 1)[:, None] / E, 0.0)
    largest = tl.max(tl.abs(y), 1)
    largest = tl.where(largest == 0, 1.0, largest)
    y = y / largest[:, None]
    squared = tl.sum(y * y, 1)
    gain = factor / tl.sqrt(tl.where(squared == 0, 1.0, squared))
    return y * gain[:, None], gain / largest


@launched
@triton.jit(do_not_specialize=["T", "H", "heads", "chunks", "segments", "per_segment"])
def _rows(
    Q, K, V, GATE, LOG, BEFORE, STATE, STATE_Z, PAST, PAST_Z, CHUNK_LOG, Y, REST, STAT,
    q_strides, k_strides, v_strides, g_strides, l_strides, y_strides,
    T, H, chunks, segments, per_segment, scale, eps, factor, S: tl.constexpr,
):  # fmt: skip
    """y of a chunk of queries of one head; D or the norm's gain of each row, for the backward pass."""
    C: tl.constexpr = S.C
    BE: tl.constexpr = S.BE
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    g_b, g_t, g_h = g_strides
    l_b, l_t, l_h = l_strides
    y_b, y_t, y_h = y_strides
    chunk, head = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, h = head // H, head % H
    g = h // S.GROUP
    row = b * (H // S.GROUP) + g
    first = _first_token(chunk, C)
    left = T - chunk * C
    i, d, e = tl.arange(0, C), tl.arange(0, S.BD), tl.arange(0, BE)
    x = _features(_tile(Q + b * q_b + h * q_h, first, q_t, i, d, left, S.D), i, d, left, S)
    q = x.to(OPERAND)
    log, _ = _log_totals(LOG, b * l_b + g * l_h + first * l_t, l_t, i, left, S)
    acc = tl.zeros((C, BE), tl.float32)
    z = tl.zeros((C,), tl.float32)
    if S.JOINED:  # earlier segments; without a causal mask, everything
        place = row * segments + chunk // per_segment if S.CAUSAL else row
        acc, z = _add_state(acc, z, q, PAST, PAST_Z, place, d, e, S)
        if S.DECAY:
            seen = tl.exp(tl.load(CHUNK_LOG + row * chunks + chunk))
            acc, z = acc * seen, z * seen
    if S.CAUSAL:
        place = row * chunks + chunk
        acc, z = _add_state(acc, z, q, STATE, STATE_Z, place, d, e, S)
        if S.DECAY:
            seen_of_past = tl.exp(log.to(tl.float32))
            acc, z = acc * seen_of_past[:, None], z * seen_of_past
        k = _features(_tile(K + b * k_b + g * k_h, first, k_t, i, d, left, S.D), i, d, left, S).to(OPERAND)
        v = _tile(V + b * v_b + g * v_h, first, v_t, i, e, left, S.E)
        if S.GATED:
            gate = _column(GATE, b * g_b + g * g_h + first * g_t, g_t, i, left, S.GATED, 1.0)
            v = _gated(v, gate, OPERAND)
        w = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if S.DECAY:
            w *= tl.exp(tl.minimum((log[:, None] - log[None, :]).to(tl.float32), 0.0))
        w = tl.where(i[None, :] <= i[:, None], w, 0.0).to(OPERAND)
        if S.BY_SUM:
            z += tl.sum(
                w.to(tl.float32), 1
            )  # of the rounded weights, so that those in the product sum to one
        acc = tl.dot(w, v.to(OPERAND), acc, input_precision=PRECISION)
    inside = (i < left)[:, None] & (e < S.E)[None, :]
    stat_at = head * T + first + i
    if S.NORM:
        y, gain = _normed(tl.where(inside, acc, 0.0), inside, factor, S.E, S.CENTRED)
        tl.store(STAT + stat_at, gain, mask=i < left)
    elif S.BY_SUM:
        divisor = z * scale + eps
        divisor = tl.where(divisor == 0, 1.0, divisor)
        tl.store(STAT + stat_at, divisor, mask=i < left)
        y = acc * (scale / divisor)[:, None]
    else:
        y = acc * _scale_of_rows(BEFORE, b, chunk, i, T, scale, S)[:, None]
    at = b * y_b + h * y_h + first * y_t + i[:, None] * y_t + e[None, :]
    rounded = y.to(Y.dtype.element_ty)
    tl.store(Y + at, rounded, mask=inside)
    if S.RESTS:
        tl.store(REST + at, (y - rounded.to(tl.float32)).to(REST.dtype.element_ty), mask=inside)


@triton.jit
def _gated(v, gate, OPERAND: tl.constexpr):
    """v [C, e] times its gate. Overflows become large numbers: rows that do not see the key would get 0·∞."""
    MOST: tl.constexpr = 3.3895313892515355e38 if tl.float16 != OPERAND else 65504.0
    LARGE: tl.constexpr = 1.2676506002282294e30 if tl.float16 != OPERAND else 65504.0  # as in forms/stream.py
    x = v.to(tl.float32) * gate[:, None]
    return tl.where(x > MOST, LARGE, tl.where(x < -MOST, -LARGE, x)).to(OPERAND)


@triton.jit
def _scale_of_rows(BEFORE, b, chunk, i, T, scale, S: tl.constexpr):
    """scale/D of rows that are divided by the number of visible keys, or not at all."""
    if S.BY_COUNT:
        count = (chunk * S.C + i + 1 if S.CAUSAL else i * 0 + T).to(tl.float32)
        if S.COUNTED:
            count += tl.load(BEFORE + b).to(tl.float32)
        found = scale / count
    else:
        found = tl.zeros(i.shape, tl.float32) + scale
    return found


# --------------------------------------------------------------------------------- gradients


@triton.jit
def _gradient_of_rows(
    DY, Y, REST, STAT, BEFORE, o_strides, y_strides, b, h, H, T, chunk, first, i, e, left, scale, S: tl.constexpr,
    READS: tl.constexpr,
):  # fmt: skip
    """dn of a chunk of rows in fp32; with READS or a norm also y, its rounding error added back if stored."""
    o_b, o_t, o_h = o_strides
    y_b, y_t, y_h = y_strides
    dn = _tile(DY + b * o_b + h * o_h, first, o_t, i, e, left, S.E).to(tl.float32)
    y = dn
    if S.NORM or READS:
        at = b * y_b + h * y_h
        y = _tile(Y + at, first, y_t, i, e, left, S.E).to(tl.float32)
        if S.RESTS:
            y += _tile(REST + at, first, y_t, i, e, left, S.E).to(tl.float32)
    if S.NORM:  # of the scale, rows have only its sign, which is in the gain
        gain = tl.load(STAT + (b * H + h) * T + first + i, mask=i < left, other=0.0)
        squared = tl.sum(y * y, 1)
        share = tl.sum(y * dn, 1) / tl.where(squared == 0, 1.0, squared)
        dn = (dn - y * share[:, None]) * gain[:, None]
        if S.CENTRED:
            inside = (i < left)[:, None] & (e < S.E)[None, :]
            dn = tl.where(inside, dn - tl.sum(dn, 1)[:, None] / S.E, 0.0)
    elif S.BY_SUM:
        divisor = tl.load(STAT + (b * H + h) * T + first + i, mask=i < left, other=1.0)
        dn = dn * (scale / divisor)[:, None]
    else:
        dn = dn * _scale_of_rows(BEFORE, b, chunk, i, T, scale, S)[:, None]
    return dn, y


@launched
@triton.jit(do_not_specialize=["T", "H", "heads", "chunks", "segments", "per_segment"])
def _gradient_states(
    Q, DY, Y, REST, STAT, LOG, BEFORE, INITIAL, R, RZ, TOTAL, DZ, CHUNK_LOG, SEGMENT_LOG,
    q_strides, o_strides, y_strides, l_strides,
    T, heads, chunks, segments, per_segment, scale, S: tl.constexpr,
):  # fmt: skip
    """R after each chunk of one segment of one key-value head, from the last chunk to the first; dz of its rows."""
    C: tl.constexpr = S.C
    WIDE: tl.constexpr = S.WIDE
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    q_b, q_t, q_h = q_strides
    l_b, l_t, l_h = l_strides
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = row // heads, row % heads
    H = heads * S.GROUP
    i, d, e = tl.arange(0, C), tl.arange(0, S.BD), tl.arange(0, S.BE)
    state, sums = _start(INITIAL, row, segments - 1 - segment, d, e, S)
    since = tl.sum(tl.zeros((C,), WIDE), 0)
    begin = segment * per_segment
    end_of_segment = tl.minimum(begin + per_segment, chunks)
    for step in range(end_of_segment - begin):
        chunk = end_of_segment - 1 - step
        first = _first_token(chunk, C)
        left = T - chunk * C
        if S.CAUSAL:
            _store_state(R, RZ, row * chunks + chunk, state, sums, d, e, S)
        if S.DECAY:
            tl.store(CHUNK_LOG + row * chunks + chunk, since.to(tl.float32))
            log, end = _log_totals(LOG, b * l_b + g * l_h + first * l_t, l_t, i, left, S)
            seen = tl.exp(log.to(tl.float32))
            carry = tl.exp(end.to(tl.float32))
            state, sums, since = state * carry, sums * carry, since + end
        for member in range(S.GROUP):
            h = g * S.GROUP + member
            rows = (b * H + h) * T + first
            q = _tile(Q + b * q_b + h * q_h, first, q_t, i, d, left, S.D)
            x = _features(q, i, d, left, S).to(OPERAND)
            dn, y = _gradient_of_rows(
                DY, Y, REST, STAT, BEFORE, o_strides, y_strides, b, h, H, T, chunk, first, i, e, left, scale, S, S.BY_SUM
            )  # fmt: skip
            dn = dn.to(OPERAND)
            if S.BY_SUM:
                dz = -tl.sum(dn.to(tl.float32) * y, 1)
                tl.store(DZ + rows + i, dz, mask=i < left)
                if S.DECAY:
                    dz *= seen
                sums += tl.sum(x.to(tl.float32) * dz[:, None], 0)
            if S.DECAY:
                dn = (dn.to(tl.float32) * seen[:, None]).to(OPERAND)
            state = tl.dot(tl.trans(x), dn, state, input_precision=PRECISION)
    if S.TOTALS:
        _store_total(TOTAL, row * segments + segment, state, sums, d, e, S)
        if S.DECAY:
            tl.store(SEGMENT_LOG + row * segments + segment, since.to(tl.float32))


@triton.jit
def _add_later_rows(dk, dv, k, v, R, RZ, place, d, e, S: tl.constexpr):
    """Add rows of later chunks: dφ(k) += R (i v) + Σ dz φ(q), d(i v) += Rᵀ φ(k)."""
    PRECISION: tl.constexpr = S.PRECISION
    r = _state_at(R, place, d, e, S)
    dk = tl.dot(v, tl.trans(r), dk, input_precision=PRECISION)
    dv = tl.dot(k, r, dv, input_precision=PRECISION)
    if S.BY_SUM:
        dk += _sums_at(RZ, place, d, S)[None, :]
    return dk, dv


@triton.jit
def _add_earlier_keys(dq, dn, low, dz, STATE, STATE_Z, place, d, e, S: tl.constexpr):
    """Add keys of earlier chunks: dφ(q) += S dn + dz Σ φ(k)."""
    PRECISION: tl.constexpr = S.PRECISION
    state = tl.trans(_state_at(STATE, place, d, e, S))
    dq = tl.dot(dn, state, dq, input_precision=PRECISION)
    if S.NORM:
        dq = tl.dot(low, state, dq, input_precision=PRECISION)
    if S.BY_SUM:
        dq += dz[:, None] * _sums_at(STATE_Z, place, d, S)[None, :]
    return dq


@triton.jit
def _add_pairs(dq, dk, dv, of_rows, q, k, v, dn, low, dz, log, i, S: tl.constexpr):
    """Add pairs within the chunk: g to dφ(q) and dφ(k), w to d(i v); to of_rows, Σ g φ(q)·φ(k) as row less as key."""
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    ds = tl.dot(dn, tl.trans(v), input_precision=PRECISION)
    if S.NORM:
        ds = tl.dot(low, tl.trans(v), ds, input_precision=PRECISION)
    if S.BY_SUM:
        ds += dz[:, None]
    visible = i[None, :] <= i[:, None]
    if S.DECAY:
        between = tl.exp(tl.minimum((log[:, None] - log[None, :]).to(tl.float32), 0.0))
        ds *= between
        pairs = tl.where(visible, ds * s, 0.0)
        of_rows += tl.sum(pairs, 1) - tl.sum(pairs, 0)
        s *= between
    w = tl.where(visible, s, 0.0).to(OPERAND)
    ds = tl.where(visible, ds, 0.0).to(OPERAND)
    dv = tl.dot(tl.trans(w), dn, dv, input_precision=PRECISION)
    dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
    dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq, dk, dv, of_rows


@triton.jit
def _across(
    STATE, STATE_Z, PAST, PAST_Z, before, R, RZ, LATER, LATER_Z, after, place, past, d, e, S: tl.constexpr
):  # fmt: skip
    """Σ g φ(q)·φ(k) over keys of earlier chunks and rows of later ones, without the decay of the chunk between them."""
    keys = _state_at(STATE, place, d, e, S).to(tl.float32)
    rows = _state_at(R, place, d, e, S).to(tl.float32)
    if S.JOINED:
        keys += before * _state_at(PAST, past, d, e, S).to(tl.float32)
        rows += after * _state_at(LATER, past, d, e, S).to(tl.float32)
    across = tl.sum(tl.sum(keys * rows, 1), 0)
    if S.BY_SUM:
        keys_z, rows_z = _sums_at(STATE_Z, place, d, S), _sums_at(RZ, place, d, S)
        if S.JOINED:
            keys_z += before * _sums_at(PAST_Z, past, d, S)
            rows_z += after * _sums_at(LATER_Z, past, d, S)
        across += tl.sum(keys_z * rows_z, 0)
    return across


@triton.jit
def rows_of(b, h, H, T, first):
    """The index of row (b, first, h) in a contiguous tensor [B, T, H, ·]."""
    return (b * T + first) * H + h


@launched
@triton.jit(do_not_specialize=["T", "H", "heads", "chunks", "segments", "per_segment"])
def _gradients(
    Q, K, V, DY, Y, REST, STAT, BEFORE, DZ, GATE, LOG, STATE, STATE_Z, PAST, PAST_Z, LOG_BEFORE, R, RZ, LATER, LATER_Z, LOG_AFTER,
    DQ, DK, DV, DGATE, DLOG,
    q_strides, k_strides, v_strides, o_strides, y_strides, g_strides, l_strides,
    T, heads, chunks, segments, per_segment, scale, S: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv and the gradients of both gates for one chunk of one key-value head; dq of all its query heads.

    Under a norm, dn is orthogonal to the row. Rows of few or small weights are sensitive to an error in that, so the
    rounding error of dn, `low`, is multiplied too.
    """
    C: tl.constexpr = S.C
    BD: tl.constexpr = S.BD
    BE: tl.constexpr = S.BE
    OPERAND: tl.constexpr = S.OPERAND
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    g_b, g_t, g_h = g_strides
    l_b, l_t, l_h = l_strides
    chunk, row = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, g = row // heads, row % heads
    H = heads * S.GROUP
    first = _first_token(chunk, C)
    left = T - chunk * C
    i, d, e = tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BE)
    inside_d, inside_e = (i < left)[:, None] & (d < S.D)[None, :], (i < left)[:, None] & (e < S.E)[None, :]
    place = row * chunks + chunk
    past = row * segments + chunk // per_segment if S.CAUSAL else row
    log, end = _log_totals(LOG, b * l_b + g * l_h + first * l_t, l_t, i, left, S)
    seen = tl.exp(log.to(tl.float32))
    kept = tl.exp((end - log).to(tl.float32))
    before, after = 1.0, 1.0
    if S.JOINED and S.DECAY:
        before, after = tl.exp(tl.load(LOG_BEFORE + place)), tl.exp(tl.load(LOG_AFTER + place))
    k_raw = _tile(K + b * k_b + g * k_h, first, k_t, i, d, left, S.D)
    v_raw = _tile(V + b * v_b + g * v_h, first, v_t, i, e, left, S.E)
    k = _features(k_raw, i, d, left, S).to(OPERAND)
    gate = _column(GATE, b * g_b + g * g_h + first * g_t, g_t, i, left, S.GATED, 1.0)
    v = _gated(v_raw, gate, OPERAND) if S.GATED else v_raw.to(OPERAND)
    # gradients of this chunk's keys and values from later chunks
    dk = tl.zeros((C, BD), tl.float32)
    dv = tl.zeros((C, BE), tl.float32)
    if S.JOINED:
        dk, dv = _add_later_rows(dk, dv, k, v, LATER, LATER_Z, past, d, e, S)
        if S.DECAY:
            dk, dv = dk * after, dv * after
    if S.CAUSAL:
        dk, dv = _add_later_rows(dk, dv, k, v, R, RZ, place, d, e, S)
    of_rows = tl.zeros((C,), tl.float32)
    if S.DECAY:
        dk, dv = dk * kept[:, None], dv * kept[:, None]
        of_later = tl.sum(k.to(tl.float32) * dk, 1)  # Σ g φ(q)·φ(k) over rows of later chunks
    for member in range(S.GROUP):
        h = g * S.GROUP + member
        q_raw = _tile(Q + b * q_b + h * q_h, first, q_t, i, d, left, S.D)
        q = _features(q_raw, i, d, left, S).to(OPERAND)
        wide, _ = _gradient_of_rows(
            DY, Y, REST, STAT, BEFORE, o_strides, y_strides, b, h, H, T, chunk, first, i, e, left, scale, S, False
        )  # fmt: skip
        dn = wide.to(OPERAND)
        low = (wide - dn.to(tl.float32)).to(OPERAND)
        dz = _column(DZ, (b * H + h) * T + first, 1, i, left, S.BY_SUM, 0.0)
        dq = tl.zeros((C, BD), tl.float32)
        if S.JOINED:
            dq = _add_earlier_keys(dq, dn, low, dz, PAST, PAST_Z, past, d, e, S)
            if S.DECAY:
                dq *= before
        if S.CAUSAL:
            dq = _add_earlier_keys(dq, dn, low, dz, STATE, STATE_Z, place, d, e, S)
            if S.DECAY:
                dq *= seen[:, None]
                of_rows += tl.sum(q.to(tl.float32) * dq, 1)
            dq, dk, dv, of_rows = _add_pairs(dq, dk, dv, of_rows, q, k, v, dn, low, dz, log, i, S)
        dq = _through_features(dq, q_raw, S)
        at = DQ + rows_of(b, h, H, T, first) * S.D + i[:, None] * (H * S.D) + d[None, :]
        tl.store(at, dq.to(DQ.dtype.element_ty), mask=inside_d)
    dk = _through_features(dk, k_raw, S)
    at = DK + rows_of(b, g, heads, T, first) * S.D + i[:, None] * (heads * S.D) + d[None, :]
    tl.store(at, dk.to(DK.dtype.element_ty), mask=inside_d)
    if S.GATED:
        d_gate = tl.sum(dv * v_raw.to(tl.float32), 1)
        at = DGATE + rows_of(b, g, heads, T, first) + i * heads
        tl.store(at, d_gate.to(DGATE.dtype.element_ty), mask=i < left)
        dv *= gate[:, None]
    at = DV + rows_of(b, g, heads, T, first) * S.E + i[:, None] * (heads * S.E) + e[None, :]
    tl.store(at, dv.to(DV.dtype.element_ty), mask=inside_e)
    if S.DECAY:
        across = _across(
            STATE, STATE_Z, PAST, PAST_Z, before, R, RZ, LATER, LATER_Z, after, place, past, d, e, S
        )
        across *= tl.exp(end.to(tl.float32))
        # pairs s < t ≤ r: s and r in the chunk, only s, only r, neither
        of_rows = tl.sum(of_rows, 0) - tl.cumsum(of_rows, 0) + of_rows
        d_log = of_rows + tl.cumsum(of_later, 0) - of_later + across
        raw = tl.load(LOG + b * l_b + g * l_h + first * l_t + i * l_t, mask=i < left, other=0.0).to(
            tl.float32
        )
        d_log = tl.where(raw < _LOWEST_LOG_FORGET, 0.0, d_log)
        tl.store(
            DLOG + rows_of(b, g, heads, T, first) + i * heads, d_log.to(DLOG.dtype.element_ty), mask=i < left
        )


# ------------------------------------------------------------------------------------ launching


class Call(NamedTuple):
    """The non-tensor arguments.

    feature_map   identity, elu1, relu or cosine, computed in registers
    divisor       "sum": D = row sum + eps; "count": the number of visible keys; "one"
    length        the length to which a norm scales each row (of undivided rows: divisor is "one"); 0 for no norm
    centred       whether the norm first subtracts the row's mean
    final         y in the dtype of q; else in fp32
    rests         keep the rounding error of y: under a norm, or where row sums of both signs can be small
    chunk         tokens per chunk, a power of two and at least 16; 0 for the default
    """

    feature_map: str
    scale: float
    divisor: str = "one"
    eps: float = 0.0
    length: float = 0.0
    centred: bool = False
    causal: bool = True
    final: bool = True
    rests: bool = False
    chunk: int = 0

    @property
    def signed_length(self) -> float:
        """The length with the sign of the scale: a norm cancels only the size of it."""
        return math.copysign(self.length, self.scale) if self.scale else 0.0

    @property
    def sums(self) -> bool:
        return self.divisor == "sum"


class States(NamedTuple):
    """What `forward` saves for `backward`: states before each chunk and segment, and the logs of their decay.

    None where the call has no chunks, segments, row sums or decay.
    """

    chunks: Tensor | None
    chunk_sums: Tensor | None
    past: Tensor | None
    past_sums: Tensor | None
    log: Tensor | None


class Gradients(NamedTuple):
    """Gradients of q, k, v and both gates in their dtypes, and of the initial state in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    input_gate: Tensor | None
    log_forget: Tensor | None
    initial: Tensor | None


@on_its_device
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_gate: Tensor | None,
    log_forget: Tensor | None,
    before: Tensor | None,
    call: Call,
    *,
    initial: Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, States]:
    """y [B, T, H, e]; D or the norm's gain [B, H, T]; the rounding error of y; the state after the text; States.

    Gates are [B, T, K]; `before` [B] counts earlier keys; states are [B, K, d, e (+ 1)], row sums last. Tensors that
    the call does not use are None.
    """
    launches = _forward_launches(
        _Given.of(q, k, v, input_gate, log_forget), call, before is not None, initial is not None, return_state
    )  # fmt: skip
    y, stat, rest, final, states, sums, past, past_sums, logs = new_tensors(q, *launches.results)
    total, segment_logs = new_tensors(q, *launches.of_segments)
    if launches.join is None:  # with one segment, its state is the final state
        total = final
    launches.states(k, v, input_gate, log_forget, initial, states, sums, total, logs, segment_logs)
    if launches.join is not None:
        launches.join(total, segment_logs, past, past_sums, final)
    launches.rows(q, k, v, input_gate, log_forget, before, states, sums, past, past_sums, logs, y, rest, stat)
    return y, stat, rest, final, States(states, sums, past, past_sums, logs)


def results(
    q: Tensor | Layout, k: Tensor | Layout, v: Tensor | Layout, decays: bool, call: Call, return_state: bool
) -> tuple[New | None, ...]:
    """Shapes and dtypes of everything that `forward` returns, in order; None for what the call does not use."""
    plan = _Plan.of(q, k, v, call)
    batch, tokens, heads, _ = q.shape
    rows, d, e, wide = plan.rows, plan.d, plan.e, torch.float32
    y, of_y = (batch, tokens, heads, e), q.dtype if call.final else wide
    places = plan.segments if call.causal else 1
    return (
        New(y, of_y),
        New((batch, heads, tokens), wide) if call.sums or call.length else None,
        New(y, of_y) if call.rests else None,
        New((batch, k.shape[2], d, e + int(call.sums)), wide) if return_state else None,
        New((rows, plan.chunks, d, e), operand(q)) if call.causal else None,
        New((rows, plan.chunks, d), wide) if call.causal and call.sums else None,
        New((rows, places, d, e), operand(q)) if plan.joined else None,
        New((rows, places, d), wide) if plan.joined and call.sums else None,
        New((rows, plan.chunks), wide) if decays else None,
    )


@on_its_device
def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_gate: Tensor | None,
    log_forget: Tensor | None,
    before: Tensor | None,
    y: Tensor,
    stat: Tensor | None,
    rest: Tensor | None,
    states: States,
    call: Call,
    *,
    d_state: Tensor | None = None,
    started: bool = False,
) -> Gradients:
    """All gradients, given those of y and, if used, of the state after the text."""
    dy = dense(dy)
    launches = _backward_launches(
        _Given.of(q, k, v, input_gate, log_forget), Layout.of(y), Layout.of(dy), call, before is not None, d_state is not None, started,
    )  # fmt: skip
    dq, dk, dv, dz, d_initial = new_tensors(q, *launches.results)
    later, later_sums, ahead, ahead_sums, logs = (None if u is None else torch.empty_like(u) for u in states)
    total, segment_logs = new_tensors(q, *launches.of_segments)
    if launches.join is None:
        total = d_initial
    launches.states(
        q, dy, y, rest, stat, log_forget, before, d_state, later, later_sums, total, dz, logs, segment_logs
    )
    if launches.join is not None:
        launches.join(total, segment_logs, ahead, ahead_sums, d_initial)
    d_gate = None if input_gate is None else input_gate.new_empty(input_gate.shape)
    d_log = None if log_forget is None else log_forget.new_empty(log_forget.shape)
    launches.rows(
        q, k, v, dy, y, rest, stat, before, dz, input_gate, log_forget, *states, later, later_sums, ahead, ahead_sums, logs,
        dq, dk, dv, d_gate, d_log,
    )  # fmt: skip
    return Gradients(dq, dk, dv, d_gate, d_log, d_initial if started else None)


class _Given(NamedTuple):
    """Layouts of the tensors that both passes read."""

    q: Layout
    k: Layout
    v: Layout
    gate: Layout | None
    log: Layout | None

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, log: Tensor | None) -> _Given:
        return _Given(Layout.of(q), Layout.of(k), Layout.of(v), Layout.of_given(gate), Layout.of_given(log))


class _Launches(NamedTuple):
    """The launches of one pass, and the tensors it makes."""

    states: Launch
    #: None with one segment
    join: Launch | None
    rows: Launch
    results: tuple[New | None, ...]
    of_segments: tuple[New | None, New | None]


@by_shapes
def _forward_launches(
    given: _Given, call: Call, counted: bool, started: bool, return_state: bool
) -> _Launches:
    q, k, v, gate, log = given
    plan = _Plan.of(q, k, v, call)
    settings = _settings(given, call, plan, counted)
    made = results(q, k, v, log is not None, call, return_state)
    y = Layout.contiguous((*q.shape[:3], v.shape[3]), q.dtype)
    gates = _strides(gate), _strides(log)
    of_states = settings._replace(STARTED=started, TOTALS=plan.joined or return_state)
    of_text = (
        q.shape[1],
        q.shape[2],
        plan.chunks,
        plan.segments,
        plan.text[4],
        call.scale,
        call.eps,
        call.signed_length,
    )
    return _Launches(
        prepared(
            _key_states,
            (plan.rows, plan.segments),
            (k.strides[:3], v.strides[:3], *gates, *plan.text),
            _options("states", of_states, plan),
        ),
        _join_launch(plan, call, log is not None, ended=return_state, reverse=False),
        prepared(
            _rows,
            (plan.chunks * q.shape[0] * q.shape[2],),
            (q.strides[:3], k.strides[:3], v.strides[:3], *gates, y.strides[:3], *of_text),
            _options("rows", settings, plan),
        ),
        made,
        _of_segments(plan, call, log is not None),
    )


@by_shapes
def _backward_launches(
    given: _Given,
    y: Layout,
    dy: Layout,
    call: Call,
    counted: bool,
    ended: bool,
    started: bool,
) -> _Launches:
    q, k, v, gate, log = given
    plan = _Plan.of(q, k, v, call)
    settings = _settings(given, call, plan, counted)
    batch, tokens, heads, _ = q.shape
    of_states = settings._replace(STARTED=ended, TOTALS=plan.joined or started)
    made = (
        *(New(u.shape, u.dtype) for u in (q, k, v)),
        New((batch, heads, tokens), torch.float32) if call.sums else None,
        New((batch, k.shape[2], plan.d, plan.e + int(call.sums)), torch.float32) if started else None,
    )
    return _Launches(
        prepared(
            _gradient_states,
            (plan.rows, plan.segments),
            (q.strides[:3], dy.strides[:3], y.strides[:3], _strides(log), *plan.text, call.scale),
            _options("gradient states", of_states, plan),
        ),
        _join_launch(plan, call, log is not None, ended=started, reverse=True),
        prepared(
            _gradients,
            (plan.chunks * plan.rows,),
            (
                *(u.strides[:3] for u in (q, k, v, dy, y)),
                _strides(gate),
                _strides(log),
                *plan.text,
                call.scale,
            ),
            _options("gradients", settings, plan),
        ),
        made,
        _of_segments(plan, call, log is not None),
    )


def _join_launch(plan: _Plan, call: Call, decays: bool, *, ended: bool, reverse: bool) -> Launch | None:
    """Compute the states between segments from their totals, and the final state if `ended`."""
    if not plan.joined:
        return None
    block = 256
    options = {
        "D": plan.d,
        "E": plan.e,
        "BY_SUM": call.sums,
        "DECAY": decays,
        "REVERSE": reverse,
        "ALL": not call.causal,
        "ENDED": ended,
        "BLOCK": block,
        "AHEAD": 8,
        "num_warps": 4,
    }
    grid = plan.rows, cdiv(plan.d * (plan.e + int(call.sums)), block)
    return prepared(_join, grid, (plan.segments,), options)


def _of_segments(plan: _Plan, call: Call, decays: bool) -> tuple[New | None, New | None]:
    """Totals of segments, if there are several, and the logs of their decay."""
    logs = plan.rows, plan.segments
    total = (*logs, plan.d, plan.e + int(call.sums))
    return (
        New(total, torch.float32) if plan.joined else None,
        New(logs, torch.float32) if decays else None,
    )


class _Plan(NamedTuple):
    """How a text is cut. `rows` counts key-value heads of the batch; `joined`: whether segments are added up."""

    rows: int
    d: int
    e: int
    chunk: int
    joined: bool
    #: arguments of programs: T, key-value heads, chunks, segments, chunks per segment
    text: tuple[int, int, int, int, int]

    @staticmethod
    def of(q: Tensor | Layout, k: Tensor | Layout, v: Tensor | Layout, call: Call) -> _Plan:
        batch, tokens, kv_heads, d = k.shape
        chunk = call.chunk or (
            64 if q.dtype == torch.bfloat16 else 32
        )  # products in fp32 take more registers
        rows, chunks = batch * kv_heads, cdiv(tokens, chunk)
        wanted = max(1, min(WALKERS // rows, cdiv(chunks, LEAST_CHUNKS)))
        per_segment = cdiv(chunks, wanted)
        segments = cdiv(chunks, per_segment)
        text = (tokens, kv_heads, chunks, segments, per_segment)
        return _Plan(rows, d, v.shape[3], chunk, segments > 1 or not call.causal, text)

    @property
    def chunks(self) -> int:
        return self.text[2]

    @property
    def segments(self) -> int:
        return self.text[3]


def _strides(gate: Layout | None) -> tuple[int, ...]:
    return (0, 0, 0) if gate is None else gate.strides[:3]


def _settings(given: _Given, call: Call, plan: _Plan, counted: bool) -> Settings:
    q, k, _, gate, log = given
    return Settings(
        GROUP=q.shape[2] // k.shape[2],
        D=plan.d,
        E=plan.e,
        BD=width(plan.d),
        BE=width(plan.e),
        C=plan.chunk,
        PHI=call.feature_map,
        BY_SUM=call.sums,
        BY_COUNT=call.divisor == "count",
        COUNTED=counted,
        NORM=call.length > 0,
        CENTRED=call.centred,
        RESTS=call.rests,
        GATED=gate is not None,
        DECAY=log is not None,
        CAUSAL=call.causal,
        JOINED=plan.joined,
        STARTED=False,
        TOTALS=False,
        WIDE=tl.float64 if q.dtype == torch.float32 else tl.float32,
        **operand_options(q),
    )


#: warps and pipeline stages by program, for head sizes up to 64 and up to 128
WARPS = {
    "states": ((4, 3), (8, 3)),
    "rows": ((4, 1), (8, 1)),
    "gradient states": ((4, 3), (8, 2)),
    "gradients": ((4, 1), (8, 1)),
}


def _options(program: str, settings: Settings, plan: _Plan) -> dict[str, Any]:
    """The compile-time arguments of a launch: its settings, and the options of triton."""
    warps, stages = WARPS[program][max(plan.d, plan.e) > 64]
    return {"S": settings, "num_warps": warps, "num_stages": stages}
