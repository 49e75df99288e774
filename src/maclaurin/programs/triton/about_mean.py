"""Attention with a polynomial about the mean score of each row, with or without an exact window.

    x_ts = scale q_t·k_s,       tail of t: sinks ≤ s ≤ t − window,       exact: every other s ≤ t
    c_t = mean of x over the tail (or 0),       w_ts = Σ_n c_n (x − c_t)ⁿ in the tail, e^{x − c_t} elsewhere
    y_t = Σ_s w_ts v_s / Σ_s w_ts,      or divided by t where the sum could vanish

In balanced rows the t weights sum to t: the same constant h_t is subtracted from every weight of the row,

    h_t = Σ_s w_ts / t − c₀,        y_t = Σ_s (w_ts − h_t) v_s / t = (Σ_s w_ts v_s − h_t Σ_s v_s) / t

For exp of order 2, h = u/2 with the variance u of the row's scores: Hermite's polynomial instead of Taylor's. The sum
of the values up to t is computed from sums before each tile, like the sum of the keys.

The polynomial is the truncated series of exp, or another approximation of exp. Adding a constant to all scores of a row
does not change y. Let g = dy·v − dy·y (dy·v if rows are divided by t; dy·v − dy·v̄ in balanced rows, v̄ the mean value)
and w′ the slope of the polynomial. Then

    dx = w g/Σw (exact),      w′ g/Σw (tail),       dc_t = −Σ_s dx_ts,       dx′ = dx + dc_t/n_t in the tail

where n_t is the size of the tail. c_t is computed from the sum of the keys before the row's tile (key_sums.py) and the
scores with the keys of that tile.

A series of order 2 is a square plus a constant, (r (x − c + h))² + f. Weight and slope then take two multiplications
per pair, and no large numbers cancel. Programs call r (x − c + h) the point p. The slope is p times STEEPNESS = 2r;
gradients are multiplied by STEEPNESS once, at the end. Other series use Horner's rule, p = x − c and STEEPNESS 1.

Without FAR, every pair of the tail is computed. With FAR, the tail is cut into chunks, and a query reads the chunks
before its own as moments (moments.py) of the keys minus an offset, which avoids cancellation of large mean scores. The
offset is the mean key of the first chunk (or of an earlier text). Only later chunks read it, so no row depends on a
later key.

Positions: s and t count tokens; j = s − sinks and i = t − window − sinks count within the tail, where a query sees j ≤ i.
Tiles and chunks are aligned in i and j. Saved per row: c and L = ln Σ w. The backward pass over queries stores for the
one over keys dy/Σw and NUMBERS per row: −dy·y/Σw, the term that p subtracts, dc/n; h in balanced rows; beside a window
log₂(e^c Σw) and dy·y. NUMBERS are padded, with AHEAD rows before
the first row with a tail, so that loads need no mask.

Packed sequences are one row of `total` tokens, and PLACES says which sequence a tile belongs to (packed.py). Positions
and T then count within the sequence, NUMBERS are padded per sequence, and every pair is computed, without a window.

If a chunk is no larger than a tile, the loops over earlier tiles of the same chunk are empty. They are left out at
compile time, because LLVM's code for an empty loop crashes ptxas of CUDA 12.8 and 12.9.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import dense, on_its_device
from maclaurin.programs.triton.block_layout import block_of, block_rows
from maclaurin.programs.triton.key_sums import TILE, sums_before_tiles, sums_in_sequences
from maclaurin.programs.triton.launch import Launch, Layout, New, by_shapes, launched, new_tensors, prepared
from maclaurin.programs.triton.linear_time import times_square
from maclaurin.programs.triton.moments import Moments, Side, moments, unpacked
from maclaurin.programs.triton.packed import place_of, places, tiles_of_packed
from maclaurin.programs.triton.pair_moments import lower_sums, pairs_times, read_both, read_pairs, sums_at
from maclaurin.programs.triton.tiles import (
    Tile,
    add_sum,
    cdiv,
    no_sums,
    operand,
    operand_options,
    power_of_2,
    store_rows,
    sums_of,
    tile_options,
    width,
    with_settings,
)

#: tiles by pass for head sizes up to 64 and up to 128; "far" where the tail is cut into chunks
TILES = {
    "forward": (Tile(64, 64, 4, 3, 168), Tile(128, 64, 8, 3)),
    "queries": (Tile(64, 64, 4, 3, 168), Tile(128, 64, 8, 3)),
    "keys": (Tile(64, 64, 4, 3), Tile(32, 128, 8, 2)),
    "forward far": (Tile(64, 32, 4, 3), Tile(128, 64, 8, 2)),
    "queries far": (Tile(64, 32, 4, 3), Tile(128, 32, 8, 2)),
    "keys far": (Tile(32, 64, 4, 3), Tile(32, 128, 8, 2)),
}
#: NUMBERS per row are padded to a multiple of this
_LARGEST_TILE = 128
_TILE, _PADDING = tl.constexpr(TILE), tl.constexpr(_LARGEST_TILE)
_LOG2E, _LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))


class Settings(NamedTuple):
    """The compile-time arguments of the three passes (S in kernels).

    GROUP             query heads per key-value head
    D, E, BD, BE      sizes of keys and values, and of their tiles
    BM, BN, SB        queries and keys per tile, and the tile of all sinks
    C, SQUARE, STEEPNESS, WINDOW, SINKS, AHEAD      of `Call`
    CHUNK, ROWS2      tokens per chunk, and rows of the blocks of order 2
    FAR, STARTED      whether earlier keys are read through moments, and whether there are some before the text
    ABOUT_MEAN, BY_SUM, BALANCED      what rows are about and divided by
    NARROW            whether y has a rounding error
    ONES, OPERAND, PRECISION          how sums and products are computed (tiles.py)
    """

    GROUP: int
    D: int
    E: int
    BD: int
    BE: int
    BM: int
    BN: int
    SB: int
    C: tuple[float, ...]
    SQUARE: tuple[float, ...]
    STEEPNESS: float
    WINDOW: int
    SINKS: int
    AHEAD: int
    CHUNK: int
    ROWS2: int
    FAR: bool
    ABOUT_MEAN: bool
    BY_SUM: bool
    BALANCED: bool
    STARTED: bool
    NARROW: bool
    ONES: bool
    OPERAND: Any
    PRECISION: Any


# ------------------------------------------------------------------------------------------ shared helpers


@triton.jit
def _rows(X, x_t, first, i, column, T, SIZE: tl.constexpr, BEFORE: tl.constexpr, BEHIND: tl.constexpr):
    """Rows first + i of X, zeros outside of the text. BEFORE, BEHIND: some may lie before its start, after its end.

    The offset of the first row has 64 bits.
    """
    at = X + (tl.zeros((), tl.int64) + first) * x_t + (i[:, None] * x_t + column[None, :])
    if BEFORE or BEHIND:
        inside = (first + i < T)[:, None]
        if BEFORE:
            inside = inside & (first + i >= 0)[:, None]
        if column.shape[0] != SIZE:
            inside = inside & (column < SIZE)[None, :]
        x = tl.load(at, mask=inside, other=0.0)
    elif column.shape[0] != SIZE:
        x = tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _numbers(X, rows, first, i, T, DEFAULT: tl.constexpr):
    """One number per row."""
    row = first + i
    return tl.load(X + rows + row, mask=(row >= 0) & (row < T), other=DEFAULT)


@triton.jit
def _padded_place(begin, T, sequence, padded):
    """Where the NUMBERS of a sequence begin; a tile without a sequence writes to the end, which is never read."""
    return tl.where(T > 0, (begin // _PADDING + sequence) * _PADDING, padded - _PADDING)


@triton.jit
def _point(s, c, scale, SQUARE: tl.constexpr):
    """The point p: x − c, or r (x − c + h) for a polynomial that is a square plus a constant."""
    return s * (scale * SQUARE[0]) - c if len(SQUARE) > 0 else s * scale - c


@triton.jit
def _point_of_mean(c, SQUARE: tl.constexpr):
    """The term that `_point` subtracts for a mean score c."""
    return (c - SQUARE[1]) * SQUARE[0] if len(SQUARE) > 0 else c


@triton.jit
def _weight(p, C: tl.constexpr, SQUARE: tl.constexpr):
    """Σ c_n (x − c)ⁿ: p² plus a constant, or by Horner's rule."""
    if len(SQUARE) > 0:
        w = p * p + SQUARE[2]
    else:
        w = tl.full(p.shape, C[len(C) - 1], tl.float32)
        for n in tl.static_range(1, len(C)):
            w = w * p + C[len(C) - 1 - n]
    return w


