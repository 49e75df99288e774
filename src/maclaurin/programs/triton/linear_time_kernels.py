"""Kernels of polynomial attention in linear time: earlier chunks through moments, a query's own chunk pair by pair.

linear_time.py has the formulas and launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maclaurin.programs.triton.block_layout import block_of, contracted, entry, group_of, members_of, products
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.pair_moments import add_block, pairs_times, read_both, read_pairs, sums_at
from maclaurin.programs.triton.tiles import divisor_of, load_rows, store_rows

# --------------------------------------------------------- in registers: weights of scores, sums over moments


@triton.jit
def coefficient(ALPHA, n: tl.constexpr, C: tl.constexpr, rows, all_rows, m, T, ROWS: tl.constexpr):
    """α_n of the rows m."""
    if ROWS:
        alpha = tl.load(ALPHA + n * all_rows + rows + m, mask=m < T, other=0.0)
    else:
        alpha = tl.zeros(m.shape, tl.float32) + C[n]
    return alpha


@triton.jit
def log_decay(LOG, rows, n, T, DECAY: tl.constexpr):
    """L of the tokens n; fp64 for fp32 inputs, because a difference of fp32 totals would lose digits."""
    if DECAY:
        log = tl.load(LOG + rows + n, mask=n < T, other=0.0)
    else:
        log = tl.zeros(n.shape, tl.float32)
    return log


@triton.jit
def left_of(log_t, log_s):
    """e^{L_t − L_s}, the decay from s to t; at most 1, also for t < s."""
    return tl.exp(tl.minimum((log_t - log_s).to(tl.float32), 0.0))


@triton.jit
def weights(s, a0, a1, a2, a3, ORDER: tl.constexpr):
    """Σ α_n sⁿ by Horner's rule."""
    if ORDER == 1:
        w = a1 * s + a0
    elif ORDER == 2:
        w = (a2 * s + a1) * s + a0
    else:
        w = ((a3 * s + a2) * s + a1) * s + a0
    return w


@triton.jit
def slopes(s, a1, a2, a3, ORDER: tl.constexpr):
    """Σ n α_n sⁿ⁻¹."""
    if ORDER == 1:
        slope = a1 + tl.zeros(s.shape, tl.float32)
    elif ORDER == 2:
        slope = 2 * a2 * s + a1
    else:
        slope = (3 * a3 * s + 2 * a2) * s + a1
    return slope


