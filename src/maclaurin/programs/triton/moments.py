"""Moments of a text before each of its chunks; a polynomial of the score reads the past through them.

    order n:   S⁽ⁿ⁾_c = Σ_{s before chunk c} x_s^{⊗n} g_sᵀ         (after chunk c, if reversed)

For n ≥ 2, they are stored in blocks that belong to one entry a (block_layout.py), Σ_s x_a X g_sᵀ with X = x, or
products of two entries of x. Features are never written to memory: a tile of gᵀ in registers is multiplied by one entry
per token and then, as a matrix product, by a tile of X. A program accumulates its blocks along the text in fp32 and
stores them before every chunk; or once at the end, where every token reads the whole text (not causal).

The small moments (orders 0 and 1, and those of the row sum, with a weight ω per token) are computed for each chunk and
then added up along the text:

    [Σ x gᵀ (d × e) | Σ g (e) | Σ ω x xᵀ (d × d) | Σ ω x (d) | Σ ω]

`packed` and `unpacked` convert to and from the layout of a state between calls, which stores each multiset of indices
once instead of every entry:

    state   [rows, F, e (+ 1)], orders one after the other, multisets times √(their permutations), row sums last
    totals  small moments and blocks, as programs read and write them (block_layout.py)

The gradient of a state has the same two layouts, because both sides have the same factors √(permutations).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton.block_layout import (
    COLUMNS,
    COLUMNS_OF_64,
    GROUPED,
    block_rows,
    blocks,
    entries,
    products,
    row_of,
    row_of_pair,
    table,
    times_counted,
    together,
)
from maclaurin.programs.triton.launch import Launch, Layout, by_shapes, launched, prepared
from maclaurin.programs.triton.tiles import cdiv, lines, load_rows, operand, operand_options, width

#: tokens at a time of the program for small moments
SMALL = 32
#: with fewer programs for the high orders than this, each computes two blocks, not four, to fill a GPU
FEW_PROGRAMS = 256
#: tokens at a time, warps and pipeline stages of the program for high orders, in bf16
HIGH = (64, 4, 3)
#: the same for heads of more than 64 entries; with eight warps a program has twice the columns of g
HIGH_OF_WIDE_HEADS = (64, 4, 3)
#: the same for products in fp32. Every iteration writes their left operand to registers that Hopper's asynchronous
#: product may still be reading (triton issue 9433). So one group of four warps and no pipelining: each product ends
#: before the next begins
WIDE = (32, 4, 1)


@triton.jit
def _store_block(OUT, block, first, row, e, there, E: tl.constexpr):
    at = OUT + (first + row)[None, :] * E + e[:, None]
    tl.store(at, block.to(OUT.dtype.element_ty), mask=there[None, :] & (e < E)[:, None])


@triton.jit
def _load_block(S, first, row, e, there, E: tl.constexpr):
    inside = there[:, None] & (e < E)[None, :]
    return tl.trans(tl.load(S + (first + row)[:, None] * E + e[None, :], mask=inside, other=0.0))


@triton.jit
def _add_tokens(m0, m1, m2, m3, X, x_t, XT, GT, a0, a1, a2, a3, group, start, d, e, T, tokens,
                D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
                ORDER: tl.constexpr, FOUR: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add a tile of tokens to the blocks of one head."""
    n = start + tl.arange(0, BN)
    if ORDER == 2:
        x = load_rows(X, x_t, n, group * BD + d, T, D).to(OPERAND)
    else:
        x = products(X, x_t, n, group, T, D, BD, P, OPERAND)
    gt = tl.load(GT + e[:, None] * tokens + n[None, :], mask=(e < E)[:, None], other=0.0).to(OPERAND)
    c0 = tl.load(XT + a0 * tokens + n).to(OPERAND)
    m0 = tl.dot(gt * c0[None, :], x, m0, input_precision=PRECISION)
    c1 = tl.load(XT + a1 * tokens + n).to(OPERAND)
    m1 = tl.dot(gt * c1[None, :], x, m1, input_precision=PRECISION)
    if FOUR:
        c2 = tl.load(XT + a2 * tokens + n).to(OPERAND)
        m2 = tl.dot(gt * c2[None, :], x, m2, input_precision=PRECISION)
        c3 = tl.load(XT + a3 * tokens + n).to(OPERAND)
        m3 = tl.dot(gt * c3[None, :], x, m3, input_precision=PRECISION)
    return m0, m1, m2, m3