@triton.jit
def _slope(p, C: tl.constexpr, SQUARE: tl.constexpr):
    """Σ n c_n (x − c)ⁿ⁻¹ / STEEPNESS: p itself for a square."""
    if len(SQUARE) > 0:
        slope = p
    else:
        slope = tl.full(p.shape, C[len(C) - 1] * (len(C) - 1), tl.float32)
        for n in tl.static_range(1, len(C) - 1):
            slope = slope * p + C[len(C) - 1 - n] * (len(C) - 1 - n)
    return slope


@triton.jit
def _inverse_count(COUNT, row, i, STARTED: tl.constexpr):
    """1/n of each row's tail, 0 where it is empty."""
    count = tl.maximum(i + 1, 0).to(tl.float32)
    if STARTED:
        count += tl.load(COUNT + row)
    return tl.where(count > 0, 1.0 / tl.maximum(count, 1.0), 0.0)


@triton.jit
def _past_keys(PREFIX, row, tiles, i0, d, D: tl.constexpr):
    """The sum of all keys before the first row's tile, and where that tile begins."""
    base = tl.maximum(i0, 0) // _TILE * _TILE
    return tl.load(PREFIX + (row * (tiles + 1) + base // _TILE) * D + d, mask=d < D, other=0.0), base


@triton.jit
def _mean_scores(q, K, k_t, PREFIX, COUNT, row, tiles, i0, i, n, d, T, scale, SINKS: tl.constexpr, D: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """c of each row: the mean of its scores with the keys before its tile and with the visible keys of its tile."""
    past, base = _past_keys(PREFIX, row, tiles, i0, d, D)
    total = tl.sum(q.to(tl.float32) * past[None, :], 1)
    for start in tl.range(base, i0 + BM, BN, num_stages=1):
        k = _rows(K, k_t, start + SINKS, n, d, T, D, False, True).to(OPERAND)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        total += tl.sum(tl.where((start + n)[None, :] <= (i0 + i)[:, None], s, 0.0), 1)
    return total * _inverse_count(COUNT, row, i0 + i, STARTED) * scale


@triton.jit
def _value_sums(V, v_t, VALUES, row, tiles, i0, i, n, e, T, SINKS: tl.constexpr, E: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The sum of the values up to each row: those before its tile, plus the visible ones of its tile."""
    past, base = _past_keys(VALUES, row, tiles, i0, e, E)
    total = tl.zeros((BM, e.shape[0]), tl.float32) + past[None, :]
    for start in tl.range(base, i0 + BM, BN, num_stages=1):
        v = _rows(V, v_t, start + SINKS, n, e, T, E, False, True).to(OPERAND)
        below = tl.where((start + n)[None, :] <= (i0 + i)[:, None], 1.0, 0.0).to(OPERAND)
        total = tl.dot(below, v, total, input_precision=PRECISION)
    return total


@triton.jit
def _add_exact(acc, z, largest, q, c, seen, K, V, k_t, v_t, first, n, d, e, T, scale, S: tl.constexpr):
    """Add a tile of exact keys to running maximum, sum and rows; scores and c are in units of ln 2."""
    PRECISION: tl.constexpr = S.PRECISION
    OPERAND: tl.constexpr = S.OPERAND
    k = _rows(K, k_t, first, n, d, T, S.D, False, True).to(OPERAND)
    v = _rows(V, v_t, first, n, e, T, S.E, False, True).to(OPERAND)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E) - c[:, None]
    x = tl.where(seen, x, float("-inf"))
    new = tl.maximum(largest, tl.max(x, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(largest - safe)
    p = tl.exp2(x - safe[:, None]).to(OPERAND)
    z = add_sum(_shrunk(z, shrink, S.ONES), p, S.ONES)
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, z, new


@triton.jit
def _shrunk(z, shrink, ONES: tl.constexpr):
    return z * shrink[:, None] if ONES else z * shrink


# ------------------------------------------------------------------------------------------------ rows


@launched
@triton.jit(do_not_specialize=["T", "H", "heads", "tiles", "chunks"])
def _forward(
    Q, K, V, PREFIX, VALUES, COUNT, OFFSET, SMALL, S2, Y, REST, MEAN, LOG, LESS, PLACES,
    q_strides, k_strides, v_strides, y_strides,
    T, H, tiles, chunks, scale, S: tl.constexpr,
):  # fmt: skip
    """y, c and L of a tile of queries of one head."""
    PRECISION: tl.constexpr = S.PRECISION
    C: tl.constexpr = S.C
    SQUARE: tl.constexpr = S.SQUARE
    OPERAND: tl.constexpr = S.OPERAND
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    y_b, y_t, y_h = y_strides
    BE: tl.constexpr = S.BE
    BM: tl.constexpr = S.BM
    SHIFT: tl.constexpr = S.WINDOW + S.SINKS
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * S.BM - (
        SHIFT + S.BM - 1
    ) // S.BM * S.BM  # the longest rows first
    total = T
    if PLACES is not None:
        begin, T, index, sequence = place_of(
            PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0)
        )
        i0, slot = index * S.BM, begin // _TILE + sequence
        Q, K, V = Q + begin * q_t, K + begin * k_t, V + begin * v_t
        PREFIX, VALUES = PREFIX + slot * S.D, VALUES + slot * S.E if S.BALANCED else VALUES
        Y, REST = Y + begin * y_t, REST + begin * y_t if S.NARROW else REST
        MEAN, LOG, LESS = MEAN + begin, LOG + begin, LESS + begin if S.BALANCED else LESS
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // S.GROUP
    row = b * (H // S.GROUP) + g
    i, n, d, e = tl.arange(0, S.BM), tl.arange(0, S.BN), tl.arange(0, S.BD), tl.arange(0, S.BE)
    t = i0 + SHIFT + i
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    q = _rows(Q + b * q_b + h * q_h, q_t, i0 + SHIFT, i, d, T, S.D, S.WINDOW > 0, True).to(OPERAND)
    c = tl.zeros((BM,), tl.float32)
    if S.ABOUT_MEAN:
        c = _mean_scores(q, K, k_t, PREFIX, COUNT, row, tiles, i0, i, n, d, T, scale, S.SINKS, S.D, S.BM, S.BN, S.STARTED,
                         OPERAND, PRECISION)  # fmt: skip
    acc = tl.zeros((BM, BE), tl.float32)
    of_past = tl.zeros((BM,), tl.float32)
    begin = 0
    if S.FAR:
        chunk = tl.maximum(i0, 0) // S.CHUNK
        begin = chunk * S.CHUNK
        there = 1 if S.STARTED else (chunk > 0).to(tl.int32)  # no branch: it would serialize wgmma
        past = row * chunks + chunk
        small = SMALL + past * (S.D * S.E + S.E + S.D * S.D + S.D + 1)
        a0, a1, a2 = _about(q, c, OFFSET, row, d, scale, C, S.D)
        if len(C) > 2:
            at = S2 + past * S.ROWS2 * S.E
            q_at = Q + b * q_b + h * q_h + (tl.zeros((), tl.int64) + i0 + SHIFT) * q_t
            of_text = (t >= 0) & (t < T)
            acc = a2[:, None] * read_pairs(q, q_at + i * q_t, of_text, at, there, e, S.D, S.E, PRECISION)
        one = tl.dot(q, block_of(small, 0, d, e, S.D, S.E, S.BD, 1).to(OPERAND), input_precision=PRECISION)
        zero = tl.load(small + S.D * S.E + e, mask=e < S.E, other=0.0)
        acc += a1[:, None] * one + a0[:, None] * zero[None, :]
        at = small + S.D * S.E + S.E
        line = a1[:, None] * tl.load(at + S.D * S.D + d, mask=d < S.D, other=0.0)[None, :]
        if len(C) > 2:
            line += a2[:, None] * times_square(q, at, d, S.D, OPERAND, PRECISION)
        of_past = tl.sum(q.to(tl.float32) * line, 1) + a0 * tl.load(at + S.D * S.D + S.D)
    z = no_sums(S.BM, S.ONES)
    p0 = _point_of_mean(c, SQUARE)
    if S.CHUNK > S.BM or not S.FAR:
        for start in range(begin, i0, S.BN):
            acc, z = _add_tail(acc, z, q, p0, i0 + i, K, V, k_t, v_t, start, n, d, e, T, scale, S, False)  # fmt: skip
    for start in tl.range(tl.maximum(i0, 0), i0 + S.BM, S.BN, num_stages=1):
        acc, z = _add_tail(acc, z, q, p0, i0 + i, K, V, k_t, v_t, start, n, d, e, T, scale, S, True)  # fmt: skip
    unit = tl.zeros((BM,), tl.float32)  # log2 of the common divisor of all weights
    if S.WINDOW > 0:
        if not S.STARTED:  # without a tail, all weights of a row may be small
            unit = tl.where(i0 + i >= 0, 0.0, float("-inf"))
        c2 = c * _LOG2E
        for start in range(tl.maximum(i0, 0), i0 + S.BM + S.WINDOW, S.BN):
            seen_in_window = _is_exact(i0 + i, start + n, S.WINDOW)
            acc, z, unit = _add_exact(acc, z, unit, q, c2, seen_in_window, K, V, k_t, v_t, start + S.SINKS, n, d, e, T, scale, S)  # fmt: skip
        if S.SINKS > 0:
            s = tl.arange(0, S.SB)
            seen = (s < S.SINKS)[None, :] & (s[None, :] <= t[:, None])
            acc, z, unit = _add_exact(acc, z, unit, q, c2, seen, K, V, k_t, v_t, 0, s, d, e, T, scale, S)  # fmt: skip
        unit = tl.where(unit == float("-inf"), 0.0, unit)
    z = of_past * tl.exp2(-unit) + sums_of(z, S.ONES)
    there_rows = (t >= 0) & (t < T)
    rows = (b * H + h) * total
    if S.BALANCED:
        less = z / (i0 + i + 1).to(tl.float32) - C[0]
        acc -= less[:, None] * _value_sums(
            V, v_t, VALUES, row, tiles, i0, i, n, e, T, S.SINKS, S.E, S.BM, S.BN, OPERAND, PRECISION
        )
        tl.store(LESS + rows + t, less, mask=there_rows)
    if not S.BY_SUM:
        z = (i0 + i + 1).to(tl.float32)
    z = tl.where(z == 0, 1.0, z)
    at = b * y_b + h * y_h + (tl.zeros((), tl.int64) + i0 + SHIFT) * y_t + i[:, None] * y_t + e[None, :]
    store_rows(Y, REST, at, acc / z[:, None], there_rows[:, None] & (e < S.E)[None, :], S.NARROW)
    tl.store(LOG + rows + t, unit * _LN2 + tl.log(z), mask=there_rows)
    if S.ABOUT_MEAN:
        tl.store(MEAN + rows + t, c, mask=there_rows)


@triton.jit
def _is_exact(i, j, WINDOW: tl.constexpr):
    """Which keys j are in the window of queries i; keys before the first of the tail are sinks."""
    return (j[None, :] > i[:, None]) & (j[None, :] <= i[:, None] + WINDOW)


@triton.jit
def _about(q, c, OFFSET, row, d, scale, C: tl.constexpr, D: tl.constexpr):
    """Coefficients of the series of x − c in powers of q·(k − offset)."""
    offset = tl.load(OFFSET + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    c = c - tl.sum(q.to(tl.float32) * offset[None, :], 1) * scale
    a0, a1, a2 = C[0] - C[1] * c, scale * C[1] + c * 0.0, c * 0.0
    if len(C) > 2:
        a0 += C[2] * c * c
        a1 -= 2 * scale * C[2] * c
        a2 += scale * scale * C[2]
    return a0, a1, a2


@triton.jit
def _add_tail(
    acc, z, q, p0, i, K, V, k_t, v_t, start, n, d, e, T, scale, S: tl.constexpr, MASKED: tl.constexpr
):
    """Add one tile of keys of the tail to the sums of a tile of queries."""
    PRECISION: tl.constexpr = S.PRECISION
    C: tl.constexpr = S.C
    SQUARE: tl.constexpr = S.SQUARE
    OPERAND: tl.constexpr = S.OPERAND
    k = _rows(K, k_t, start + S.SINKS, n, d, T, S.D, False, MASKED).to(OPERAND)
    v = _rows(V, v_t, start + S.SINKS, n, e, T, S.E, False, MASKED).to(OPERAND)
    w = _weight(
        _point(tl.dot(q, tl.trans(k), input_precision=PRECISION), p0[:, None], scale, SQUARE),
        C,
        SQUARE,
    )
    if MASKED:
        w = tl.where((start + n)[None, :] <= i[:, None], w, 0.0)
    w = w.to(OPERAND)
    z = add_sum(z, w, S.ONES)  # of the rounded weights, so that those in the product sum to one
    return tl.dot(w, v, acc, input_precision=PRECISION), z


# ------------------------------------------------------------------------------------ gradients of queries


@triton.jit
def _add_pairs(
    dq,
    r,
    q,
    dy,
    dz,
    inverse,
    p0,
    i,
    K,
    V,
    k_t,
    v_t,
    start,
    n,
    d,
    e,
    T,
    scale,
    S: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a tile of keys of the tail to dq and Σ dx of a tile of queries, both divided by STEEPNESS."""
    PRECISION: tl.constexpr = S.PRECISION
    C: tl.constexpr = S.C
    SQUARE: tl.constexpr = S.SQUARE
    OPERAND: tl.constexpr = S.OPERAND
    k = _rows(K, k_t, start + S.SINKS, n, d, T, S.D, False, MASKED).to(OPERAND)
    v = _rows(V, v_t, start + S.SINKS, n, e, T, S.E, False, MASKED).to(OPERAND)
    p = _point(tl.dot(q, tl.trans(k), input_precision=PRECISION), p0[:, None], scale, SQUARE)
    grad = tl.dot(dy, tl.trans(v), input_precision=PRECISION) * inverse[:, None] + dz[:, None]
    dx = _slope(p, C, SQUARE) * grad
    if MASKED:
        dx = tl.where((start + n)[None, :] <= i[:, None], dx, 0.0)
    dx = dx.to(OPERAND)
    return tl.dot(dx, k, dq, input_precision=PRECISION), add_sum(r, dx, S.ONES)


@triton.jit
def _add_exact_pairs(
    dq, r, q, dy, delta, log, seen, K, V, k_t, v_t, first, n, d, e, T, scale, S: tl.constexpr
):
    """`_add_pairs` for a tile of exact keys; also returns the weights p and score gradients dx."""
    PRECISION: tl.constexpr = S.PRECISION
    OPERAND: tl.constexpr = S.OPERAND
    k = _rows(K, k_t, first, n, d, T, S.D, False, True).to(OPERAND)
    v = _rows(V, v_t, first, n, e, T, S.E, False, True).to(OPERAND)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E) - log[:, None]
    p = tl.exp2(tl.where(seen, x, float("-inf")))
    grad = tl.dot(dy, tl.trans(v), input_precision=PRECISION) - delta[:, None]
    dx = (p * grad * (1 / S.STEEPNESS)).to(OPERAND)
    return tl.dot(dx, k, dq, input_precision=PRECISION), add_sum(r, dx, S.ONES), p, dx


@launched
@triton.jit(do_not_specialize=["T", "H", "heads", "tiles", "chunks", "tail_tokens"])
def _backward_queries(
    Q, K, V, DY, Y, REST, MEAN, LOG, LESS, PREFIX, VALUES, COUNT, OFFSET, SMALL, S2, LOWER,
    DQ, DN, NUMBERS, WEIGHTS, OMEGA, EXTRA, SINK_PARTS, PLACES,
    q_strides, k_strides, v_strides, o_strides, y_strides, dq_strides, n_strides,
    T, H, tiles, chunks, tail_tokens, all_rows, padded, all_padded, scale, S: tl.constexpr,
):  # fmt: skip
    """dq; for `_backward_keys`, dy/Σw and NUMBERS; the rows' weights in moments; their part of the sinks' gradients."""
    PRECISION: tl.constexpr = S.PRECISION
    C: tl.constexpr = S.C
    SQUARE: tl.constexpr = S.SQUARE
    OPERAND: tl.constexpr = S.OPERAND
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    o_b, o_t, o_h = o_strides
    y_b, y_t, y_h = y_strides
    dq_b, dq_t, dq_h = dq_strides
    n_b, n_t, n_h = n_strides
    BD: tl.constexpr = S.BD
    BM: tl.constexpr = S.BM
    SHIFT: tl.constexpr = S.WINDOW + S.SINKS
    i0, total = (tl.num_programs(0) - 1 - tl.program_id(0)) * S.BM - (SHIFT + S.BM - 1) // S.BM * S.BM, T
    if PLACES is not None:
        begin, T, index, sequence = place_of(
            PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0)
        )
        i0, slot = index * S.BM, begin // _TILE + sequence
        Q, K, V, DY = Q + begin * q_t, K + begin * k_t, V + begin * v_t, DY + begin * o_t
        PREFIX, VALUES = PREFIX + slot * S.D, VALUES + slot * S.E if S.BALANCED else VALUES
        Y, REST = Y + begin * y_t if S.BY_SUM else Y, REST + begin * y_t if S.NARROW else REST
        MEAN, LOG, LESS = MEAN + begin, LOG + begin, LESS + begin if S.BALANCED else LESS
        DQ, DN = DQ + begin * dq_t, DN + begin * n_t
        NUMBERS += _padded_place(begin, T, sequence, padded)
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // S.GROUP
    row = b * (H // S.GROUP) + g
    i, n, d, e = tl.arange(0, S.BM), tl.arange(0, S.BN), tl.arange(0, S.BD), tl.arange(0, S.BE)
    t0 = i0 + SHIFT
    t = t0 + i
    there_rows = (t >= 0) & (t < T)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    rows = (b * H + h) * total
    q = _rows(Q + b * q_b + h * q_h, q_t, t0, i, d, T, S.D, S.WINDOW > 0, True).to(OPERAND)
    dy = _rows(DY + b * o_b + h * o_h, o_t, t0, i, e, T, S.E, S.WINDOW > 0, True).to(OPERAND)
    delta = tl.zeros((BM,), tl.float32)
    if S.BY_SUM:
        y = _rows(Y + b * y_b + h * y_h, y_t, t0, i, e, T, S.E, S.WINDOW > 0, True).to(tl.float32)
        if S.NARROW:
            y += _rows(REST + b * y_b + h * y_h, y_t, t0, i, e, T, S.E, S.WINDOW > 0, True).to(tl.float32)
        delta = tl.sum(dy.to(tl.float32) * y, 1)
    less = tl.zeros((BM,), tl.float32)
    if S.BALANCED:
        delta = _mean_scores(dy, V, v_t, VALUES, COUNT, row, tiles, i0, i, n, e, T, 1.0, S.SINKS, S.E, S.BM, S.BN, S.STARTED,
                             OPERAND, PRECISION)  # fmt: skip
        less = _numbers(LESS, rows, t0, i, T, 0.0)
    log = _numbers(LOG, rows, t0, i, T, 0.0)
    inverse = tl.exp(-log)
    c = tl.zeros((BM,), tl.float32)
    if S.ABOUT_MEAN:
        c = _numbers(MEAN, rows, t0, i, T, 0.0)
    p0, dz = _point_of_mean(c, SQUARE), -delta * inverse
    dn = (dy.to(tl.float32) * inverse[:, None]).to(DN.dtype.element_ty)
    at = DN + b * n_b + h * n_h + (tl.zeros((), tl.int64) + t0) * n_t + i[:, None] * n_t + e[None, :]
    tl.store(at, dn, mask=there_rows[:, None] & (e < S.E)[None, :])
    numbers = NUMBERS + (b * H + h) * padded + i0 + S.AHEAD + i
    tl.store(numbers, dz)
    if S.ABOUT_MEAN:
        tl.store(numbers + all_padded, p0)
    if S.BALANCED:
        tl.store(numbers + 3 * all_padded, less)
    log2 = (c + log) * _LOG2E
    if S.WINDOW > 0:
        tl.store(numbers + 3 * all_padded, log2)
        tl.store(numbers + 4 * all_padded, delta * (1 / S.STEEPNESS))
    dq = tl.zeros((BM, BD), tl.float32)
    r = tl.zeros((BM,), tl.float32)
    begin = 0
    if S.FAR:
        chunk = tl.maximum(i0, 0) // S.CHUNK
        begin = chunk * S.CHUNK
        there = 1 if S.STARTED else (chunk > 0).to(tl.int32)
        past = row * chunks + chunk
        small = SMALL + past * (S.D * S.E + S.E + S.D * S.D + S.D + 1)
        at = small + S.D * S.E + S.E
        a0, a1, a2 = _about(q, c, OFFSET, row, d, scale, C, S.D)
        share = inverse / (scale * S.STEEPNESS)
        second = tl.zeros((BM, BD), tl.float32)
        if len(C) > 2:
            q_at = Q + b * q_b + h * q_h + (tl.zeros((), tl.int64) + t0) * q_t
            at2 = S2 + past * S.ROWS2 * S.E
            if LOWER is not None:
                LOWER = sums_at(LOWER, b * H + h, t, total)
            second = pairs_times(
                dy, q_at + i * q_t, there_rows, at2, there, LOWER, total, e, S.D, S.E, S.BD, PRECISION
            )
            second -= delta[:, None] * times_square(q, at, d, S.D, OPERAND, PRECISION)
        one = tl.dot(
            dy,
            tl.trans(block_of(small, 0, d, e, S.D, S.E, S.BD, 1)).to(OPERAND),
            input_precision=PRECISION,
        )
        one -= delta[:, None] * tl.load(at + S.D * S.D + d, mask=d < S.D, other=0.0)[None, :]
        zero = tl.load(small + S.D * S.E + e, mask=e < S.E, other=0.0)
        sums = tl.sum(dy.to(tl.float32) * zero[None, :], 1) - delta * tl.load(at + S.D * S.D + S.D)
        # the slope of the series at x − c is (a₁ + 2 a₂ q·(k − offset)) / scale
        r = share * (a1 * sums + 2 * a2 * tl.sum(q.to(tl.float32) * one, 1))
        dq = share[:, None] * (a1[:, None] * one + (2 * a2)[:, None] * second)
        offset = tl.load(OFFSET + row * S.D + d, mask=d < S.D, other=0.0).to(tl.float32)
        dq += r[:, None] * offset[None, :]
        of_tail = there_rows & (i0 + i >= 0)
        at = (b * H + h) * tail_tokens + i0 + i
        tl.store(WEIGHTS + at, inverse * (a0 - less), mask=of_tail)
        tl.store(WEIGHTS + all_rows + at, inverse * a1, mask=of_tail)
        tl.store(WEIGHTS + 2 * all_rows + at, inverse * a2, mask=of_tail)
        tl.store(OMEGA + at, -delta, mask=of_tail)
    of_near = no_sums(S.BM, S.ONES)
    if S.WINDOW > 0:
        if S.SINKS > 0:
            part = ((b * H + h) * tl.num_programs(0) + tl.program_id(0)) * S.SINKS
            dq, of_near = _add_sinks(dq, of_near, q, dy, delta, log2, t, K, V, SINK_PARTS + part * (S.D + S.E), k_t, v_t, d, e, T, scale, S)  # fmt: skip
        for start in range(tl.maximum(i0, 0), i0 + S.BM + S.WINDOW, S.BN):
            seen_in_window = _is_exact(i0 + i, start + n, S.WINDOW)
            dq, of_near, _, _ = _add_exact_pairs(dq, of_near, q, dy, delta, log2, seen_in_window, K, V, k_t, v_t, start + S.SINKS, n, d, e, T, scale, S)  # fmt: skip
    if S.CHUNK > S.BM or not S.FAR:
        for start in range(begin, i0, S.BN):
            dq, of_near = _add_pairs(dq, of_near, q, dy, dz, inverse, p0, i0 + i, K, V, k_t, v_t, start, n, d, e, T, scale, S, False)  # fmt: skip
    for start in tl.range(tl.maximum(i0, 0), i0 + S.BM, S.BN, num_stages=1):
        dq, of_near = _add_pairs(dq, of_near, q, dy, dz, inverse, p0, i0 + i, K, V, k_t, v_t, start, n, d, e, T, scale, S, True)  # fmt: skip
    if S.ABOUT_MEAN:
        edge = -(r + sums_of(of_near, S.ONES)) * _inverse_count(COUNT, row, i0 + i, S.STARTED)
        tl.store(numbers + 2 * all_padded, edge)
        if S.FAR:
            at = (b * H + h) * tail_tokens + i0 + i
            tl.store(EXTRA + at, edge * (scale * S.STEEPNESS), mask=there_rows & (i0 + i >= 0))
        past_keys, base = _past_keys(PREFIX, row, tiles, i0, d, S.D)
        dq += edge[:, None] * past_keys[None, :]
        for start in tl.range(base, i0 + S.BM, S.BN, num_stages=1):
            k = _rows(K, k_t, start + S.SINKS, n, d, T, S.D, False, True).to(OPERAND)
            below = tl.where((start + n)[None, :] <= (i0 + i)[:, None], 1.0, 0.0).to(OPERAND)
            dq += edge[:, None] * tl.dot(below, k, input_precision=PRECISION)
    at = DQ + b * dq_b + h * dq_h + (tl.zeros((), tl.int64) + t0) * dq_t + i[:, None] * dq_t + d[None, :]
    dq *= scale * S.STEEPNESS
    tl.store(at, dq.to(DQ.dtype.element_ty), mask=there_rows[:, None] & (d < S.D)[None, :])


@triton.jit
def _add_sinks(dq, r, q, dy, delta, log, t, K, V, PARTS, k_t, v_t, d, e, T, scale, S: tl.constexpr):
    """Add the sinks to dq and Σ dx; store these rows' part of the sinks' gradients in PARTS."""
    PRECISION: tl.constexpr = S.PRECISION
    OPERAND: tl.constexpr = S.OPERAND
    s = tl.arange(0, S.SB)
    seen = (s < S.SINKS)[None, :] & (s[None, :] <= t[:, None])
    dq, r, p, dx = _add_exact_pairs(dq, r, q, dy, delta, log, seen, K, V, k_t, v_t, 0, s, d, e, T, scale, S)  # fmt: skip
    dk = tl.dot(tl.trans(dx), q, input_precision=PRECISION) * (scale * S.STEEPNESS)
    dv = tl.dot(tl.trans(p.to(OPERAND)), dy, input_precision=PRECISION)
    at = PARTS + s[:, None] * (S.D + S.E)
    tl.store(at + d[None, :], dk, mask=(s < S.SINKS)[:, None] & (d < S.D)[None, :])
    tl.store(at + S.D + e[None, :], dv, mask=(s < S.SINKS)[:, None] & (e < S.E)[None, :])
    return dq, r


# --------------------------------------------------------------------------- gradients of keys and values


@triton.jit
def _add_queries(
    dk,
    dv,
    k,
    v,
    j,
    Q,
    DN,
    numbers,
    all_padded,
    q_t,
    n_t,
    start,
    m,
    d,
    e,
    T,
    scale,
    S: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a tile of queries to the gradients of a tile of keys in their tail; tiles are [keys, queries].

    Beyond the end of the text, dy and NUMBERS are zero.
    """
    PRECISION: tl.constexpr = S.PRECISION
    C: tl.constexpr = S.C
    SQUARE: tl.constexpr = S.SQUARE
    OPERAND: tl.constexpr = S.OPERAND
    SHIFT: tl.constexpr = S.WINDOW + S.SINKS
    q = _rows(Q, q_t, start + SHIFT, m, d, T, S.D, False, True).to(OPERAND)
    dn = _rows(DN, n_t, start + SHIFT, m, e, T, S.E, False, True).to(OPERAND)
    numbers += start + S.AHEAD
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if S.ABOUT_MEAN:
        p = _point(s, tl.load(numbers + all_padded + m)[None, :], scale, SQUARE)
    else:
        p = _point(s, _point_of_mean(0.0, SQUARE), scale, SQUARE)
    w = _weight(p, C, SQUARE)
    if S.BALANCED:
        w -= tl.load(numbers + 3 * all_padded + m)[None, :]
    seen = j[:, None] <= (start + m)[None, :]
    if MASKED:
        w = tl.where(seen, w, 0.0)
    dv = tl.dot(w.to(OPERAND), dn, dv, input_precision=PRECISION)
    dw = tl.dot(v, tl.trans(dn), input_precision=PRECISION) + tl.load(numbers + m)[None, :]
    dx = _slope(p, C, SQUARE) * dw
    if S.ABOUT_MEAN:
        dx += tl.load(numbers + 2 * all_padded + m)[None, :]
    if MASKED:
        dx = tl.where(seen, dx, 0.0)
    return tl.dot(dx.to(OPERAND), q, dk, input_precision=PRECISION), dv


@triton.jit
def _add_exact_queries(
    dk, dv, k, v, j, Q, DY, numbers, all_padded, q_t, o_t, start, m, d, e, T, scale, S: tl.constexpr
):
    """`_add_queries` for keys in the queries' window."""
    PRECISION: tl.constexpr = S.PRECISION
    OPERAND: tl.constexpr = S.OPERAND
    SHIFT: tl.constexpr = S.WINDOW + S.SINKS
    q = _rows(Q, q_t, start + SHIFT, m, d, T, S.D, True, True).to(OPERAND)
    dy = _rows(DY, o_t, start + SHIFT, m, e, T, S.E, True, True).to(OPERAND)
    numbers += start + S.AHEAD
    i = start + m
    seen = (j[:, None] > i[None, :]) & (j[:, None] <= i[None, :] + S.WINDOW)
    x = (
        tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * _LOG2E)
        - tl.load(numbers + 3 * all_padded + m)[None, :]
    )
    p = tl.exp2(tl.where(seen, x, float("-inf")))
    dv = tl.dot(p.to(OPERAND), dy, dv, input_precision=PRECISION)
    grad = tl.dot(v, tl.trans(dy), input_precision=PRECISION) * (1 / S.STEEPNESS)
    dx = p * (grad - tl.load(numbers + 4 * all_padded + m)[None, :])
    return tl.dot(dx.to(OPERAND), q, dk, input_precision=PRECISION), dv


@launched
@triton.jit(do_not_specialize=["T", "H", "heads", "chunks"])
def _backward_keys(
    Q, K, V, DY, DN, NUMBERS, CENTRED, SMALL, S2, LOWER, DK, DV, PLACES,
    q_strides, k_strides, v_strides, o_strides, n_strides, c_strides, dk_strides, dv_strides,
    T, H, chunks, padded, all_padded, scale, S: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys after the sinks, for one key-value head."""
    PRECISION: tl.constexpr = S.PRECISION
    C: tl.constexpr = S.C
    OPERAND: tl.constexpr = S.OPERAND
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    o_b, o_t, o_h = o_strides
    n_b, n_t, n_h = n_strides
    c_b, c_t, c_h = c_strides
    dk_b, dk_t, dk_h = dk_strides
    dv_b, dv_t, dv_h = dv_strides
    BD: tl.constexpr = S.BD
    BE: tl.constexpr = S.BE
    BN: tl.constexpr = S.BN
    SHIFT: tl.constexpr = S.WINDOW + S.SINKS
    j0 = tl.program_id(0) * S.BN
    if PLACES is not None:
        begin, T, index, sequence = place_of(PLACES, tl.program_id(0), tl.num_programs(0))
        j0 = index * S.BN
        Q, K, V, DN = Q + begin * q_t, K + begin * k_t, V + begin * v_t, DN + begin * n_t
        DK, DV = DK + begin * dk_t, DV + begin * dv_t
        NUMBERS += _padded_place(begin, T, sequence, padded)
    heads = H // S.GROUP
    b, g = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    m, n, d, e = tl.arange(0, S.BM), tl.arange(0, S.BN), tl.arange(0, S.BD), tl.arange(0, S.BE)
    j = j0 + n
    k = _rows(K + b * k_b + g * k_h, k_t, j0 + S.SINKS, n, d, T, S.D, False, True).to(OPERAND)
    v = _rows(V + b * v_b + g * v_h, v_t, j0 + S.SINKS, n, e, T, S.E, False, True).to(OPERAND)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    end = T - SHIFT
    if S.FAR:
        chunk = j0 // S.CHUNK
        end = tl.minimum(end, (chunk + 1) * S.CHUNK)
        there = 1 if S.STARTED else (chunk < chunks - 1).to(tl.int32)  # no branch: it would serialize wgmma
        later = (b * heads + g) * chunks + tl.minimum(chunk, chunks - 1)
        known = tl.where(chunk < chunks, 1.0, 0.0)  # the last keys of the text are in no query's tail
        small = SMALL + later * (S.D * S.E + S.E + S.D * S.D + S.D + 1)
        at = small + S.D * S.E + S.E
        c_at = CENTRED + b * c_b + g * c_h + (tl.zeros((), tl.int64) + j0) * c_t
        x = _rows(CENTRED + b * c_b + g * c_h, c_t, j0, n, d, T - SHIFT, S.D, False, True).to(OPERAND)
        if len(C) > 2:
            at2 = S2 + later * S.ROWS2 * S.E
            if LOWER is not None:
                LOWER = sums_at(LOWER, b * heads + g, j, T)
            dv, of_k = read_both(
                x, v, c_at + n * c_t, j < T - SHIFT, at2, there, LOWER, T, e, S.D, S.E, PRECISION
            )
            dk = 2 * (of_k + times_square(x, at, d, S.D, OPERAND, PRECISION))
        block = block_of(small, 0, d, e, S.D, S.E, S.BD, 1).to(OPERAND)
        dv += tl.dot(x, block, input_precision=PRECISION)
        dv += tl.load(small + S.D * S.E + e, mask=e < S.E, other=0.0)[None, :]
        dk += tl.dot(v, tl.trans(block), input_precision=PRECISION)
        dk += tl.load(at + S.D * S.D + d, mask=d < S.D, other=0.0)[None, :]
        inside = tl.where(j < T - SHIFT, known, 0.0)
        dk, dv = dk * (inside / (scale * S.STEEPNESS))[:, None], dv * inside[:, None]
    whole = tl.cdiv(j0 + S.BN, S.BM) * S.BM  # from here on, the whole tile is in the queries' tail
    for member in range(S.GROUP):
        h = g * S.GROUP + member
        q_at, numbers = Q + b * q_b + h * q_h, NUMBERS + (b * H + h) * padded
        if S.WINDOW > 0:
            last = tl.minimum(j0 + S.BN, T - SHIFT)  # NUMBERS end with the text
            for start in range(j0 // S.BM * S.BM - (S.WINDOW + S.BM - 1) // S.BM * S.BM, last, S.BM):
                dk, dv = _add_exact_queries(dk, dv, k, v, j, q_at, DY + b * o_b + h * o_h, numbers, all_padded, q_t, o_t, start, m, d, e, T, scale, S)  # fmt: skip
        dn_at = DN + b * n_b + h * n_h
        for start in tl.range(j0 // S.BM * S.BM, tl.minimum(whole, end), S.BM, num_stages=1):
            dk, dv = _add_queries(dk, dv, k, v, j, q_at, dn_at, numbers, all_padded, q_t, n_t, start, m, d, e, T, scale, S, True)  # fmt: skip
        if S.CHUNK > S.BN or not S.FAR:
            for start in range(whole, end, S.BM):
                dk, dv = _add_queries(dk, dv, k, v, j, q_at, dn_at, numbers, all_padded, q_t, n_t, start, m, d, e, T, scale, S, False)  # fmt: skip
    inside = j + S.SINKS < T
    first = tl.zeros((), tl.int64) + j0 + S.SINKS
    dk *= scale * S.STEEPNESS
    at = DK + b * dk_b + g * dk_h + first * dk_t + n[:, None] * dk_t + d[None, :]
    tl.store(at, dk.to(DK.dtype.element_ty), mask=inside[:, None] & (d < S.D)[None, :])
    at = DV + b * dv_b + g * dv_h + first * dv_t + n[:, None] * dv_t + e[None, :]
    tl.store(at, dv.to(DV.dtype.element_ty), mask=inside[:, None] & (e < S.E)[None, :])


@launched
@triton.jit(do_not_specialize=["parts"])
def _sink_gradients(
    PARTS, DK, DV, dk_strides, dv_strides, heads, parts,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BW: tl.constexpr, BP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one sink of one key-value head: the sum of the parts of all query tiles."""
    dk_b, dk_t, dk_h = dk_strides
    dv_b, dv_t, dv_h = dv_strides
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = row // heads, row % heads
    p, w = tl.arange(0, BP), tl.arange(0, BW)
    total = tl.zeros((BW,), tl.float32)
    for start in range(0, parts * GROUP, BP):
        at = PARTS + ((row * parts * GROUP + start + p) * SINKS + s)[:, None] * (D + E) + w[None, :]
        inside = (start + p < parts * GROUP)[:, None] & (w < D + E)[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    at = DK + b * dk_b + s * dk_t + g * dk_h + w
    tl.store(at, total.to(DK.dtype.element_ty), mask=w < D)
    at = DV + b * dv_b + s * dv_t + g * dv_h + w - D
    tl.store(at, total.to(DV.dtype.element_ty), mask=(w >= D) & (w < D + E))


# --------------------------------------------------------------------------------------------- launching


class Call(NamedTuple):
    """The non-tensor arguments.

    coefficients  c₀ … c_N of powers of x − c; N ≤ 2 with chunks
    about_mean    whether c is the mean score of the tail; else c = 0
    divisor       "sum": rows are divided by their sum; "count": by the number of their keys; "balanced": the same, and
                  the weights sum to that number. The latter two support neither a window nor a start
    window, sinks how many of the last and first keys are exact; 0 and 0 for none
    chunk         tokens per chunk of the tail; 0 to compute every pair
    narrow        y in bf16, with its rounding error in a second tensor; else in fp32
    """

    scale: float
    coefficients: tuple[float, ...]
    about_mean: bool = True
    window: int = 0
    sinks: int = 0
    chunk: int = 0
    narrow: bool = False
    divisor: str = "sum"

    @property
    def order(self) -> int:
        return len(self.coefficients) - 1

    @property
    def by_sum(self) -> bool:
        return self.divisor == "sum"

    @property
    def balanced(self) -> bool:
        return self.divisor == "balanced"

    @property
    def shift(self) -> int:
        return self.window + self.sinks

    @property
    def square(self) -> tuple[float, float, float] | tuple[()]:
        """(r, h, f) of a series (r (u + h))² + f, which saves one product per slope; () for other series."""
        if self.order != 2 or self.coefficients[2] <= 0:
            return ()
        zero, one, two = self.coefficients
        return math.sqrt(two), one / (2 * two), zero - one * one / (4 * two)

    @property
    def steepness(self) -> float:
        """The slope of the series divided by the slope that programs compute."""
        return 2 * self.square[0] if self.square else 1.0

    @property
    def ahead(self) -> int:
        """Rows of NUMBERS before the first row with a tail: a multiple of every tile size."""
        return cdiv(self.shift, _LARGEST_TILE) * _LARGEST_TILE


class Rows(NamedTuple):
    """c, L and h of every row [B, H, T], sums of keys and values before tiles, moments of the keys before chunks.

    None where the call has no mean, no h or no chunks.
    """

    mean: Tensor | None
    log: Tensor
    less: Tensor | None
    prefix: Tensor | None
    values: Tensor | None
    small: Tensor | None
    second: Tensor | None


class Start(NamedTuple):
    """An earlier text, as moments about an offset [B·K, d] in fp32: the small ones and the blocks of order 2."""

    offset: Tensor
    moments: Moments


def start_from(initial: Tensor | None, offset: Tensor | None, order: int, e: int) -> Start | None:
    """The start for a state [B, K, F, e + 1] about an offset [B, K, d]; None without a state."""
    if initial is None or offset is None:
        return None
    held = unpacked(initial.flatten(0, 1), range(order + 1), offset.shape[-1], e, order)
    return Start(offset.flatten(0, 1), held)


@on_its_device
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    start: Start | None = None,
    *,
    totals: bool = False,
    cuts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Rows, Tensor | None, Moments | None]:
    """y [B, T, H, e], its rounding error, Rows for `backward`, the offset, and moments of the whole tail about it.

    Tensors that the call does not use are None. A text with a `start` needs chunks. `cuts` [n + 1] are the cuts of
    sequences packed into one row; packed calls compute every pair, about the mean.
    """
    launch = _forward_launch(
        Layout.of(q), Layout.of(k), Layout.of(v), call, start is not None, _sequences(cuts)
    )
    tokens, d, e = q.shape[1], q.shape[3], v.shape[3]
    count, first = (None, None) if start is None else _counted(start, d, e)
    found = {} if cuts is None else {size: places(cuts, tokens, size) for size in {launch.queries, TILE}}
    keys = _tail(k, call)
    prefix = _sums(keys, first, cuts, found) if call.about_mean else None
    values = _sums(v, None, cuts, found) if call.balanced else None
    offset = small = second = after = None
    if call.chunk:
        offset = _offset(prefix, start, call, keys.shape[1], k)
        past, after = moments(
            Side(_centred(keys, offset), _tail(v, call)), call.order, call.chunk, sums=True,
            initial=None if start is None else start.moments, totals=totals,
        )  # fmt: skip
        small, second = past.small, past.high.get(2)
    y, rest, log, mean, less = new_tensors(q, *launch.made)
    launch.start(
        q, k, v, prefix, values, count, offset, small, second, y, rest, mean, log, less, found.get(launch.queries)
    )  # fmt: skip
    return y, rest, Rows(mean, log, less, prefix, values, small, second), offset, after


class Gradients(NamedTuple):
    """Gradients of q, k, v in their dtypes, and of the moments of the start."""

    q: Tensor
    k: Tensor
    v: Tensor
    before: Moments | None


@on_its_device
def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    rest: Tensor | None,
    rows: Rows,
    offset: Tensor | None,
    call: Call,
    start: Start | None = None,
    *,
    d_totals: Moments | None = None,
    cuts: Tensor | None = None,
) -> Gradients:
    """All gradients, given those of y and, if used, of the moments of the whole tail (about the offset)."""
    dy = dense(dy)
    tokens, heads, d = q.shape[1:]
    count = None if start is None else _counted(start, d, v.shape[3])[0]
    centred = q if offset is None else _centred(_tail(k, call), offset)
    launches = _backward_launches(
        _Given(Layout.of(q), Layout.of(k), Layout.of(v), Layout.of(dy), Layout.of(y), Layout.of(centred)), call,
        start is not None, d_totals is not None, rest is not None, _sequences(cuts),
    )  # fmt: skip
    dq, dk, dv, dn, weights, omega, extra, sink_parts, numbers = new_tensors(q, *launches.made)
    if launches.zeros:
        numbers.zero_()
    found = {}
    if cuts is not None:
        found = {size: places(cuts, tokens, size) for size in {launches.query_tile, launches.key_tile}}
    launches.queries(
        q, k, v, dy, y, rest, rows.mean, rows.log, rows.less, rows.prefix, rows.values, count, offset, rows.small, rows.second,
        lower_sums(q, call.order) if call.chunk else None, dq, dn, numbers, weights, omega, extra, sink_parts, found.get(launches.query_tile),
    )  # fmt: skip
    later_small = later_second = before = None
    if call.chunk:
        side = Side(q[:, call.shift :], dy[:, call.shift :], weights, omega, group=heads // k.shape[2],
                    extra=extra)  # fmt: skip
        later, before = moments(
            side, call.order, call.chunk, sums=True, reverse=True, initial=d_totals, totals=start is not None
        )
        later_small, later_second = later.small, later.high.get(2)
    launches.keys(
        q,
        k,
        v,
        dy,
        dn,
        numbers,
        centred,
        later_small,
        later_second,
        lower_sums(k, call.order) if call.chunk else None,
        dk,
        dv,
        found.get(launches.key_tile),
    )
    if launches.sinks is not None:
        launches.sinks(sink_parts, dk, dv)
    return Gradients(dq, dk, dv, before)


class _Forward(NamedTuple):
    """The launch of the forward pass, its tile of queries, and the tensors it makes."""

    start: Launch
    queries: int
    #: y, its rounding error, which only the gradient of a row sum reads, L, c and h
    made: tuple[New | None, ...]


@by_shapes
def _forward_launch(q: Layout, k: Layout, v: Layout, call: Call, started: bool, sequences: int) -> _Forward:
    batch, tokens, heads, _ = q.shape
    tile, per_row = _tile("forward", q, v, call), (batch, heads, tokens)
    y = New((*q.shape[:3], v.shape[3]), torch.bfloat16 if call.narrow else torch.float32)
    keeps_rest = call.narrow and call.by_sum
    numbers = (
        *(u.strides[:3] for u in (q, k, v, Layout.contiguous(*y))),
        tokens, heads, _key_tiles(tokens, call, sequences), _chunks(tokens, call), call.scale,
    )  # fmt: skip
    return _Forward(
        prepared(
            _forward,
            (_tiles_of_rows(tokens, call, tile["BM"], sequences), batch * heads),
            numbers,
            with_settings(_settings(q, k, v, call, tile)._replace(STARTED=started, NARROW=keeps_rest), tile),
        ),
        tile["BM"],
        (
            y,
            y if keeps_rest else None,
            New(per_row, torch.float32),
            New(per_row, torch.float32) if call.about_mean else None,
            New(per_row, torch.float32) if call.balanced else None,
        ),
    )


class _Given(NamedTuple):
    """Layouts of the tensors that the backward pass reads."""

    q: Layout
    k: Layout
    v: Layout
    dy: Layout
    y: Layout
    centred: Layout


class _Backward(NamedTuple):
    """The launches of the backward pass, their tiles, and the tensors it makes."""

    queries: Launch
    keys: Launch
    #: None without sinks
    sinks: Launch | None
    query_tile: int
    key_tile: int
    made: tuple[New | None, ...]
    #: whether NUMBERS must be zero where tiles of queries do not write them
    zeros: bool


@by_shapes
def _backward_launches(
    given: _Given,
    call: Call,
    started: bool,
    ended: bool,
    narrow: bool,
    sequences: int,
) -> _Backward:
    q, k, v, dy, y, centred = given
    (batch, tokens, heads, d), kv_heads, e = q.shape, k.shape[2], v.shape[3]
    tail, all_heads = max(0, tokens - call.shift), batch * heads
    of_queries, of_keys = _tile("queries", q, v, call), _tile("keys", q, v, call)
    if sequences and call.balanced:
        of_queries.pop("maxnreg", None)  # with this limit 45 registers would be moved in every iteration
    parts = _tiles_of_rows(tokens, call, of_queries["BM"], sequences)
    if sequences:
        padded = (tiles_of_packed(tokens, sequences, _LARGEST_TILE) + 1) * _LARGEST_TILE
        key_tiles = tiles_of_packed(tokens, sequences, of_keys["BN"])
    else:
        padded = call.ahead + cdiv(tail, _LARGEST_TILE) * _LARGEST_TILE
        key_tiles = cdiv(max(tokens - call.sinks, 0), of_keys["BN"])
    strides = [u.strides[:3] for u in (q, k, v, dy)]
    dq, dk, dv = (New(u.shape, u.dtype) for u in (q, k, v))
    dn = New(y.shape, operand(q))
    of_dq, of_dk, of_dv, of_dn = (Layout.contiguous(*u).strides[:3] for u in (dq, dk, dv, dn))
    queries = prepared(
        _backward_queries,
        (parts, all_heads),
        (
            *strides, y.strides[:3], of_dq, of_dn, tokens, heads, _key_tiles(tokens, call, sequences), _chunks(tokens, call),
            tail, all_heads * tail, padded, all_heads * padded, call.scale,
        ),
        with_settings(
            _settings(q, k, v, call, of_queries)._replace(STARTED=started, NARROW=narrow), of_queries
        ),
    )  # fmt: skip
    keys = prepared(
        _backward_keys,
        (key_tiles, batch * kv_heads),
        (
            *strides, of_dn, centred.strides[:3], of_dk, of_dv, tokens, heads, _chunks(tokens, call), padded, all_heads * padded,
            call.scale,
        ),
        with_settings(_settings(q, k, v, call, of_keys)._replace(STARTED=ended), of_keys),
    )  # fmt: skip
    sinks = None
    if call.window and call.sinks:
        options = {
            "GROUP": heads // kv_heads, "D": d, "E": e, "BW": power_of_2(d + e), "BP": 16, "SINKS": call.sinks, "num_warps": 4
        }  # fmt: skip
        grid = batch * kv_heads, min(call.sinks, tokens)
        sinks = prepared(_sink_gradients, grid, (of_dk, of_dv, kv_heads, parts), options)
    per_tail, wide = (batch, heads, tail), torch.float32
    made = (
        dq, dk, dv, dn,
        New((3, *per_tail), wide) if call.chunk else None,
        New(per_tail, wide) if call.chunk else None,
        New(per_tail, wide) if call.chunk and call.about_mean else None,
        New((all_heads, parts, call.sinks, d + e), wide) if call.window else None,
        New((5 if call.window else 3 + call.balanced, all_heads, padded), wide),
    )  # fmt: skip
    # tiles of queries must write everything that tiles of keys read, or it must be zero
    zeros = of_keys["BM"] > of_queries["BM"]
    return _Backward(queries, keys, sinks, of_queries["BM"], of_keys["BN"], made, zeros)


def _tail(u: Tensor, call: Call) -> Tensor:
    """The tokens [B, n, K, size] that are in the tail of a later token."""
    if not call.shift:
        return u
    return u[:, call.sinks : call.sinks + max(0, u.shape[1] - call.shift)]


def _offset(prefix: Tensor | None, start: Start | None, call: Call, tail: int, k: Tensor) -> Tensor:
    """The offset [B·K, d] that keys are taken about, in their dtype; it is known before any row reads moments."""
    if start is not None:
        return start.offset
    if prefix is not None and tail > call.chunk:
        return (prefix[:, call.chunk // TILE] / call.chunk).to(k.dtype)
    return torch.zeros(k.shape[0] * k.shape[2], k.shape[3], dtype=k.dtype, device=k.device)


def _centred(keys: Tensor, offset: Tensor) -> Tensor:
    batch, _, heads, d = keys.shape
    return keys - offset.view(batch, 1, heads, d)


def _counted(start: Start, d: int, e: int) -> tuple[Tensor, Tensor]:
    """The number of keys in the start [B·K], and their sum [B·K, d]."""
    small = start.moments.small
    count = small[:, -1].contiguous()
    about = small[:, d * e + e + d * d : -1]
    return count, (about + count[:, None] * start.offset.float()).contiguous()


def _sums(u: Tensor, first: Tensor | None, cuts: Tensor | None, found: dict[int, Tensor]) -> Tensor:
    return sums_before_tiles(u, first) if cuts is None else sums_in_sequences(u, cuts, found[TILE])


def _sequences(cuts: Tensor | None) -> int:
    return 0 if cuts is None else cuts.numel() - 1


def _key_tiles(tokens: int, call: Call, sequences: int) -> int:
    """The number of key tiles whose sums are known besides those before the first one."""
    if not call.about_mean:
        return 0
    return (
        tiles_of_packed(tokens, sequences, TILE) - 1 if sequences else cdiv(max(0, tokens - call.shift), TILE)
    )


def _chunks(tokens: int, call: Call) -> int:
    """The number of chunks of the tail; 1 if it is not cut."""
    return max(1, cdiv(max(0, tokens - call.shift), call.chunk)) if call.chunk else 1


def _tiles_of_rows(tokens: int, call: Call, size: int, sequences: int) -> int:
    """The number of query tiles, aligned to the first query with a tail."""
    if sequences:
        return tiles_of_packed(tokens, sequences, size)
    ahead = cdiv(call.shift, size)
    return ahead + cdiv(max(0, tokens - call.shift), size)


def _settings(q: Layout, k: Layout, v: Layout, call: Call, tile: dict[str, int]) -> Settings:
    d, e = q.shape[3], v.shape[3]
    # tiles of equal width have the same layout in shared memory. Where layouts differ and share one buffer, ptxas of
    # CUDA 12.8 computes an address from an unset register (compiled_code.unset_operands); order 2 has other buffers
    alike = call.chunk > 0 and call.order == 1
    return Settings(
        GROUP=q.shape[2] // k.shape[2],
        D=d,
        E=e,
        BD=width(max(d, e) if alike else d),
        BE=width(max(d, e) if alike else e),
        BM=tile["BM"],
        BN=tile["BN"],
        SB=width(call.sinks) if call.sinks else 16,
        C=tuple(float(c) for c in call.coefficients),
        SQUARE=call.square,
        STEEPNESS=call.steepness,
        WINDOW=call.window,
        SINKS=call.sinks,
        AHEAD=call.ahead,
        CHUNK=call.chunk or 1,
        ROWS2=block_rows(d, 2),
        FAR=call.chunk > 0,
        ABOUT_MEAN=call.about_mean,
        BY_SUM=call.by_sum,
        BALANCED=call.balanced,
        STARTED=False,
        NARROW=False,
        ONES=q.dtype == torch.bfloat16,
        **operand_options(q),
    )


def _tile(kind: str, q: Layout, v: Layout, call: Call) -> dict[str, int]:
    """The tile of a pass; smaller for fp32 and for fp16 (partly computed in fp32), which take more registers."""
    options = tile_options(TILES[kind + (" far" if call.chunk else "")], q, v, call.chunk or q.shape[1])
    if q.dtype != torch.bfloat16:
        queries, keys = (32, 16) if kind == "keys" else (16, 32)
        options |= {"BM": min(queries, options["BM"]), "BN": min(keys, options["BN"]), "num_warps": 8}
        options.pop("maxnreg", None)
    if kind != "keys":  # key tiles divide query tiles, as both start with the tail
        options["BN"] = min(options["BN"], options["BM"])
    return options
