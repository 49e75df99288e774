"""Attention with a polynomial of low order for a weight, in time linear in the text.

    w_ts = e^{L_t − L_s} Σ_n α_n(t) (q·k)ⁿ,      y_t = Σ_{s≤t} w_ts v_s / D_t,      D_t = Σ_s w_ts + eps, or t

The text is cut into chunks. Queries see the keys of their own chunk pair by pair, and all before it through
moments (moments.py). L are running totals of the log forget gate within a chunk; α are constants, or one number
per order and row.

Backward, with dn = dy/D, dz = dD − Σ dy∘y/D and g_ts = e^{L_t − L_s}(dn_t·v_s + dz_t):

    r⁽ⁿ⁾_t = Σ_s g_ts (q·k)ⁿ⁻¹ k_s,     dq = Σ_n n α_n r⁽ⁿ⁾,     dα_n = q·r⁽ⁿ⁾,   dα₀ = Σ_s g_ts

and keys and values read the moments of (q, dn, dz) over the chunks after their own in the same way. A moment of
order n is one block [d, e] per monomial μ of degree n − 1, so both directions are sums over monomials:

    φ(q)·S = Σ_μ (μ(q) q) S_μ,          Σ_s g (q·k)ⁿ⁻¹ k = Σ_μ (μ(q) dn) S_μᵀ
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.backends.triton import on_its_device
from maclaurin.backends.triton.moments import Moments, Side, Totals, blocks, moments, operand_options, pairs
from maclaurin.backends.triton.tiles import Tile, load_rows, tile_options, width

#: tiles by pass for heads up to 64 and up to 128
TILES = {
    "forward": (Tile(128, 64, 4, 2), Tile(128, 64, 8, 2)),
    "queries": (Tile(128, 64, 4, 2), Tile(128, 64, 8, 2)),
    "keys": (Tile(64, 128, 8, 2), Tile(64, 64, 8, 2)),
}


@dataclass(frozen=True)
class Call:
    """What of a call is no tensor.

    coefficients    α₀ … α_N of s, the score without its scale; where rows have their own, only N counts
    divide_by_sum   D = row sum + eps; else the number of visible keys
    """

    coefficients: tuple[float, ...]
    divide_by_sum: bool
    eps: float
    chunk: int

    @property
    def order(self) -> int:
        return len(self.coefficients) - 1


# --------------------------------------------------------------------------------- in registers


@triton.jit
def _coefficient(ALPHA, n: tl.constexpr, C: tl.constexpr, rows, all_rows, m, T, ROWS: tl.constexpr):
    """α_n of the rows m."""
    if ROWS:
        alpha = tl.load(ALPHA + n * all_rows + rows + m, mask=m < T, other=0.0)
    else:
        alpha = tl.zeros(m.shape, tl.float32) + C[n]
    return alpha


@triton.jit
def _decay(LOG, rows, n, T, DECAY: tl.constexpr):
    """L of the tokens n."""
    if DECAY:
        log = tl.load(LOG + rows + n, mask=n < T, other=0.0)
    else:
        log = tl.zeros(n.shape, tl.float32)
    return log


@triton.jit
def _weights(s, a0, a1, a2, a3, ORDER: tl.constexpr):
    """Σ α_n sⁿ by Horner's rule."""
    if ORDER == 1:
        w = a1 * s + a0
    elif ORDER == 2:
        w = (a2 * s + a1) * s + a0
    else:
        w = ((a3 * s + a2) * s + a1) * s + a0
    return w


@triton.jit
def _slopes(s, a1, a2, a3, ORDER: tl.constexpr):
    """Σ n α_n sⁿ⁻¹."""
    if ORDER == 1:
        slope = a1 + tl.zeros(s.shape, tl.float32)
    elif ORDER == 2:
        slope = 2 * a2 * s + a1
    else:
        slope = (3 * a3 * s + 2 * a2) * s + a1
    return slope


@triton.jit
def _factor(at, t, TABLE, i, m, T, ORDER: tl.constexpr, OPERAND: tl.constexpr):
    """The i-th monomial of rows of x, as often as it occurs."""
    if ORDER == 2:
        found = tl.load(at + m * t + i, mask=m < T, other=0.0).to(OPERAND)
    else:
        a, b = tl.load(TABLE + 2 * i), tl.load(TABLE + 2 * i + 1)
        first = tl.load(at + m * t + a, mask=m < T, other=0.0).to(OPERAND)
        second = tl.load(at + m * t + b, mask=m < T, other=0.0).to(OPERAND)
        found = first * second * tl.where(a == b, 1, 2).to(OPERAND)
    return found