@triton.jit
def _add_tokens_in_halves(m0, m1, m2, m3, X, x_t, XT, GT, a0, a1, start, d, e, T, tokens,
                          D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr, FOUR: tl.constexpr,
                          OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The same where m0 and m1 have all columns, and m2 and m3 those of the upper half for entries HALF further on."""
    n = start + tl.arange(0, BN)
    x = load_rows(X, x_t, n, d, T, D).to(OPERAND)
    upper = load_rows(X, x_t, n, HALF + tl.arange(0, HALF), T, D).to(OPERAND)
    gt = tl.load(GT + e[:, None] * tokens + n[None, :], mask=(e < E)[:, None], other=0.0).to(OPERAND)
    c0 = tl.load(XT + a0 * tokens + n).to(OPERAND)
    m0 = tl.dot(gt * c0[None, :], x, m0, input_precision=PRECISION)
    c2 = tl.load(XT + (a0 + HALF) * tokens + n).to(OPERAND)
    m2 = tl.dot(gt * c2[None, :], upper, m2, input_precision=PRECISION)
    if FOUR:
        c1 = tl.load(XT + a1 * tokens + n).to(OPERAND)
        m1 = tl.dot(gt * c1[None, :], x, m1, input_precision=PRECISION)
        c3 = tl.load(XT + (a1 + HALF) * tokens + n).to(OPERAND)
        m3 = tl.dot(gt * c3[None, :], upper, m3, input_precision=PRECISION)
    return m0, m1, m2, m3


@triton.jit
def _load_halves(S, a, c, e, D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr):
    """The blocks of entry a and of the entry HALF further on."""
    upper = HALF + tl.arange(0, HALF)
    m0 = _load_block(S, 0, row_of_pair(a, c, D), e, c < D, E)
    m2 = _load_block(S, 0, row_of_pair(a + HALF, upper, D), e, upper < D, E)
    return m0, m2


@triton.jit
def _store_halves(OUT, m0, m2, a, c, e, D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr):
    upper = HALF + tl.arange(0, HALF)
    _store_block(OUT, m0, 0, row_of_pair(a, c, D), e, c < D, E)
    _store_block(OUT, m2, 0, row_of_pair(a + HALF, upper, D), e, upper < D, E)


@launched
@triton.jit
def _high_in_halves(
    XT, X, GT, CARRY, INITIAL, OUT, FINAL,
    x_strides, T, heads, chunks, tokens,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, LINES: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, REVERSE: tl.constexpr, CARRIED: tl.constexpr,
    STARTED: tl.constexpr, ENDED: tl.constexpr, WHOLE: tl.constexpr, FOUR: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`_high` of order 2 for heads in two groups: one or two blocks of all columns, as many of the upper half."""
    x_b, x_t, x_h = x_strides
    a0 = tl.program_id(0) * (2 if FOUR else 1)
    a1 = a0 + 1
    b, g = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = b * heads + g
    c = tl.arange(0, D)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    SIZE: tl.constexpr = ROWS * E
    m0 = tl.zeros((BE, D), tl.float32)
    m2 = tl.zeros((BE, HALF), tl.float32)
    m1, m3 = m0, m2
    if STARTED:
        m0, m2 = _load_halves(INITIAL + row * SIZE, a0, c, e, D, E, HALF)
        if FOUR:
            m1, m3 = _load_halves(INITIAL + row * SIZE, a1, c, e, D, E, HALF)
    for step in range(chunks):
        chunk = chunks - 1 - step if REVERSE else step
        if not WHOLE:
            out = OUT + (row * chunks + chunk) * SIZE
            _store_halves(out, m0, m2, a0, c, e, D, E, HALF)
            if FOUR:
                _store_halves(out, m1, m3, a1, c, e, D, E, HALF)
        if CARRIED:
            carry = tl.load(CARRY + row * chunks + chunk)
            m0, m1, m2, m3 = m0 * carry, m1 * carry, m2 * carry, m3 * carry
        for member in range(GROUP):
            h = g * GROUP + member
            x_at = X + b * x_b + h * x_h
            xt_at = XT + (b * heads * GROUP + h) * LINES * tokens
            gt_at = GT + (b * heads * GROUP + h) * E * tokens
            for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, BN if FOUR else 2 * BN):
                m0, m1, m2, m3 = _add_tokens_in_halves(
                    m0, m1, m2, m3, x_at, x_t, xt_at, gt_at, a0, a1, start, c, e, T, tokens,
                    D, E, HALF, BN, FOUR, OPERAND, PRECISION,
                )  # fmt: skip
                if not FOUR:  # as in `_high`
                    m0, m1, m2, m3 = _add_tokens_in_halves(
                        m0, m1, m2, m3, x_at, x_t, xt_at, gt_at, a0, a1, start + BN, c, e, T, tokens,
                        D, E, HALF, BN, FOUR, OPERAND, PRECISION,
                    )  # fmt: skip
    if ENDED or WHOLE:
        final = (OUT if WHOLE else FINAL) + row * SIZE
        _store_halves(final, m0, m2, a0, c, e, D, E, HALF)
        if FOUR:
            _store_halves(final, m1, m3, a1, c, e, D, E, HALF)