@triton.jit
def times_square(x, Z, d, D: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x Z for a symmetric Z [d, d] in fp32, as two products, of rounded Z and of the rest, for row sums in fp32."""
    inside = (d < D)[:, None] & (d < D)[None, :]
    z = tl.load(Z + d[:, None] * D + d[None, :], mask=inside, other=0.0)
    high = z.to(OPERAND)
    rest = (z - high.to(tl.float32)).to(OPERAND)
    return tl.dot(x, rest, tl.dot(x, high, input_precision=PRECISION), input_precision=PRECISION)


# ------------------------------------------------------------------------------------------------------- rows


@triton.jit
def _add_keys(acc, z, q, m, log, a0, a1, a2, a3, K, V, k_t, v_t, LOG, log_at, start, d, e, T,
              D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, ORDER: tl.constexpr, DECAY: tl.constexpr,
              MASKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of keys of the same chunk to the sums of a tile of queries."""
    n = start + tl.arange(0, BN)
    k, v = load_rows(K, k_t, n, d, T, D).to(OPERAND), load_rows(V, v_t, n, e, T, E).to(OPERAND)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    w = weights(s, a0[:, None], a1[:, None], a2[:, None], a3[:, None], ORDER)
    if DECAY:
        w *= left_of(log[:, None], log_decay(LOG, log_at, n, T, DECAY)[None, :])
    if MASKED:
        w = tl.where((n[None, :] <= m[:, None]) & (n < T)[None, :], w, 0.0)
    w = w.to(OPERAND)
    z += tl.sum(w.to(tl.float32), 1)  # of the rounded weights, so that those in the product sum to one
    return tl.dot(w, v, acc, input_precision=PRECISION), z


@launched
@triton.jit
def forward_rows(
    Q, K, V, ALPHA, LOG, SMALL, S2, S3, Y, REST, DIVISOR,
    q_strides, k_strides, v_strides, y_strides,
    T, H, chunks, all_rows, eps,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    ROWS2: tl.constexpr, ROWS3: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr, NARROW: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y and D of a tile of queries of one head."""
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    y_b, y_t, y_h = y_strides
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
    there = 1 if STARTED else (chunk > 0).to(tl.int32)  # no branch: it would serialize wgmma
    if ORDER > 2:
        at = S3 + past * ROWS3 * E
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
        at = S2 + past * ROWS2 * E
        acc += a2[:, None] * read_pairs(q, q_at + m * q_t, m < T, at, there, e, D, E, PRECISION)
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


# -------------------------------------------------------------------------------------------------- gradients


@triton.jit
def _add_keys_to_gradient(dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, K, V, k_t, v_t, LOG, log_at, start, d, e, T,
              D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr,
              DECAY: tl.constexpr, BY_SUM: tl.constexpr, MASKED: tl.constexpr, OPERAND: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of keys of the same chunk to the gradients of a tile of queries."""
    n = start + tl.arange(0, BN)
    k, v = load_rows(K, k_t, n, d, T, D).to(OPERAND), load_rows(V, v_t, n, e, T, E).to(OPERAND)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad = tl.dot(dn, tl.trans(v), input_precision=PRECISION)
    if BY_SUM:
        grad += dz[:, None]
    if DECAY:
        grad *= left_of(log[:, None], log_decay(LOG, log_at, n, T, DECAY)[None, :])
    if MASKED:
        grad = tl.where((n[None, :] <= m[:, None]) & (n < T)[None, :], grad, 0.0)
    if ROWS:
        da0 += tl.sum(grad, 1)
        da1 += tl.sum(grad * s, 1)
        if ORDER > 1:
            da2 += tl.sum(grad * s * s, 1)
        if ORDER > 2:
            da3 += tl.sum(grad * s * s * s, 1)
    if DECAY:
        w = weights(s, a0[:, None], a1[:, None], a2[:, None], a3[:, None], ORDER)
        of_weights += tl.sum(grad * w, 1).to(of_weights.dtype)
    ds = grad * slopes(s, a1[:, None], a2[:, None], a3[:, None], ORDER)
    return tl.dot(ds.to(OPERAND), k, dq, input_precision=PRECISION), da0, da1, da2, da3, of_weights


@launched
@triton.jit
def backward_queries(
    Q, K, V, DN, DZ, ALPHA, LOG, SMALL, S2, S3, LOWER, DQ, DALPHA, DROW,
    q_strides, k_strides, v_strides, n_strides, dq_strides,
    T, H, chunks, all_rows,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    ROWS2: tl.constexpr, ROWS3: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dα if rows have their own, and Σ_s g w (the derivative of the loss by a common factor of a row's weights)."""
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dq_b, dq_t, dq_h = dq_strides
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
    dn = load_rows(DN + b * n_b + h * n_h, n_t, m, e, T, E).to(OPERAND)
    dz = tl.load(DZ + rows + m, mask=m < T, other=0.0) if BY_SUM else tl.zeros((BM,), tl.float32)
    a0 = coefficient(ALPHA, 0, C, rows, all_rows, m, T, ROWS)
    a1 = coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)
    a2 = coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS) if ORDER > 1 else a0
    a3 = coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS) if ORDER > 2 else a0
    log_at = (b * heads + g) * T
    log = log_decay(LOG, log_at, m, T, DECAY)
    dq = tl.zeros((BM, BD), tl.float32)
    da0 = tl.zeros((BM,), tl.float32)
    da1, da2, da3 = da0, da0, da0
    there = 1 if STARTED else (chunk > 0).to(tl.int32)  # no branch: it would serialize wgmma
    small = SMALL + past * (D * E + E + D * D + D + 1)
    at = small + D * E + E
    if ORDER > 2:
        third = tl.zeros((BM, BD), tl.float32)
        at3 = S3 + past * ROWS3 * E
        c = tl.arange(0, P * BD)
        for group in range((D + P - 1) // P * there):
            total = tl.zeros((BM, P * BD), tl.float32)
            members, held = members_of(group, D, P)
            for a in range(members):
                factor = entry(q_at, q_t, a, m, T) * tl.where(a < group * P, 2.0, 1.0)
                block = tl.trans(block_of(at3, a, c, e, D, E, BD, P))
                total = add_block(total, dn, factor, block, PRECISION)
            third += contracted(total, group_of(q_at, q_t, m, group, T, D, P), BD, P)
            at3 += held * P * D * E
        da3 = tl.sum(third * q.to(tl.float32), 1)
        dq += 3 * a3[:, None] * third
    if ORDER > 1:
        at2 = S2 + past * ROWS2 * E
        if LOWER is not None:
            LOWER = sums_at(LOWER, b * H + h, m, T)
        second = pairs_times(dn, q_at + m * q_t, m < T, at2, there, LOWER, T, e, D, E, BD, PRECISION)
        if BY_SUM:
            second += dz[:, None] * times_square(q, at, d, D, OPERAND, PRECISION)
        da2 = tl.sum(second * q.to(tl.float32), 1)
        dq += 2 * a2[:, None] * second
    one = tl.dot(dn, tl.trans(block_of(small, 0, d, e, D, E, BD, 1)).to(OPERAND), input_precision=PRECISION)
    if BY_SUM:
        one += dz[:, None] * tl.load(at + D * D + d, mask=d < D, other=0.0)[None, :]
    da1 = tl.sum(one * q.to(tl.float32), 1)
    dq += a1[:, None] * one
    if ROWS or DECAY:
        zero = tl.load(small + D * E + e, mask=e < E, other=0.0)
        da0 = tl.sum(dn.to(tl.float32) * zero[None, :], 1)
        if BY_SUM:
            da0 += dz * tl.load(at + D * D + D)
    if DECAY:
        past_left = tl.exp(log.to(tl.float32))
        dq *= past_left[:, None]
        da0, da1, da2, da3 = da0 * past_left, da1 * past_left, da2 * past_left, da3 * past_left
    of_weights = (a0 * da0 + a1 * da1 + a2 * da2 + a3 * da3).to(log.dtype)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    whole = first // BN * BN  # keys before this need no mask
    for start in range(chunk * CHUNK, whole, BN):
        dq, da0, da1, da2, da3, of_weights = _add_keys_to_gradient(
            dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
            D, E, BN, ORDER, ROWS, DECAY, BY_SUM, False, OPERAND, PRECISION,
        )  # fmt: skip
    for start in range(whole, tl.minimum(first + BM, T), BN):
        dq, da0, da1, da2, da3, of_weights = _add_keys_to_gradient(
            dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
            D, E, BN, ORDER, ROWS, DECAY, BY_SUM, True, OPERAND, PRECISION,
        )  # fmt: skip
    inside = (m < T)[:, None] & (d < D)[None, :]
    at = DQ + b * dq_b + h * dq_h + m[:, None] * dq_t + d[None, :]
    tl.store(at, dq.to(DQ.dtype.element_ty), mask=inside)
    if ROWS:
        tl.store(DALPHA + rows + m, da0, mask=m < T)
        tl.store(DALPHA + all_rows + rows + m, da1, mask=m < T)
        if ORDER > 1:
            tl.store(DALPHA + 2 * all_rows + rows + m, da2, mask=m < T)
        if ORDER > 2:
            tl.store(DALPHA + 3 * all_rows + rows + m, da3, mask=m < T)
    if DECAY:
        tl.store(DROW + rows + m, of_weights, mask=m < T)


@triton.jit
def _add_queries(dk, dv, of_weights, k, v, n, log_s, Q, DN, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                 d, e, T, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
                 ROWS: tl.constexpr, DECAY: tl.constexpr, BY_SUM: tl.constexpr, MASKED: tl.constexpr,
                 OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of queries of the same chunk to the gradients of a tile of keys; tiles are [keys, queries].

    Queries beyond the text have zeros for q, dn and dz and add nothing; gradients of keys beyond it are not stored.
    """
    m = start + tl.arange(0, BM)
    q, dn = load_rows(Q, q_t, m, d, T, D).to(OPERAND), load_rows(DN, n_t, m, e, T, E).to(OPERAND)
    a0 = coefficient(ALPHA, 0, C, rows, all_rows, m, T, ROWS)[None, :]
    a1 = coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)[None, :]
    a2 = coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS)[None, :] if ORDER > 1 else a0
    a3 = coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS)[None, :] if ORDER > 2 else a0
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    w = weights(s, a0, a1, a2, a3, ORDER)
    slope = slopes(s, a1, a2, a3, ORDER)
    if DECAY:
        left = left_of(log_decay(LOG, of_key, m, T, DECAY)[None, :], log_s[:, None])
        w, slope = w * left, slope * left
    seen = n[:, None] <= m[None, :]
    if MASKED:
        w = tl.where(seen, w, 0.0)
    dv = tl.dot(w.to(OPERAND), dn, dv, input_precision=PRECISION)
    grad = tl.dot(v, tl.trans(dn), input_precision=PRECISION)
    if BY_SUM:
        grad += tl.load(DZ + rows + m, mask=m < T, other=0.0)[None, :]
    if DECAY:
        of_weights += tl.sum(w * grad, 1).to(
            of_weights.dtype
        )  # unrounded weights: sums along the text cancel
    ds = grad * slope
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(OPERAND), q, dk, input_precision=PRECISION), dv, of_weights


@launched
@triton.jit
def backward_keys(
    Q, K, V, DN, DZ, ALPHA, LOG, LEFT, SMALL, S2, S3, LOWER, DK, DV, DKEY,
    q_strides, k_strides, v_strides, n_strides, dk_strides, dv_strides,
    T, H, chunks, all_rows,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    ROWS2: tl.constexpr, ROWS3: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv, and Σ_t g w (the derivative of the loss by a common factor of a key's weights), for one key-value head.

    The moments are those of (q, dn, dz) over later chunks. If rows have their own coefficients, the moments already
    contain them. LEFT is the log decay from a key to the end of its chunk.
    """
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dk_b, dk_t, dk_h = dk_strides
    dv_b, dv_t, dv_h = dv_strides
    tl.static_assert(not (BY_SUM and ORDER > 2), "row sums of order 3 would need cubic sums of keys")
    first = tl.program_id(0) * BN
    heads = H // GROUP
    b, g = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    chunk = first // CHUNK
    n = first + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    k, v = load_rows(k_at, k_t, n, d, T, D).to(OPERAND), load_rows(v_at, v_t, n, e, T, E).to(OPERAND)
    of_key = (b * heads + g) * T
    log_s = log_decay(LOG, of_key, n, T, DECAY)
    later = (b * heads + g) * chunks + chunk
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    of_weights = tl.zeros((BN,), log_s.dtype)
    there = 1 if STARTED else (chunk < chunks - 1).to(tl.int32)  # no branch: it would serialize wgmma
    c0 = 1.0 if ROWS else C[0]
    c1 = 1.0 if ROWS else C[1]
    small = SMALL + later * (D * E + E + D * D + D + 1)
    at = small + D * E + E
    if ORDER > 2:
        c3 = 1.0 if ROWS else C[3]
        at3 = S3 + later * ROWS3 * E
        c = tl.arange(0, P * BD)
        for group in range((D + P - 1) // P * there):
            k2 = products(k_at, k_t, n, group, T, D, BD, P, OPERAND)
            total = tl.zeros((BN, P * BD), tl.float32)
            members, held = members_of(group, D, P)
            for a in range(members):
                factor = entry(k_at, k_t, a, n, T) * tl.where(a < group * P, 2.0, 1.0)
                block = block_of(at3, a, c, e, D, E, BD, P)
                dv = add_block(dv, k2, factor, block, PRECISION)
                total = add_block(total, v, factor, tl.trans(block), PRECISION)
            dk += contracted(total, group_of(k_at, k_t, n, group, T, D, P), BD, P)
            at3 += held * P * D * E
        dv *= c3
        dk *= 3 * c3
    if ORDER > 1:
        c2 = 1.0 if ROWS else C[2]
        at2 = S2 + later * ROWS2 * E
        if LOWER is not None:
            LOWER = sums_at(LOWER, b * heads + g, n, T)
        of_v, of_k = read_both(k, v, k_at + n * k_t, n < T, at2, there, LOWER, T, e, D, E, PRECISION)
        if BY_SUM:
            row = times_square(k, at, d, D, OPERAND, PRECISION)
            of_k += row
            of_weights += c2 * tl.sum(row * k.to(tl.float32), 1)
        dv += c2 * of_v
        dk += 2 * c2 * of_k
    block = block_of(small, 0, d, e, D, E, BD, 1).to(OPERAND)
    dv += c1 * tl.dot(k, block, input_precision=PRECISION)
    dv += c0 * tl.load(small + D * E + e, mask=e < E, other=0.0)[None, :]
    dk += c1 * tl.dot(v, tl.trans(block), input_precision=PRECISION)
    if BY_SUM:
        z_first = tl.load(at + D * D + d, mask=d < D, other=0.0)
        dk += c1 * z_first[None, :]
        of_weights += c1 * tl.sum(k.to(tl.float32) * z_first[None, :], 1) + c0 * tl.load(at + D * D + D)
    if DECAY:
        at_end = tl.exp(log_decay(LEFT, of_key, n, T, DECAY).to(tl.float32))
        dk, dv = dk * at_end[:, None], dv * at_end[:, None]
        of_weights = of_weights * at_end + tl.sum(dv * v.to(tl.float32), 1)
    whole = tl.cdiv(first + BN, BM) * BM  # from here on, queries see the whole tile
    end = tl.minimum((chunk + 1) * CHUNK, T)
    for member in range(GROUP):
        h = g * GROUP + member
        q_at, dn_at, rows = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h, (b * H + h) * T
        for start in range(first // BM * BM, tl.minimum(whole, end), BM):
            dk, dv, of_weights = _add_queries(
                dk, dv, of_weights, k, v, n, log_s, q_at, dn_at, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                d, e, T, D, E, BM, C, ORDER, ROWS, DECAY, BY_SUM, True, OPERAND, PRECISION,
            )  # fmt: skip
        for start in range(whole, end, BM):
            dk, dv, of_weights = _add_queries(
                dk, dv, of_weights, k, v, n, log_s, q_at, dn_at, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                d, e, T, D, E, BM, C, ORDER, ROWS, DECAY, BY_SUM, False, OPERAND, PRECISION,
            )  # fmt: skip
    inside_d, inside_e = (n < T)[:, None] & (d < D)[None, :], (n < T)[:, None] & (e < E)[None, :]
    at = DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :]
    tl.store(at, dk.to(DK.dtype.element_ty), mask=inside_d)
    at = DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :]
    tl.store(at, dv.to(DV.dtype.element_ty), mask=inside_e)
    if DECAY:
        tl.store(DKEY + of_key + n, of_weights, mask=n < T)