@triton.jit
def _block(S, i, d, e, D: tl.constexpr, E: tl.constexpr):
    """S_μ [d, e] of the i-th monomial."""
    inside = (d < D)[:, None] & (e < E)[None, :]
    return tl.load(S + (i * D + d)[:, None] * E + e[None, :], mask=inside, other=0.0)


@triton.jit
def _times_square(x, Z, d, D: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x Z for a symmetric Z [d, d] kept in fp32, by its two halves, so that the row sum is one of fp32."""
    inside = (d < D)[:, None] & (d < D)[None, :]
    z = tl.load(Z + d[:, None] * D + d[None, :], mask=inside, other=0.0)
    high = z.to(OPERAND)
    rest = (z - high.to(tl.float32)).to(OPERAND)
    return tl.dot(x, rest, tl.dot(x, high, input_precision=PRECISION), input_precision=PRECISION)


# ------------------------------------------------------------------------------------- forward


@triton.jit
def _forward(
    Q, K, V, ALPHA, LOG, SMALL, S2, S3, TABLE, Y, DIVISOR,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, y_b, y_t, y_h,
    T, H, chunks, all_rows, eps,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    BLOCKS2: tl.constexpr, BLOCKS3: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    a0 = _coefficient(ALPHA, 0, C, rows, all_rows, m, T, ROWS)
    a1 = _coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)
    a2 = _coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS) if ORDER > 1 else a0
    a3 = _coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS) if ORDER > 2 else a0
    log = _decay(LOG, (b * heads + g) * T, m, T, DECAY)
    acc = tl.zeros((BM, BE), tl.float32)
    z = tl.zeros((BM,), tl.float32)
    if STARTED or chunk > 0:
        if ORDER > 2:
            at = S3 + past * BLOCKS3 * D * E
            for i in range(D * (D + 1) // 2):
                factor = _factor(q_at, q_t, TABLE, i, m, T, 3, OPERAND)
                acc = tl.dot(q * factor[:, None], _block(at, i, d, e, D, E), acc, input_precision=PRECISION)
            acc *= a3[:, None]
        if ORDER > 1:
            second = tl.zeros((BM, BE), tl.float32)
            at = S2 + past * BLOCKS2 * D * E
            for i in range(D):
                factor = _factor(q_at, q_t, TABLE, i, m, T, 2, OPERAND)
                block = _block(at, i, d, e, D, E)
                second = tl.dot(q * factor[:, None], block, second, input_precision=PRECISION)
            acc += a2[:, None] * second
        small = SMALL + past * (D * E + E + D * D + D + 1)
        one = tl.dot(q, _block(small, 0, d, e, D, E).to(OPERAND), input_precision=PRECISION)
        zero = tl.load(small + D * E + e, mask=e < E, other=0.0)
        acc += a1[:, None] * one + a0[:, None] * zero[None, :]
        if BY_SUM:
            at = small + D * E + E
            z_first = tl.load(at + D * D + d, mask=d < D, other=0.0)
            row = a1[:, None] * z_first[None, :]
            if ORDER > 1:
                row += a2[:, None] * _times_square(q, at, d, D, OPERAND, PRECISION)
            z = tl.sum(q.to(tl.float32) * row, 1) + a0 * tl.load(at + D * D + D)
        if DECAY:
            acc *= tl.exp(log)[:, None]
            z *= tl.exp(log)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    for start in range(chunk * CHUNK, tl.minimum(first + BM, T), BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(k_at, k_t, n, d, T, D).to(OPERAND), load_rows(v_at, v_t, n, e, T, E).to(OPERAND)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        w = _weights(s, a0[:, None], a1[:, None], a2[:, None], a3[:, None], ORDER)
        seen = (n[None, :] <= m[:, None]) & (n < T)[None, :]
        if DECAY:
            log_s = _decay(LOG, (b * heads + g) * T, n, T, DECAY)
            w *= tl.exp(tl.where(seen, log[:, None] - log_s[None, :], 0.0))
        w = tl.where(seen, w, 0.0).to(OPERAND)
        z += tl.sum(w.to(tl.float32), 1)  # of the weights as they are multiplied, so that they sum to one
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    divisor = z + eps if BY_SUM else (m + 1).to(tl.float32)
    divisor = tl.where(divisor == 0, 1.0, divisor)
    inside = (m < T)[:, None] & (e < E)[None, :]
    tl.store(Y + b * y_b + h * y_h + m[:, None] * y_t + e[None, :], acc / divisor[:, None], mask=inside)
    tl.store(DIVISOR + rows + m, divisor, mask=m < T)


# ------------------------------------------------------------------------------------ backward


@triton.jit
def _backward_queries(
    Q, K, V, DN, DZ, ALPHA, LOG, SMALL, S2, S3, TABLE, DQ, DALPHA,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n_b, n_t, n_h, dq_b, dq_t, dq_h,
    T, H, chunks, all_rows,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    BLOCKS2: tl.constexpr, BLOCKS3: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and dα where rows have their own."""
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
    a1 = _coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)
    a2 = _coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS) if ORDER > 1 else a1
    a3 = _coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS) if ORDER > 2 else a1
    log = _decay(LOG, (b * heads + g) * T, m, T, DECAY)
    dq = tl.zeros((BM, BD), tl.float32)
    da0 = tl.zeros((BM,), tl.float32)
    da1, da2, da3 = da0, da0, da0
    if STARTED or chunk > 0:
        small = SMALL + past * (D * E + E + D * D + D + 1)
        at = small + D * E + E
        if ORDER > 2:
            third = tl.zeros((BM, BD), tl.float32)
            at3 = S3 + past * BLOCKS3 * D * E
            for i in range(D * (D + 1) // 2):
                factor = _factor(q_at, q_t, TABLE, i, m, T, 3, OPERAND)
                block = tl.trans(_block(at3, i, d, e, D, E))
                third = tl.dot(dn * factor[:, None], block, third, input_precision=PRECISION)
            da3 = tl.sum(third * q.to(tl.float32), 1)
            dq += 3 * a3[:, None] * third
        if ORDER > 1:
            second = tl.zeros((BM, BD), tl.float32)
            at2 = S2 + past * BLOCKS2 * D * E
            for i in range(D):
                factor = _factor(q_at, q_t, TABLE, i, m, T, 2, OPERAND)
                block = tl.trans(_block(at2, i, d, e, D, E))
                second = tl.dot(dn * factor[:, None], block, second, input_precision=PRECISION)
            if BY_SUM:
                second += dz[:, None] * _times_square(q, at, d, D, OPERAND, PRECISION)
            da2 = tl.sum(second * q.to(tl.float32), 1)
            dq += 2 * a2[:, None] * second
        one = tl.dot(dn, tl.trans(_block(small, 0, d, e, D, E)).to(OPERAND), input_precision=PRECISION)
        if BY_SUM:
            one += dz[:, None] * tl.load(at + D * D + d, mask=d < D, other=0.0)[None, :]
        da1 = tl.sum(one * q.to(tl.float32), 1)
        dq += a1[:, None] * one
        if ROWS:
            zero = tl.load(small + D * E + e, mask=e < E, other=0.0)
            da0 = tl.sum(dn.to(tl.float32) * zero[None, :], 1)
            if BY_SUM:
                da0 += dz * tl.load(at + D * D + D)
        if DECAY:
            past_left = tl.exp(log)
            dq *= past_left[:, None]
            da0, da1, da2, da3 = da0 * past_left, da1 * past_left, da2 * past_left, da3 * past_left
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    for start in range(chunk * CHUNK, tl.minimum(first + BM, T), BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(k_at, k_t, n, d, T, D).to(OPERAND), load_rows(v_at, v_t, n, e, T, E).to(OPERAND)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        grad = tl.dot(dn, tl.trans(v), input_precision=PRECISION) + dz[:, None]
        seen = (n[None, :] <= m[:, None]) & (n < T)[None, :]
        if DECAY:
            log_s = _decay(LOG, (b * heads + g) * T, n, T, DECAY)
            grad *= tl.exp(tl.where(seen, log[:, None] - log_s[None, :], 0.0))
        grad = tl.where(seen, grad, 0.0)
        if ROWS:
            da0 += tl.sum(grad, 1)
            da1 += tl.sum(grad * s, 1)
            if ORDER > 1:
                da2 += tl.sum(grad * s * s, 1)
            if ORDER > 2:
                da3 += tl.sum(grad * s * s * s, 1)
        ds = grad * _slopes(s, a1[:, None], a2[:, None], a3[:, None], ORDER)
        dq = tl.dot(ds.to(OPERAND), k, dq, input_precision=PRECISION)
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


@triton.jit
def _backward_keys(
    Q, K, V, DN, DZ, ALPHA, LOG, LEFT, SMALL, S2, S3, TABLE, DK, DV, DKEY,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n_b, n_t, n_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    T, H, chunks, all_rows,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    BLOCKS2: tl.constexpr, BLOCKS3: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv, and Σ_t g w (how the loss grows with all weights of a key), for one key-value head.

    The moments are those of (q, dn, dz) over later chunks. Where rows have coefficients of their own, these are
    in the moments already; LEFT is ln of what is left of a key at the end of its chunk.
    """
    first = tl.program_id(0) * BN
    heads = H // GROUP
    b, g = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    chunk = first // CHUNK
    n = first + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    k, v = load_rows(k_at, k_t, n, d, T, D).to(OPERAND), load_rows(v_at, v_t, n, e, T, E).to(OPERAND)
    of_key = (b * heads + g) * T
    log_s = _decay(LOG, of_key, n, T, DECAY)
    later = (b * heads + g) * chunks + chunk
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    dz_key = tl.zeros((BN,), tl.float32)
    if STARTED or chunk < chunks - 1:
        c0 = 1.0 if ROWS else C[0]
        c1 = 1.0 if ROWS else C[1]
        small = SMALL + later * (D * E + E + D * D + D + 1)
        at = small + D * E + E
        if ORDER > 2:
            c3 = 1.0 if ROWS else C[3]
            at3 = S3 + later * BLOCKS3 * D * E
            for i in range(D * (D + 1) // 2):
                factor = _factor(k_at, k_t, TABLE, i, n, T, 3, OPERAND)
                block = _block(at3, i, d, e, D, E)
                dv = tl.dot(k * factor[:, None], block, dv, input_precision=PRECISION)
                dk = tl.dot(v * factor[:, None], tl.trans(block), dk, input_precision=PRECISION)
            dv *= c3
            dk *= 3 * c3
        if ORDER > 1:
            c2 = 1.0 if ROWS else C[2]
            at2 = S2 + later * BLOCKS2 * D * E
            of_v = tl.zeros((BN, BE), tl.float32)
            of_k = tl.zeros((BN, BD), tl.float32)
            for i in range(D):
                factor = _factor(k_at, k_t, TABLE, i, n, T, 2, OPERAND)
                block = _block(at2, i, d, e, D, E)
                of_v = tl.dot(k * factor[:, None], block, of_v, input_precision=PRECISION)
                of_k = tl.dot(v * factor[:, None], tl.trans(block), of_k, input_precision=PRECISION)
            if BY_SUM:
                row = _times_square(k, at, d, D, OPERAND, PRECISION)
                of_k += row
                dz_key += c2 * tl.sum(row * k.to(tl.float32), 1)
            dv += c2 * of_v
            dk += 2 * c2 * of_k
        block = _block(small, 0, d, e, D, E).to(OPERAND)
        dv += c1 * tl.dot(k, block, input_precision=PRECISION)
        dv += c0 * tl.load(small + D * E + e, mask=e < E, other=0.0)[None, :]
        dk += c1 * tl.dot(v, tl.trans(block), input_precision=PRECISION)
        if BY_SUM:
            z_first = tl.load(at + D * D + d, mask=d < D, other=0.0)
            dk += c1 * z_first[None, :]
            dz_key += c1 * tl.sum(k.to(tl.float32) * z_first[None, :], 1) + c0 * tl.load(at + D * D + D)
        if DECAY:
            at_end = tl.exp(_decay(LEFT, of_key, n, T, DECAY))
            dk, dv, dz_key = dk * at_end[:, None], dv * at_end[:, None], dz_key * at_end
    for member in range(GROUP):
        h = g * GROUP + member
        q_at, dn_at, rows = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h, (b * H + h) * T
        for start in range(first // BM * BM, tl.minimum((chunk + 1) * CHUNK, T), BM):
            m = start + tl.arange(0, BM)
            q, dn = (
                load_rows(q_at, q_t, m, d, T, D).to(OPERAND),
                load_rows(dn_at, n_t, m, e, T, E).to(OPERAND),
            )
            dz = tl.load(DZ + rows + m, mask=m < T, other=0.0) if BY_SUM else tl.zeros((BM,), tl.float32)
            a0 = _coefficient(ALPHA, 0, C, rows, all_rows, m, T, ROWS)[None, :]
            a1 = _coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)[None, :]
            a2 = _coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS)[None, :] if ORDER > 1 else a0
            a3 = _coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS)[None, :] if ORDER > 2 else a0
            seen = (n[:, None] <= m[None, :]) & (m < T)[None, :]
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            w = _weights(s, a0, a1, a2, a3, ORDER)
            grad = tl.dot(v, tl.trans(dn), input_precision=PRECISION) + dz[None, :]
            if DECAY:
                log_t = _decay(LOG, of_key, m, T, DECAY)
                left = tl.exp(tl.where(seen, log_t[None, :] - log_s[:, None], 0.0))
                w, grad = w * left, grad * left
            w = tl.where(seen, w, 0.0)
            dv = tl.dot(w.to(OPERAND), dn, dv, input_precision=PRECISION)
            if BY_SUM and DECAY:
                dz_key += tl.sum(w * dz[None, :], 1)
            ds = tl.where(seen, grad * _slopes(s, a1, a2, a3, ORDER), 0.0)
            dk = tl.dot(ds.to(OPERAND), q, dk, input_precision=PRECISION)
    inside_d, inside_e = (n < T)[:, None] & (d < D)[None, :], (n < T)[:, None] & (e < E)[None, :]
    at = DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :]
    tl.store(at, dk.to(DK.dtype.element_ty), mask=inside_d)
    at = DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :]
    tl.store(at, dv.to(DV.dtype.element_ty), mask=inside_e)
    if DECAY:
        tl.store(DKEY + of_key + n, dz_key + tl.sum(dv * v.to(tl.float32), 1), mask=n < T)


# ------------------------------------------------------------------------------------ launching


class Gradients(NamedTuple):
    """Of q, k, v in their dtypes, of α and of the log forget gate in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None
    log_forget: Tensor | None


@dataclass(frozen=True)
class Rows:
    """What a call may have per token: α [N+1, B, H, T] and the log forget gate [B, K, T], both fp32."""

    alpha: Tensor | None = None
    log_forget: Tensor | None = None


@on_its_device
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    call: Call,
    *,
    initial: Totals | None = None,
    totals: bool = False,
) -> tuple[Tensor, Tensor, Moments, Totals | None]:
    """y [B, T, H, e] and D [B, H, T] in fp32, causal; the moments of the keys, for the way back; their totals.

    `initial` are the totals of a text that came before; those after this one are made if asked for.
    """
    batch, tokens, heads, _ = q.shape
    log = _chunk_totals(rows.log_forget, call.chunk)
    past, after = moments(
        _keys_side(k, v, log, call),
        call.order,
        call.chunk,
        sums=call.divide_by_sum,
        initial=initial,
        totals=totals,
    )
    y = torch.empty(batch, tokens, heads, v.shape[3], dtype=torch.float32, device=q.device)
    divisor = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    tile = _tile("forward", q, v, rows, call)
    _forward[(triton.cdiv(tokens, tile["BM"]), batch * heads)](
        q, k, v, rows.alpha, log, *_pointers(past), _table(q, call), y, divisor,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *y.stride()[:3],
        tokens, heads, past.small.shape[1], batch * heads * tokens, call.eps,
        **_sizes(q, k, v, rows, call), **tile, STARTED=initial is not None,
    )  # fmt: skip
    return y, divisor, past, after


@on_its_device
def backward(
    dy: Tensor,
    d_divisor: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    divisor: Tensor,
    rows: Rows,
    past: Moments,
    call: Call,
    *,
    started: bool = False,
    totals: Totals | None = None,
    d_totals: Totals | None = None,
) -> tuple[Gradients, Totals | None]:
    """All gradients; and where the text was `started`, that of the totals it started from.

    d_totals is the gradient of the totals after it, which are needed beside it where there is a forget gate.
    """
    batch, tokens, heads, _ = q.shape
    kv_heads, chunks = k.shape[2], past.small.shape[1]
    log = _chunk_totals(rows.log_forget, call.chunk)
    dn, dz = _row_gradients(dy, d_divisor, y, divisor, v.dtype, call)
    dq, dk, dv = (torch.empty(u.shape, dtype=u.dtype, device=u.device) for u in (q, k, v))
    d_alpha = None if rows.alpha is None else torch.empty_like(rows.alpha)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dn.stride()[:3])
    shape = (tokens, heads, chunks, batch * heads * tokens)
    sizes, table = _sizes(q, k, v, rows, call), _table(q, call)
    tile = _tile("queries", q, v, rows, call)
    _backward_queries[(triton.cdiv(tokens, tile["BM"]), batch * heads)](
        q, k, v, dn, dz, rows.alpha, log, *_pointers(past), table, dq, d_alpha,
        *strides, *dq.stride()[:3], *shape, **sizes, **tile, STARTED=started,
    )  # fmt: skip
    scaled = rows.alpha is not None
    later, before = moments(
        _queries_side(q, dn, dz, rows.alpha, log, heads // kv_heads, call),
        call.order,
        call.chunk,
        sums=call.divide_by_sum,
        reverse=True,
        initial=None if d_totals is None else _by_coefficients(d_totals, q, v, call, scaled, inverse=True),
        totals=started,
    )
    of_keys = None if log is None else torch.empty_like(log)
    left = None if log is None else _chunk_ends(log, call.chunk) - log
    tile = _tile("keys", q, v, rows, call)
    _backward_keys[(triton.cdiv(tokens, tile["BN"]), batch * kv_heads)](
        q, k, v, dn, dz, rows.alpha, log, left, *_pointers(later), table, dk, dv, of_keys,
        *strides, *dk.stride()[:3], *dv.stride()[:3], *shape, **sizes, **tile, STARTED=d_totals is not None,
    )  # fmt: skip
    d_forget = None
    if of_keys is not None:
        of_rows = (dn * y).sum(-1).transpose(1, 2) * divisor
        if call.divide_by_sum:
            of_rows = of_rows + dz * (divisor - call.eps)
        of_rows = of_rows.unflatten(1, (kv_heads, -1)).sum(2)
        if totals is not None and d_totals is not None:  # every gate shrinks the totals too
            of_rows[..., -1] += _inner(totals, d_totals, q.shape[3]).view(batch, kv_heads)
        d_forget = (of_rows - of_keys).double().flip(-1).cumsum(-1).flip(-1).float()
    d_initial = None if before is None else _by_coefficients(before, q, v, call, scaled, inverse=False)
    return Gradients(dq, dk, dv, d_alpha, d_forget), d_initial


def _inner(totals: Totals, other: Totals, d: int) -> Tensor:
    """Σ over all entries of two moments, [B·K]; blocks of x_a x_b stand for x_b x_a too."""
    found = (totals.small * other.small).sum(-1)
    for n, block in totals.high.items():
        products = (block * other.high[n]).flatten(2).sum(-1)
        if n == 3:
            first, second = pairs(d, block.device).unbind(-1)
            products = products * (1 + (first != second).to(products.dtype))
            products = products[:, : d * (d + 1) // 2]
        found = found + products.sum(-1)
    return found


def _by_coefficients(
    totals: Totals, q: Tensor, v: Tensor, call: Call, scaled: bool, *, inverse: bool
) -> Totals:
    """Moments of queries as gradients of a state: order n times its coefficient, or over it on the way back.

    Where rows have coefficients of their own, their moments hold them already.
    """
    if scaled:
        return totals
    c = [1 / c if inverse and c else c for c in (*call.coefficients, 0.0, 0.0)]
    d, e = q.shape[3], v.shape[3]
    parts = totals.small.split([d * e, e, d * d, d, 1], dim=-1)
    factors = (c[1], c[0], c[2], c[1], c[0])
    small = torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)], -1)
    return Totals(small, {n: u * c[n] for n, u in totals.high.items()})