@launched
@triton.jit
def _high(
    XT, X, GT, TABLE, CARRY, INITIAL, OUT, FINAL,
    x_strides, T, heads, chunks, tokens,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, ORDER: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr,
    REVERSE: tl.constexpr, CARRIED: tl.constexpr, STARTED: tl.constexpr, ENDED: tl.constexpr, WHOLE: tl.constexpr,
    FOUR: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Four blocks (or two) of one order for one key-value head, along the whole text; heads of its group are summed."""
    x_b, x_t, x_h = x_strides
    i = tl.program_id(0) * (4 if FOUR else 2)
    a0, group, first0 = tl.load(TABLE + 3 * i), tl.load(TABLE + 3 * i + 1), tl.load(TABLE + 3 * i + 2)
    a1, first1 = tl.load(TABLE + 3 * i + 3), tl.load(TABLE + 3 * i + 5)
    a2, a3, first2, first3 = a0, a0, first0, first0
    if FOUR:
        a2, first2 = tl.load(TABLE + 3 * i + 6), tl.load(TABLE + 3 * i + 8)
        a3, first3 = tl.load(TABLE + 3 * i + 9), tl.load(TABLE + 3 * i + 11)
    b, g = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = b * heads + g
    c, d = tl.arange(0, P * BD), tl.arange(0, BD)
    e = tl.program_id(2) * BE + tl.arange(0, BE)
    place, there = row_of(c, group, D, BD, ORDER)
    SIZE: tl.constexpr = ROWS * E
    m0 = tl.zeros((BE, P * BD), tl.float32)
    m1, m2, m3 = m0, m0, m0
    if STARTED:
        INITIAL += row * SIZE
        m0 = _load_block(INITIAL, first0, place, e, there, E)
        m1 = _load_block(INITIAL, first1, place, e, there, E)
        if FOUR:
            m2 = _load_block(INITIAL, first2, place, e, there, E)
            m3 = _load_block(INITIAL, first3, place, e, there, E)
    for step in range(chunks):
        chunk = chunks - 1 - step if REVERSE else step
        if not WHOLE:
            out = OUT + (row * chunks + chunk) * SIZE
            _store_block(out, m0, first0, place, e, there, E)
            _store_block(out, m1, first1, place, e, there, E)
            if FOUR:
                _store_block(out, m2, first2, place, e, there, E)
                _store_block(out, m3, first3, place, e, there, E)
        if CARRIED:
            carry = tl.load(CARRY + row * chunks + chunk)
            m0, m1, m2, m3 = m0 * carry, m1 * carry, m2 * carry, m3 * carry
        for member in range(GROUP):
            h = g * GROUP + member
            x_at = X + b * x_b + h * x_h
            xt_at = XT + (b * heads * GROUP + h) * LINES * tokens
            gt_at = GT + (b * heads * GROUP + h) * E * tokens
            for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, BN if FOUR else 2 * BN):
                m0, m1, m2, m3 = _add_tokens(
                    m0, m1, m2, m3, x_at, x_t, xt_at, gt_at, a0, a1, a2, a3, group, start, d, e, T, tokens,
                    D, E, BD, P, BN, ORDER, FOUR, OPERAND, PRECISION,
                )  # fmt: skip
                if (
                    not FOUR
                ):  # as many products per iteration as with FOUR, so that none must finish within it
                    m0, m1, m2, m3 = _add_tokens(
                        m0, m1, m2, m3, x_at, x_t, xt_at, gt_at, a0, a1, a2, a3, group, start + BN, d, e, T, tokens,
                        D, E, BD, P, BN, ORDER, FOUR, OPERAND, PRECISION,
                    )  # fmt: skip
    if ENDED or WHOLE:
        final = (OUT if WHOLE else FINAL) + row * SIZE
        _store_block(final, m0, first0, place, e, there, E)
        _store_block(final, m1, first1, place, e, there, E)
        if FOUR:
            _store_block(final, m2, first2, place, e, there, E)
            _store_block(final, m3, first3, place, e, there, E)


@launched
@triton.jit
def _small(
    X, G, WEIGHTS, OMEGA, EXTRA, OUT,
    x_strides, g_strides, T, heads, chunks, all_rows,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, BN: tl.constexpr, WEIGHTED: tl.constexpr, SUMS: tl.constexpr, SECOND: tl.constexpr,
    OMEGAS: tl.constexpr, EXTRAS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The small moments of one chunk of one key-value head.

    The next tile is loaded into registers while the products of this one run. The compiler's own pipelining must be off
    (num_stages=1): a tile that is also read into registers would get no buffer of its own (buffer_reuse.py).
    """
    x_b, x_t, x_h = x_strides
    g_b, g_t, g_h = g_strides
    c = tl.program_id(0)
    b, g = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    first = tl.zeros((BD, BE), tl.float32)
    zeroth = tl.zeros(
        (BN, BE), tl.float32
    )  # sums over the tokens of a tile are left for the end: threads wait for them
    z_second = tl.zeros((BD, BD), tl.float32)
    z_first = tl.zeros((BN, BD), tl.float32)
    z_zeroth = tl.zeros((BN,), tl.float32)
    stop = tl.minimum((c + 1) * CHUNK, T)
    for member in range(GROUP):
        h = g * GROUP + member
        row = (b * heads * GROUP + h) * T
        x_at, g_at = X + b * x_b + h * x_h, G + b * g_b + h * g_h
        tile = _tile_of(
            x_at, x_t, g_at, g_t, WEIGHTS, OMEGA, EXTRA, row, all_rows, c * CHUNK, d, e, stop,
            D, E, BN, WEIGHTED, OMEGAS, EXTRAS,
        )  # fmt: skip
        for start in range(c * CHUNK, stop, BN):
            following = _tile_of(
                x_at, x_t, g_at, g_t, WEIGHTS, OMEGA, EXTRA, row, all_rows, start + BN, d, e, stop,
                D, E, BN, WEIGHTED, OMEGAS, EXTRAS,
            )  # fmt: skip
            x, values, w0, w1, w2, omega, extra = tile
            scaled = (values.to(tl.float32) * w1[:, None]).to(OPERAND) if WEIGHTED else values.to(OPERAND)
            first = tl.dot(tl.trans(x).to(OPERAND), scaled, first, input_precision=PRECISION)
            zeroth += values.to(tl.float32) * w0[:, None]
            if SUMS:
                z_zeroth += w0 * omega
                z_first += x.to(tl.float32) * (w1 * omega + extra)[:, None]
                if SECOND:
                    z_second = _add_square(z_second, x, w2 * omega, WEIGHTED or OMEGAS, OPERAND, PRECISION)
            tile = following
    SIZE: tl.constexpr = D * E + E + D * D + D + 1
    at = OUT + ((b * heads + g) * chunks + c) * SIZE
    inside = (d < D)[:, None] & (e < E)[None, :]
    tl.store(at + d[:, None] * E + e[None, :], first, mask=inside)
    tl.store(at + D * E + e, tl.sum(zeroth, 0), mask=e < E)
    if SUMS:
        inside = (d < D)[:, None] & (d < D)[None, :]
        tl.store(at + D * E + E + d[:, None] * D + d[None, :], z_second, mask=inside)
        tl.store(at + D * E + E + D * D + d, tl.sum(z_first, 0), mask=d < D)
        tl.store(at + D * E + E + D * D + D, tl.sum(z_zeroth, 0))


@triton.jit
def _tile_of(X, x_t, G, g_t, WEIGHTS, OMEGA, EXTRA, row, all_rows, start, d, e, stop,
             D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr,
             WEIGHTED: tl.constexpr, OMEGAS: tl.constexpr, EXTRAS: tl.constexpr):  # fmt: skip
    """x, g, the weights of orders 0, 1 and 2, ω and the extra weight of the tokens start … stop − 1, then zeros.

    Weights that are not given are 1, the extra one 0.
    """
    n = start + tl.arange(0, BN)
    inside = n < stop
    one = tl.where(inside, 1.0, 0.0)
    w0, w1, w2 = one, one, one
    if WEIGHTED:
        w0 = tl.load(WEIGHTS + row + n, mask=inside, other=0.0)
        w1 = tl.load(WEIGHTS + all_rows + row + n, mask=inside, other=0.0)
        w2 = tl.load(WEIGHTS + 2 * all_rows + row + n, mask=inside, other=0.0)
    omega = tl.load(OMEGA + row + n, mask=inside, other=0.0) if OMEGAS else one
    extra = tl.load(EXTRA + row + n, mask=inside, other=0.0) if EXTRAS else one * 0.0
    return load_rows(X, x_t, n, d, stop, D), load_rows(G, g_t, n, e, stop, E), w0, w1, w2, omega, extra


@triton.jit
def _add_square(total, x, weight, WEIGHTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """total + Σ weight x xᵀ; a weighted x is split into a rounded part and the rest, to keep precision."""
    if WEIGHTED:
        wide = x.to(tl.float32) * weight[:, None]
        high = wide.to(OPERAND)
        total = tl.dot(tl.trans(high), x.to(OPERAND), total, input_precision=PRECISION)
        rest = (wide - high.to(tl.float32)).to(OPERAND)
        return tl.dot(tl.trans(rest), x.to(OPERAND), total, input_precision=PRECISION)
    return tl.dot(tl.trans(x).to(OPERAND), x.to(OPERAND), total, input_precision=PRECISION)


@triton.jit
def _step_of(M, row, step, at, chunks, SIZE, REVERSE: tl.constexpr):
    """The moments of the chunk at this step of a scan; zeros after the last chunk."""
    c = chunks - 1 - step if REVERSE else step
    return tl.load(M + (row * chunks + c) * SIZE + at, mask=(at < SIZE) & (at * 0 + step < chunks), other=0.0)


@launched
@triton.jit
def _scan(
    M, CARRY, INITIAL, FINAL, chunks, SIZE,
    REVERSE: tl.constexpr, CARRIED: tl.constexpr, STARTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the chunks before each one (after it, if REVERSE), in place; and the total. Loads are three steps ahead."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = at < SIZE
    if STARTED:
        total = tl.load(INITIAL + row * SIZE + at, mask=inside, other=0.0)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
    first = _step_of(M, row, 0, at, chunks, SIZE, REVERSE)
    second = _step_of(M, row, 1, at, chunks, SIZE, REVERSE)
    third = _step_of(M, row, 2, at, chunks, SIZE, REVERSE)
    for step in range(chunks):
        c = chunks - 1 - step if REVERSE else step
        fourth = _step_of(M, row, step + 3, at, chunks, SIZE, REVERSE)
        tl.store(M + (row * chunks + c) * SIZE + at, total, mask=inside)
        if CARRIED:
            total *= tl.load(CARRY + row * chunks + c)
        total += first
        first, second, third = second, third, fourth
    tl.store(FINAL + row * SIZE + at, total, mask=inside)


@launched
@triton.jit
def _across(BEFORE, AFTER, WEIGHT, OUT, chunks, size, E: tl.constexpr, BLOCK: tl.constexpr):
    """Σ over all entries of the moments before chunk c + 1 times the moments after chunk c."""
    c, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < size
        before = tl.load(BEFORE + (row * chunks + c + 1) * size + at, mask=inside, other=0.0).to(tl.float32)
        after = tl.load(AFTER + (row * chunks + c) * size + at, mask=inside, other=0.0).to(tl.float32)
        total += before * after * tl.load(WEIGHT + at // E, mask=inside, other=0.0)
    tl.store(OUT + row * (chunks - 1) + c, tl.sum(total, 0))


# ------------------------------------------------------------------------------------ launching


class Side(NamedTuple):
    """The tokens whose moments are computed.

    x, g        [B, T, H, d], [B, T, H, e]
    weights     [3 or 4, B, H, T] fp32, one factor per order and token, or None for ones
    omega       [B, H, T] fp32, the weight ω of a token in the row sum, or None for ones
    extra       [B, H, T] fp32, a further weight in Σ ω x alone, or None for zeros
    carry       [B, K, chunks] fp32, the decay of the past over each chunk, or None for ones
    group       heads of x and g per key-value head; their moments are added
    """

    x: Tensor
    g: Tensor
    weights: Tensor | None = None
    omega: Tensor | None = None
    carry: Tensor | None = None
    group: int = 1
    extra: Tensor | None = None


class Moments(NamedTuple):
    """small [B·K, (chunks,) size] in fp32; high: order → [B·K, (chunks,) rows of all blocks, e].

    High moments before each chunk have the operands' dtype, those of a whole text fp32.
    """

    small: Tensor
    high: dict[int, Tensor]


def moments(
    side: Side,
    order: int,
    chunk: int,
    *,
    sums: bool,
    reverse: bool = False,
    initial: Moments | None = None,
    totals: bool = False,
    whole: bool = False,
) -> tuple[Moments, Moments | None]:
    """The moments before (after, if `reverse`) every chunk; with `totals`, also those of all the text and `initial`.

    `whole`: the moments of all the text instead, as if it were before a single chunk.
    """
    kind = _Kind.of(
        side, order, chunk, reverse=reverse, sums=sums, started=initial is not None, ended=totals, whole=whole
    )
    small, small_total = _small_moments(side, kind, initial)
    small = small_total[:, None] if whole else small
    high, ends = {}, {}
    for n in range(2, order + 1):
        start = None if initial is None else initial.high[n]
        high[n], end = _high_moments(side, n, kind, start)
        if end is not None:
            ends[n] = end
    return Moments(small, high), Moments(small_total, ends) if totals else None


def across(before: Moments, after: Moments, n: int, d: int) -> Tensor:
    """The inner products of the moments of order n ≥ 2 before chunks 1 … and after chunks 0 …, [B·K, chunks − 1]."""
    rows, chunks, height, e = before.high[n].shape
    out = torch.empty(rows, chunks - 1, dtype=torch.float32, device=before.small.device)
    if chunks > 1:
        _across[(chunks - 1, rows)](
            before.high[n], after.high[n], times_counted(d, n, out.device), out, chunks, height * e,
            E=e, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out


def small_size(d: int, e: int) -> int:
    """How many numbers the small moments of a head have."""
    return d * e + e + d * d + d + 1


def _filled(count: int) -> int:
    return -(-count // GROUPED) * GROUPED


class _Kind(NamedTuple):
    """What a launch depends on besides shapes: which moments, and which tensors are given."""

    order: int
    chunk: int
    group: int
    reverse: bool
    sums: bool
    weighted: bool
    omegas: bool
    extras: bool
    carried: bool
    started: bool
    ended: bool
    whole: bool

    @staticmethod
    def of(
        side: Side, order: int, chunk: int, *, reverse: bool, sums: bool, started: bool, ended: bool, whole: bool
    ) -> _Kind:  # fmt: skip
        return _Kind(
            order, chunk, side.group, reverse, sums, side.weights is not None, side.omega is not None,
            side.extra is not None, side.carry is not None, started, ended, whole,
        )  # fmt: skip


class _Small(NamedTuple):
    """The launches that compute the small moments of each chunk and add them up along the text."""

    of_chunks: Launch
    scan: Launch
    rows: int
    chunks: int
    size: int


@by_shapes
def _small_launches(x: Layout, g: Layout, kind: _Kind) -> _Small:
    batch, tokens, all_heads, d = x.shape
    e, heads, chunk = g.shape[3], all_heads // kind.group, kind.chunk
    chunks, size, block = -(-tokens // chunk), small_size(d, e), 256
    numbers = (x.strides[:3], g.strides[:3], tokens, heads, chunks, batch * all_heads * tokens)
    options = {
        "D": d, "E": e, "BD": width(d), "BE": width(e), "GROUP": kind.group, "CHUNK": chunk,
        "BN": min(SMALL, chunk), "WEIGHTED": kind.weighted, "SUMS": kind.sums, "SECOND": kind.order > 1,
        "OMEGAS": kind.omegas, "EXTRAS": kind.extras, **operand_options(x),
        "num_warps": 8 if max(width(d), width(e)) > 64 else 4, "num_stages": 1,
    }  # fmt: skip
    of_chunks = prepared(_small, (chunks, batch * heads), numbers, options)
    options = {
        "REVERSE": kind.reverse,
        "CARRIED": kind.carried,
        "STARTED": kind.started,
        "BLOCK": block,
        "num_warps": 2,
    }
    scan = prepared(_scan, (cdiv(size, block), batch * heads), (chunks, size), options)
    return _Small(of_chunks, scan, batch * heads, chunks, size)


def _small_moments(side: Side, kind: _Kind, initial: Moments | None) -> tuple[Tensor, Tensor]:
    x, g = side.x, side.g
    of_chunks, scan, rows, chunks, size = _small_launches(Layout.of(x), Layout.of(g), kind)
    out = torch.empty(rows, chunks, size, dtype=torch.float32, device=x.device)
    if not kind.sums:
        d, e = x.shape[3], g.shape[3]
        out[:, :, d * e + e :].zero_()
    of_chunks(x, g, side.weights, side.omega, side.extra, out)
    total = torch.empty(rows, size, dtype=torch.float32, device=x.device)
    scan(out, side.carry, None if initial is None else initial.small, total)
    return out, total


def in_halves(d: int, n: int) -> bool:
    """Whether moments have two groups of half the columns (block_layout.py)."""
    return n == 2 and d == COLUMNS and COLUMNS_OF_64 < COLUMNS


class _High(NamedTuple):
    """The launch that computes the blocks of one order; `padded` is the length of its lines (tiles.py)."""

    start: Launch
    shape: tuple[int, ...]
    padded: int


@by_shapes
def _high_launch(
    x: Layout,
    g: Layout,
    n: int,
    kind: _Kind,
    bf16_tile: tuple[int, int, int],
    fp32_tile: tuple[int, int, int],
) -> _High:
    batch, tokens, all_heads, d = x.shape
    e, heads, chunk = g.shape[3], all_heads // kind.group, kind.chunk
    chunks, count = -(-tokens // chunk), blocks(d, n)
    padded, narrow = chunks * chunk, operand(x) is torch.bfloat16
    block, warps, stages = bf16_tile if narrow else fp32_tile
    warps = warps if e > COLUMNS else 4
    height = min(COLUMNS * warps // 4, width(e))
    tile, columns = min(block, chunk), cdiv(e, height)
    many = (narrow and count // GROUPED * batch * heads * columns >= FEW_PROGRAMS) or chunk % (2 * tile)
    grouped = GROUPED if many else GROUPED // 2
    options = {
        "D": d, "E": e, "BD": min(COLUMNS, width(d)), "BE": height, "P": together(d, n), "ROWS": block_rows(d, n), "LINES": _filled(d),
        "ORDER": n, "GROUP": kind.group, "CHUNK": chunk, "BN": tile, "REVERSE": kind.reverse, "CARRIED": kind.carried,
        "STARTED": kind.started, "ENDED": kind.ended, "WHOLE": kind.whole, "FOUR": grouped == GROUPED, **operand_options(x),
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    numbers = (x.strides[:3], tokens, heads, chunks, padded)
    if in_halves(d, n):
        for name in ("BD", "P", "ORDER"):
            del options[name]
        options["HALF"] = COLUMNS_OF_64
        grid = COLUMNS_OF_64 * 2 // grouped, batch * heads, columns
        start = prepared(_high_in_halves, grid, numbers, options)
    else:
        start = prepared(_high, (count // grouped, batch * heads, columns), numbers, options)
    return _High(start, (batch * heads, 1 if kind.whole else chunks, block_rows(d, n), e), padded)


def _high_moments(side: Side, n: int, kind: _Kind, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x, g = side.x, side.g
    d, e = x.shape[3], g.shape[3]
    of_bf16 = HIGH if d <= COLUMNS else HIGH_OF_WIDE_HEADS
    start, shape, padded = _high_launch(Layout.of(x), Layout.of(g), n, kind, of_bf16, WIDE)
    out = torch.empty(shape, dtype=operand(x), device=x.device)
    final = torch.empty(shape[0], *shape[2:], dtype=torch.float32, device=x.device) if kind.ended else None
    weight = None if side.weights is None else side.weights[n]
    places, gains = lines(x, _filled(d), padded), lines(g, e, padded, weight)
    known = () if in_halves(d, n) else (table(d, n, x.device),)
    start(places, x, gains, *known, side.carry, initial, out, final)
    return out, final


# -------------------------------------------------------------------------------------- the layout of a state


def packed(totals: Moments, orders: Sequence[int], d: int, e: int, *, sums: bool) -> Tensor:
    """[B·K, F, e (+ 1)]: every multiset of indices once, times √(its permutations), orders one after the other."""
    small = _split_small(totals.small, d, e)
    parts = []
    for n in orders:
        values, weights = _moment(totals, small, n, d)
        index = _packing(d, n, values.device)
        entry = values[:, index.places]
        if sums and weights is not None:
            entry = torch.cat([entry, weights[:, index.places_in_sum, None]], -1)
        parts.append(entry * index.roots[:, None])
    return torch.cat(parts, 1)


def unpacked(state: Tensor, orders: Sequence[int], d: int, e: int, highest: int) -> Moments:
    """The inverse: moments of every order up to the highest, zeros for those the state does not hold."""
    rows = state.shape[0]
    small = state.new_zeros(rows, small_size(d, e))
    first, zeroth, z_second, z_first, z_zeroth = _split_small(small, d, e)
    high = {n: state.new_zeros(rows, block_rows(d, n), e) for n in range(2, highest + 1)}
    start = 0
    for n in orders:
        index = _packing(d, n, state.device)
        held = state[:, start : start + index.places.numel()] / index.roots[:, None]
        start += index.places.numel()
        values = held[:, index.of_entry, :e]
        weights = held[:, index.of_sum_entry, e] if held.shape[-1] > e else None
        if n == 0:
            zeroth.copy_(values[:, 0])
        elif n == 1:
            first.copy_(values)
        else:
            high[n][:, index.held] = values
        if weights is not None:
            {0: z_zeroth, 1: z_first}.get(n, z_second).copy_(weights.view(rows, *(d,) * n) if n else weights)
    return Moments(small, high)


class _Packing(NamedTuple):
    """places: the index of each multiset among the entries; of_entry: the multiset of each entry; held: the index of
    each entry among the rows of blocks; places_in_sum, of_sum_entry: the same for the entries of the row sum, which are
    all of x^{⊗n}; roots: √(permutations) of each multiset."""

    places: Tensor
    of_entry: Tensor
    held: Tensor
    places_in_sum: Tensor
    of_sum_entry: Tensor
    roots: Tensor


@lru_cache(maxsize=64)
def _packing(d: int, n: int, device: torch.device) -> _Packing:
    """The packing of order n. Its entries are () for n = 0, (a) for n = 1, else the rows of the blocks."""
    found = list(itertools.combinations_with_replacement(range(d), n))
    of_sum = list(itertools.product(range(d), repeat=n)) if n < 3 else []  # row sums have no order 3
    rows = of_sum if n < 2 else entries(d, n)
    held = [i for i, indices in enumerate(rows) if indices is not None]
    known = [indices for indices in rows if indices is not None]
    permutations = [len(set(itertools.permutations(multiset))) for multiset in found]
    with torch.inference_mode(False):
        return _Packing(
            *_matched(found, known, device),
            torch.tensor(held, device=device),
            *_matched(found if of_sum else [], of_sum, device),
            torch.tensor(permutations, device=device).sqrt(),
        )


def _matched(
    multisets: list[tuple[int, ...]], known: list[tuple[int, ...]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The index of each multiset among the `known` indices in any order, and the multiset of each of these."""
    number = {multiset: i for i, multiset in enumerate(multisets)}
    place = {tuple(sorted(indices)): i for i, indices in enumerate(known)}
    places = [place[multiset] for multiset in multisets]
    return torch.tensor(places, device=device), torch.tensor(
        [number[tuple(sorted(u))] for u in known], device=device
    )


def _split_small(small: Tensor, d: int, e: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Views of Σ x gᵀ, Σ g, Σ ω x xᵀ, Σ ω x and Σ ω."""
    first, zeroth, second, z_first, z_zeroth = small.split([d * e, e, d * d, d, 1], dim=-1)
    return first.unflatten(-1, (d, e)), zeroth, second.unflatten(-1, (d, d)), z_first, z_zeroth


def _moment(totals: Moments, small: tuple[Tensor, ...], n: int, d: int) -> tuple[Tensor, Tensor | None]:
    """Entries of order n [rows, entries, e], and those of the row sum [rows, entries]."""
    first, zeroth, z_second, z_first, z_zeroth = small
    if n == 0:
        return zeroth[:, None], z_zeroth
    if n == 1:
        return first, z_first
    values = totals.high[n]
    held = _packing(d, n, values.device).held
    return values[:, held], z_second.flatten(1) if n == 2 else None
