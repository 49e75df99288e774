"""Rows of polynomial attention in linear time: the past through moments, the own chunk pair by pair.

The formulas stand in polynomial_linear.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maclaurin.programs.triton.block_layout import block_of, entry, members_of, products
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.linear_registers import (
    add_block,
    coefficient,
    left_of,
    log_decay,
    times_square,
    weights,
)
from maclaurin.programs.triton.tiles import divisor_of, load_rows, store_rows


@triton.jit
def _add_keys(acc, z, q, m, log, a0, a1, a2, a3, K, V, k_t, v_t, LOG, log_at, start, d, e, T,
              D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, ORDER: tl.constexpr, DECAY: tl.constexpr,
              MASKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One tile of keys of the own chunk into the sums of a tile of queries."""
    n = start + tl.arange(0, BN)
    k, v = load_rows(K, k_t, n, d, T, D).to(OPERAND), load_rows(V, v_t, n, e, T, E).to(OPERAND)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    w = weights(s, a0[:, None], a1[:, None], a2[:, None], a3[:, None], ORDER)
    if DECAY:
        w *= left_of(log[:, None], log_decay(LOG, log_at, n, T, DECAY)[None, :])
    if MASKED:
        w = tl.where((n[None, :] <= m[:, None]) & (n < T)[None, :], w, 0.0)
    w = w.to(OPERAND)
    z += tl.sum(w.to(tl.float32), 1)  # of the weights as they are multiplied, so that they sum to one
    return tl.dot(w, v, acc, input_precision=PRECISION), z


@launched
@triton.jit
def forward_rows(
    Q, K, V, ALPHA, LOG, SMALL, S2, S3, Y, REST, DIVISOR,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, y_b, y_t, y_h,
    T, H, chunks, all_rows, eps,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    BLOCKS2: tl.constexpr, BLOCKS3: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr, NARROW: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y and D of a tile of queries of one head."""
    tl.static_assert(not (BY_SUM and ORDER > 2), "row sums of order 3 would need cubic sums of keys")
    first = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    chunk = first // CHUNK
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q_at, rows = Q + b * q_b + h * q_h, (b * H + h) * T
    heads = H // GROUP
    past = (b * heads + g) * chunks + chunk
    q = load_rows(q_at, q_t, m, d, T, D).to(OPERAND)
    a0 = coefficient(ALPHA, 0, C, rows, all_rows, m, T, ROWS)
    a1 = coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)
    a2 = coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS) if ORDER > 1 else a0
    a3 = coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS) if ORDER > 2 else a0
    log_at = (b * heads + g) * T
    log = log_decay(LOG, log_at, m, T, DECAY)
    acc = tl.zeros((BM, BE), tl.float32)
    z = tl.zeros((BM,), tl.float32)
    there = 1 if STARTED else (chunk > 0).to(tl.int32)  # a branch would part wgmma's accumulators
    if ORDER > 2:
        at = S3 + past * BLOCKS3 * P * D * E
        c = tl.arange(0, P * BD)
        for group in range((D + P - 1) // P * there):
            q2 = products(q_at, q_t, m, group, T, D, BD, P, OPERAND)
            members, held = members_of(group, D, P)
            for a in range(members):
                factor = entry(q_at, q_t, a, m, T) * tl.where(a < group * P, 2.0, 1.0)
                acc = add_block(acc, q2, factor, block_of(at, a, c, e, D, E, BD, P), PRECISION)
            at += held * P * D * E
        acc *= a3[:, None]
    if ORDER > 1:
        second = tl.zeros((BM, BE), tl.float32)
        at = S2 + past * BLOCKS2 * D * E
        for a in range(D * there):
            block = block_of(at, a, d, e, D, E, BD, 1)
            second = add_block(second, q, entry(q_at, q_t, a, m, T), block, PRECISION)
        acc += a2[:, None] * second
    small = SMALL + past * (D * E + E + D * D + D + 1)
    one = tl.dot(q, block_of(small, 0, d, e, D, E, BD, 1).to(OPERAND), input_precision=PRECISION)
    zero = tl.load(small + D * E + e, mask=e < E, other=0.0)
    acc += a1[:, None] * one + a0[:, None] * zero[None, :]
    if BY_SUM:
        at = small + D * E + E
        z_first = tl.load(at + D * D + d, mask=d < D, other=0.0)
        row = a1[:, None] * z_first[None, :]
        if ORDER > 1:
            row += a2[:, None] * times_square(q, at, d, D, OPERAND, PRECISION)
        z = tl.sum(q.to(tl.float32) * row, 1) + a0 * tl.load(at + D * D + D)
    if DECAY:
        past_left = tl.exp(log.to(tl.float32))
        acc *= past_left[:, None]
        z *= past_left
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    whole = first // BN * BN  # keys before this need no mask
    for start in range(chunk * CHUNK, whole, BN):
        acc, z = _add_keys(acc, z, q, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                           D, E, BN, ORDER, DECAY, False, OPERAND, PRECISION)  # fmt: skip
    for start in range(whole, tl.minimum(first + BM, T), BN):
        acc, z = _add_keys(acc, z, q, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                           D, E, BN, ORDER, DECAY, True, OPERAND, PRECISION)  # fmt: skip
    divisor = divisor_of(z, m + 1, eps, BY_SUM, BY_COUNT)
    inside = (m < T)[:, None] & (e < E)[None, :]
    at = b * y_b + h * y_h + m[:, None] * y_t + e[None, :]
    store_rows(Y, REST, at, acc / divisor[:, None], inside, NARROW)
    tl.store(DIVISOR + rows + m, divisor, mask=m < T)