def _row_gradients(
    dy: Tensor, d_divisor: Tensor | None, y: Tensor, divisor: Tensor, dtype: torch.dtype, call: Call
) -> tuple[Tensor, Tensor]:
    """dn = dy/D [B, T, H, e] and dz = dD − Σ dn∘y [B, H, T], which is not read where D is no row sum.

    dz is made from dn as it was rounded: what counts is dn·(v − y), and rows of nearly equal values cancel in it.
    """
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # a quotient may leave fp16's range
    dn = (dy / divisor.transpose(1, 2)[..., None]).to(kept).contiguous()
    if not call.divide_by_sum:
        return dn, divisor
    dz = -(dn * y).sum(-1).transpose(1, 2)
    return dn, (dz if d_divisor is None else dz + d_divisor).contiguous()


def _keys_side(k: Tensor, v: Tensor, log: Tensor | None, call: Call) -> Side:
    """Keys and values, weighed by what is left of them at the end of their chunk."""
    if log is None:
        return Side(k, v)
    ends = _chunk_ends(log, call.chunk)
    weights = (ends - log).exp().expand(call.order + 1, *log.shape).contiguous()
    return Side(k, v, _three(weights), carry=_carry(ends, call.chunk))


def _queries_side(
    q: Tensor, dn: Tensor, dz: Tensor, alpha: Tensor | None, log: Tensor | None, group: int, call: Call
) -> Side:
    """Queries and their gradients, weighed by what is left of the past when they look at it."""
    omega = dz if call.divide_by_sum else None
    weights, carry = alpha, None
    if log is not None:
        seen = log.repeat_interleave(group, 1).exp()
        weights = (seen.expand(call.order + 1, *seen.shape) if alpha is None else alpha * seen).contiguous()
        carry = _carry(_chunk_ends(log, call.chunk), call.chunk)
    return Side(q, dn, None if weights is None else _three(weights), omega, carry, group)


def _three(weights: Tensor) -> Tensor:
    """At least the weights of orders 0 to 2, which the program of the small moments reads."""
    missing = 3 - weights.shape[0]
    return weights if missing <= 0 else torch.cat([weights, weights[:missing]])


def _chunk_totals(log_forget: Tensor | None, chunk: int) -> Tensor | None:
    """L: running totals of the log forget gate from the beginning of each chunk."""
    if log_forget is None:
        return None
    tokens = log_forget.shape[-1]
    padded = torch.nn.functional.pad(log_forget.double(), (0, -tokens % chunk))
    totals = padded.unflatten(-1, (-1, chunk)).cumsum(-1)
    return totals.flatten(-2)[..., :tokens].float().contiguous()


def _chunk_ends(log: Tensor, chunk: int) -> Tensor:
    """L at the last token of every token's chunk."""
    tokens = log.shape[-1]
    last = (torch.arange(tokens, device=log.device) // chunk * chunk + chunk - 1).clamp(max=tokens - 1)
    return log[..., last]


def _carry(ends: Tensor, chunk: int) -> Tensor:
    """What is left of the past at the end of each chunk."""
    return ends[..., ::chunk].exp().contiguous()


def _pointers(past: Moments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return past.small, past.high.get(2), past.high.get(3)


def _table(q: Tensor, call: Call) -> Tensor | None:
    return pairs(q.shape[3], q.device) if call.order > 2 else None


def _sizes(q: Tensor, k: Tensor, v: Tensor, rows: Rows, call: Call) -> dict:
    d, e = q.shape[3], v.shape[3]
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "D": d,
        "E": e,
        "BD": width(d),
        "BE": width(e),
        "CHUNK": call.chunk,
        "C": tuple(float(c) for c in call.coefficients),
        "ORDER": call.order,
        "BLOCKS2": blocks(d, 2),
        "BLOCKS3": blocks(d, 3),
        "ROWS": rows.alpha is not None,
        "DECAY": rows.log_forget is not None,
        "BY_SUM": call.divide_by_sum,
        **operand_options(q),
    }


def _tile(kind: str, q: Tensor, v: Tensor, rows: Rows, call: Call) -> dict[str, int]:
    """A tile, which must divide the chunk; products in tf32 and numbers per row take more room."""
    options = tile_options(TILES[kind], q, v, call.chunk)
    if q.dtype != torch.bfloat16:
        return {**options, "BM": min(32, call.chunk), "BN": min(32, call.chunk), "num_warps": 8}
    crowded = rows.alpha is not None or rows.log_forget is not None
    return {**options, "BM": min(64, options["BM"])} if crowded else options
