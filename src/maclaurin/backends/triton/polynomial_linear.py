"""Attention with a polynomial of order ≤ 2 for a weight, in time linear in the text.

    w_ts = c₀ + c₁ s + c₂ s²,  s = q·k,      y_t = Σ_{s≤t} w_ts v_s / D_t,      D_t = Σ_s w_ts + eps, or t

The text is cut into chunks. Each chunk's moments Σ φ(k) [v, 1]ᵀ are found (states), added up over the
chunks before it (scan), and read by its queries, which see the keys of their own chunk pair by pair (read).

Second-order features k_a k_b are made in registers, tile by tile: a and b run over tiles i ≤ j of 16
entries, so that of the d² products only about half are kept; a pair i < j counts twice where it is read.
The moments of one chunk lie in one row of F × E numbers:

    [tiles (i, j), 256 rows each | k, D rows | 1, one row]

Backward, with dn = dy/D and dz = −Σ dy∘y / D: the same moments of (q, dn, dz), added up over the chunks
after, are what keys and values read; gradients with respect to q and k are products of q ⊗ dn (or k ⊗ v)
with the same moments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.backends.triton.polynomial_quadratic import Call, _polynomial, _slope
from maclaurin.backends.triton.tiles import load_rows, precision, width

TILE = 16


@triton.jit
def _pair(i, j, TILES: tl.constexpr):
    """Place of the pair of tiles i ≤ j among all pairs, row by row."""
    return i * TILES - i * (i - 1) // 2 + j - i


@triton.jit
def _columns(pointer, stride_t, rows, first, T, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] entries from column `first` on, zeros beyond T and SIZE."""
    columns = first + tl.arange(0, WIDTH)
    inside = (rows < T)[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] * stride_t + columns[None, :], mask=inside, other=0.0)


# --------------------------------------------------------------------------- moments of a chunk


@triton.jit
def _second_moments(
    K, V, W, M, Z,
    k_b, k_t, k_h, v_b, v_t, v_h,
    T, H, chunks,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    TILES: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_s k_a k_b v_s and Σ_s k_a k_b ω_s over a chunk, for one pair of tiles."""
    pair, c = tl.program_id(0), tl.program_id(1)
    b, h = (tl.program_id(2) // H).to(tl.int64), (tl.program_id(2) % H).to(tl.int64)
    i = 0
    while _pair(i + 1, i + 1, TILES) <= pair:
        i += 1
    j = pair - _pair(i, i, TILES) + i
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    e = tl.arange(0, BE)
    acc = tl.zeros((256, BE), tl.float32)
    z = tl.zeros((256,), tl.float32)
    for start in range(c * CHUNK, tl.minimum((c + 1) * CHUNK, T), BN):
        n = start + tl.arange(0, BN)
        first = tl.trans(_columns(K, k_t, n, i * 16, T, D, 16))
        second = tl.trans(_columns(K, k_t, n, j * 16, T, D, 16))
        products = first.to(tl.float32)[:, None, :] * second.to(tl.float32)[None, :, :]
        features = tl.reshape(products, (256, BN))
        v = load_rows(V, v_t, n, e, T, E)
        acc = tl.dot(features.to(v.dtype), v, acc, input_precision=PRECISION)
        if WEIGHTED:
            weight = tl.load(W + (b * H + h) * T + n, mask=n < T, other=0.0)
            z += tl.sum(features * weight[None, :], 1)
        else:
            z += tl.sum(features, 1)
    at = ((b * H + h) * chunks + c) * F + pair * 256 + tl.arange(0, 256)
    tl.store(M + at[:, None] * E + e[None, :], acc, mask=(e < E)[None, :])
    tl.store(Z + at, z)


@triton.jit
def _low_moments(
    K, V, W, M, Z,
    k_b, k_t, k_h, v_b, v_t, v_h,
    T, H, chunks,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, BN: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ k vᵀ, Σ v and Σ k ω, Σ ω over a chunk: the last D + 1 rows of its moments."""
    c = tl.program_id(0)
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    first = tl.zeros((BD, BE), tl.float32)
    z_first = tl.zeros((BD,), tl.float32)
    zeroth = tl.zeros((BE,), tl.float32)
    z_zeroth = tl.zeros((BN,), tl.float32)
    for start in range(c * CHUNK, tl.minimum((c + 1) * CHUNK, T), BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(K, k_t, n, d, T, D), load_rows(V, v_t, n, e, T, E)
        if WEIGHTED:
            weight = tl.load(W + (b * H + h) * T + n, mask=n < T, other=0.0)
        else:
            weight = tl.where(n < T, 1.0, 0.0)
        first = tl.dot(tl.trans(k), v, first, input_precision=PRECISION)
        z_first += tl.sum(k.to(tl.float32) * weight[:, None], 0)
        zeroth += tl.sum(v.to(tl.float32), 0)
        z_zeroth += weight
    at = ((b * H + h) * chunks + c) * F + F - D - 1
    tl.store(M + (at + d)[:, None] * E + e[None, :], first, mask=(d < D)[:, None] & (e < E)[None, :])
    tl.store(Z + at + d, z_first, mask=d < D)
    tl.store(M + (at + D) * E + e, zeroth, mask=e < E)
    tl.store(Z + at + D, tl.sum(z_zeroth, 0))


# ------------------------------------------------------------------------------ sums over chunks


@triton.jit
def _scan(M, OUT, chunks, SIZE, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """What lies before each chunk (after it, if REVERSE): exclusive sums along the chunks of one head."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64) * chunks
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(chunks):
        c = chunks - 1 - step if REVERSE else step
        place = (row + c) * SIZE + at
        tl.store(OUT + place, total.to(OUT.dtype.element_ty), mask=at < SIZE)
        total += tl.load(M + place, mask=at < SIZE, other=0.0)


# ------------------------------------------------------------------------------------ reading


@triton.jit
def _read_second(acc, z, q_at, q_t, m, M, Z, at, T, c2, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
                 TILES: tl.constexpr, BM: tl.constexpr, WITH_Z: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """c₂ Σ_ab q_a q_b M_ab, for all pairs of tiles."""
    e = tl.arange(0, BE)
    f = tl.arange(0, 256)
    for i in range(TILES):
        left = _columns(q_at, q_t, m, i * 16, T, D, 16).to(tl.float32)
        for j in range(i, TILES):
            right = _columns(q_at, q_t, m, j * 16, T, D, 16).to(tl.float32)
            factor = tl.where(i == j, c2, 2 * c2)
            features = tl.reshape((left * factor)[:, :, None] * right[:, None, :], (BM, 256))
            rows = at + _pair(i, j, TILES) * 256 + f
            moments = tl.load(M + rows[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0)
            acc = tl.dot(features.to(moments.dtype), moments, acc, input_precision=PRECISION)
            if WITH_Z:
                z += tl.sum(features * tl.load(Z + rows)[None, :], 1)
    return acc, z


@triton.jit
def _forward(
    Q, K, V, M, Z, Y, DIVISOR,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, y_b, y_t, y_h,
    T, H, chunks, eps,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    TILES: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr, BY_SUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    chunk = first // CHUNK
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q_at = Q + b * q_b + h * q_h
    q = load_rows(q_at, q_t, m, d, T, D)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    at = ((b * (H // GROUP) + g) * chunks + chunk) * F
    low = at + F - D - 1
    acc = tl.zeros((BM, BE), tl.float32)
    z = tl.zeros((BM,), tl.float32)
    if chunk > 0:
        inside = (d < D)[:, None] & (e < E)[None, :]
        moments = tl.load(M + (low + d)[:, None] * E + e[None, :], mask=inside, other=0.0)
        acc = tl.dot((q * C[1]).to(moments.dtype), moments, acc, input_precision=PRECISION)
        acc += C[0] * tl.load(M + (low + D) * E + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
        z_first = tl.load(Z + low + d, mask=d < D, other=0.0)
        z += C[1] * tl.sum(q.to(tl.float32) * z_first[None, :], 1) + C[0] * tl.load(Z + low + D)
        if TILES > 0:
            acc, z = _read_second(acc, z, q_at, q_t, m, M, Z, at, T, C[2], D, E, BE, TILES, BM, BY_SUM,
                                  PRECISION)  # fmt: skip
    for start in range(chunk * CHUNK, tl.minimum(first + BM, T), BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(K, k_t, n, d, T, D), load_rows(V, v_t, n, e, T, E)
        w = _polynomial(tl.dot(q, tl.trans(k), input_precision=PRECISION), C)
        w = tl.where((n[None, :] <= m[:, None]) & (n < T)[None, :], w, 0.0).to(v.dtype)
        z += tl.sum(w.to(tl.float32), 1)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    divisor = z + eps if BY_SUM else (m + 1).to(tl.float32)
    divisor = tl.where(divisor == 0, 1.0, divisor)
    inside = (m < T)[:, None] & (e < E)[None, :]
    tl.store(Y + b * y_b + h * y_h + m[:, None] * y_t + e[None, :], acc / divisor[:, None], mask=inside)
    tl.store(DIVISOR + (b * H + h) * T + m, divisor, mask=m < T)


@triton.jit
def _contract_second(acc, x_at, x_t, g_at, g_t, rows, M, at, T, D: tl.constexpr, E: tl.constexpr,
                     BD: tl.constexpr, BE: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr,
                     STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Σ_{b,e} x_b g_e M_abe [rows, a]: products of x ⊗ g with the moments, unfolded to all (a, b)."""
    a, e = tl.arange(0, BD), tl.arange(0, BE)
    g = load_rows(g_at, g_t, rows, e, T, E).to(tl.float32)
    i = a // 16
    for start in range(0, TILES * 16, STEP):
        b = start + tl.arange(0, STEP)
        j = b // 16
        x = _columns(x_at, x_t, rows, start, T, D, STEP).to(tl.float32)
        features = tl.reshape(x[:, :, None] * g[:, None, :], (BM, STEP * BE))
        low, high = tl.minimum(i[None, :], j[:, None]), tl.maximum(i[None, :], j[:, None])
        straight = i[None, :] <= j[:, None]
        inner = tl.where(
            straight, a[None, :] % 16 * 16 + b[:, None] % 16, b[:, None] % 16 * 16 + a[None, :] % 16
        )
        place = at + _pair(low, high, TILES) * 256 + inner  # [b, a]
        where = place[:, None, :] * E + e[None, :, None]  # [b, e, a]
        inside = (a < D)[None, None, :] & (b < D)[:, None, None] & (e < E)[None, :, None]
        moments = tl.load(M + where, mask=inside, other=0.0)
        moments = tl.reshape(moments, (STEP * BE, BD))
        acc = tl.dot(features.to(moments.dtype), moments, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _times_second_sums(x_at, x_t, rows, Z, at, T, D: tl.constexpr, BD: tl.constexpr, TILES: tl.constexpr,
                       BM: tl.constexpr):  # fmt: skip
    """Σ_b x_b Z_ab [rows, a] in fp32."""
    a = tl.arange(0, BD)
    i = a // 16
    total = tl.zeros((BM, BD), tl.float32)
    for j in range(TILES):
        b = j * 16 + tl.arange(0, 16)
        x = _columns(x_at, x_t, rows, j * 16, T, D, 16).to(tl.float32)
        low, high = tl.minimum(i, j), tl.maximum(i, j)
        straight = (i <= j)[None, :]
        inner = tl.where(
            straight, a[None, :] % 16 * 16 + b[:, None] % 16, b[:, None] % 16 * 16 + a[None, :] % 16
        )
        place = at + _pair(low, high, TILES)[None, :] * 256 + inner
        sums = tl.load(Z + place, mask=(a < D)[None, :] & (b < D)[:, None], other=0.0)
        total = tl.dot(x, sums, total, input_precision="ieee")
    return total


@triton.jit
def _backward_queries(
    Q, K, V, DN, DZ, M, Z, DQ,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n_b, n_t, n_h, dq_b, dq_t, dq_h,
    T, H, chunks,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    TILES: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STEP: tl.constexpr, C: tl.constexpr, BY_SUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq_t = Σ_{s≤t} (dn_t·v_s + dz_t) w′_ts k_s."""
    first = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    chunk = first // CHUNK
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q_at, dn_at = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h
    q, dn = load_rows(q_at, q_t, m, d, T, D), load_rows(dn_at, n_t, m, e, T, E)
    dz = tl.load(DZ + (b * H + h) * T + m, mask=m < T, other=0.0)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    at = ((b * (H // GROUP) + g) * chunks + chunk) * F
    low = at + F - D - 1
    dq = tl.zeros((BM, BD), tl.float32)
    if chunk > 0:
        if TILES > 0:
            dq = _contract_second(dq, q_at, q_t, dn_at, n_t, m, M, at, T, D, E, BD, BE, TILES, BM, STEP,
                                  PRECISION)  # fmt: skip
            if BY_SUM:
                dq += dz[:, None] * _times_second_sums(q_at, q_t, m, Z, at, T, D, BD, TILES, BM)
            dq *= 2 * C[2]
        inside = (d < D)[None, :] & (e < E)[:, None]
        moments = tl.load(M + (low + d)[None, :] * E + e[:, None], mask=inside, other=0.0)
        dq += C[1] * tl.dot(dn.to(moments.dtype), moments, input_precision=PRECISION)
        if BY_SUM:
            dq += C[1] * dz[:, None] * tl.load(Z + low + d, mask=d < D, other=0.0)[None, :]
    for start in range(chunk * CHUNK, tl.minimum(first + BM, T), BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(K, k_t, n, d, T, D), load_rows(V, v_t, n, e, T, E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        ds = (tl.dot(dn, tl.trans(v), input_precision=PRECISION) + dz[:, None]) * _slope(s, C)
        ds = tl.where((n[None, :] <= m[:, None]) & (n < T)[None, :], ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    inside = (m < T)[:, None] & (d < D)[None, :]
    tl.store(
        DQ + b * dq_b + h * dq_h + m[:, None] * dq_t + d[None, :], dq.to(DQ.dtype.element_ty), mask=inside
    )


@triton.jit
def _backward_keys(
    Q, K, V, DN, DZ, M, Z, DK, DV,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, n_b, n_t, n_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
    T, H, chunks,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    TILES: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STEP: tl.constexpr, C: tl.constexpr, BY_SUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv_s = Σ_{t≥s} w_ts dn_t,  dk_s = Σ_{t≥s} (dn_t·v_s + dz_t) w′_ts q_t; one key-value head, its whole group.

    M and Z hold the moments of (q, dn, dz) over later chunks, summed over the group.
    """
    first = tl.program_id(0) * BN
    kv_heads = H // GROUP
    b, g = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    chunk = first // CHUNK
    n = first + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    k, v = load_rows(k_at, k_t, n, d, T, D), load_rows(v_at, v_t, n, e, T, E)
    at = ((b * kv_heads + g) * chunks + chunk) * F
    low = at + F - D - 1
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    if chunk < chunks - 1:
        unused = tl.zeros((BN,), tl.float32)
        if TILES > 0:
            dk = _contract_second(dk, k_at, k_t, v_at, v_t, n, M, at, T, D, E, BD, BE, TILES, BN, STEP,
                                  PRECISION)  # fmt: skip
            if BY_SUM:
                dk += _times_second_sums(k_at, k_t, n, Z, at, T, D, BD, TILES, BN)
            dk *= 2 * C[2]
            dv, unused = _read_second(dv, unused, k_at, k_t, n, M, Z, at, T, C[2], D, E, BE, TILES, BN, False,
                                      PRECISION)  # fmt: skip
        inside = (d < D)[:, None] & (e < E)[None, :]
        moments = tl.load(M + (low + d)[:, None] * E + e[None, :], mask=inside, other=0.0)
        dv = tl.dot((k * C[1]).to(moments.dtype), moments, dv, input_precision=PRECISION)
        dv += C[0] * tl.load(M + (low + D) * E + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
        dk += C[1] * tl.dot(v.to(moments.dtype), tl.trans(moments), input_precision=PRECISION)
        if BY_SUM:
            dk += C[1] * tl.load(Z + low + d, mask=d < D, other=0.0)[None, :]
    for member in range(GROUP):
        h = g * GROUP + member
        q_at, dn_at = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h
        for start in range(first // BM * BM, tl.minimum((chunk + 1) * CHUNK, T), BM):
            m = start + tl.arange(0, BM)
            q, dn = load_rows(q_at, q_t, m, d, T, D), load_rows(dn_at, n_t, m, e, T, E)
            dz = tl.load(DZ + (b * H + h) * T + m, mask=m < T, other=0.0)
            seen = (n[:, None] <= m[None, :]) & (m < T)[None, :]
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            w = tl.where(seen, _polynomial(s, C), 0.0)
            dv = tl.dot(w.to(dn.dtype), dn, dv, input_precision=PRECISION)
            ds = (tl.dot(v, tl.trans(dn), input_precision=PRECISION) + dz[None, :]) * _slope(s, C)
            ds = tl.where(seen, ds, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    inside_d, inside_e = (n < T)[:, None] & (d < D)[None, :], (n < T)[:, None] & (e < E)[None, :]
    tl.store(
        DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :], dk.to(DK.dtype.element_ty), mask=inside_d
    )
    tl.store(
        DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :], dv.to(DV.dtype.element_ty), mask=inside_e
    )


# ------------------------------------------------------------------------------------ launching


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, chunk: int) -> tuple[Tensor, Tensor]:
    """y [B, T, H, e] and D [B, H, T] in fp32, causal."""
    batch, tokens, heads, _ = q.shape
    moments, sums = _summed_moments(k, v, None, call, chunk, reverse=False, group=1)
    y = torch.empty(batch, tokens, heads, v.shape[3], dtype=torch.float32, device=q.device)
    divisor = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    tile = _tiles(q, v, chunk, 128, 64)
    _forward[(triton.cdiv(tokens, tile["BM"]), batch * heads)](
        q, k, v, moments, sums, y, divisor,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *y.stride()[:3],
        tokens, heads, _chunks(tokens, chunk), call.eps,
        **_sizes(q, k, v, call, chunk), **tile, BY_SUM=call.divide_by_sum,
    )  # fmt: skip
    return y, divisor


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, divisor: Tensor, call: Call, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the dtypes of q, k, v. Moments are made again rather than kept."""
    batch, tokens, heads, _ = q.shape
    kv_heads, chunks = k.shape[2], _chunks(tokens, chunk)
    scale = 1 / divisor.transpose(1, 2)[..., None]
    dz = (-(dy * y).sum(-1, keepdim=True) * scale)[..., 0].transpose(1, 2).contiguous()
    if not call.divide_by_sum:
        dz = torch.zeros_like(dz)
    dn = (dy * scale).to(v.dtype)
    dq, dk, dv = (torch.empty(u.shape, dtype=u.dtype, device=u.device) for u in (q, k, v))
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dn.stride()[:3])
    sizes = {**_sizes(q, k, v, call, chunk), "BY_SUM": call.divide_by_sum}
    sizes["STEP"] = 256 // sizes["BE"]
    tile = _tiles(q, v, chunk, 64, 64)
    moments, sums = _summed_moments(k, v, None, call, chunk, reverse=False, group=1)
    _backward_queries[(triton.cdiv(tokens, tile["BM"]), batch * heads)](
        q, k, v, dn, dz, moments, sums, dq, *strides, *dq.stride()[:3], tokens, heads, chunks, **sizes, **tile
    )
    moments, sums = _summed_moments(q, dn, dz, call, chunk, reverse=True, group=heads // kv_heads)
    _backward_keys[(triton.cdiv(tokens, tile["BN"]), batch * kv_heads)](
        q, k, v, dn, dz, moments, sums, dk, dv, *strides, *dk.stride()[:3], *dv.stride()[:3],
        tokens, heads, chunks, **sizes, **tile,
    )  # fmt: skip
    return dq, dk, dv


def _summed_moments(
    k: Tensor, v: Tensor, weights: Tensor | None, call: Call, chunk: int, *, reverse: bool, group: int
) -> tuple[Tensor, Tensor]:
    """Moments [B·K, chunks, F, E] of (k, [v, ω]) before each chunk (after it), summed over groups of heads."""
    batch, tokens, heads, d = k.shape
    e, chunks = v.shape[3], _chunks(tokens, chunk)
    sizes = _sizes(k, k, v, call, chunk)
    features, tiles = sizes["F"], sizes["TILES"]
    moments = torch.empty(batch * heads, chunks, features, e, dtype=torch.float32, device=k.device)
    sums = torch.empty(batch * heads, chunks, features, dtype=torch.float32, device=k.device)
    shape = {name: sizes[name] for name in ("D", "E", "BE", "F", "CHUNK", "PRECISION")}
    wide = max(d, e) > 64
    options = {**shape, "BN": min(64, chunk), "WEIGHTED": weights is not None, "num_warps": 8 if wide else 4}
    arguments = (
        k, v, weights, moments, sums, *k.stride()[:3], *v.stride()[:3], tokens, heads, chunks,
    )  # fmt: skip
    if tiles:
        pairs = tiles * (tiles + 1) // 2
        _second_moments[(pairs, chunks, batch * heads)](*arguments, **options, TILES=tiles)
    _low_moments[(chunks, batch * heads)](*arguments, **options, BD=sizes["BD"])
    if group > 1:
        moments, sums = (u.unflatten(0, (-1, group)).sum(1) for u in (moments, sums))
    kept = torch.float32 if k.dtype == torch.float16 else k.dtype  # sums outgrow fp16
    return _exclusive(moments, kept, reverse), _exclusive(sums, torch.float32, reverse)


def _exclusive(moments: Tensor, dtype: torch.dtype, reverse: bool) -> Tensor:
    rows, chunks, size = moments.shape[0], moments.shape[1], moments[0, 0].numel()
    out = torch.empty_like(moments, dtype=dtype)
    block = 1024
    _scan[(triton.cdiv(size, block), rows)](moments, out, chunks, size, REVERSE=reverse, BLOCK=block)
    return out


def _chunks(tokens: int, chunk: int) -> int:
    return -(-tokens // chunk)


def _sizes(q: Tensor, k: Tensor, v: Tensor, call: Call, chunk: int) -> dict:
    d, e = q.shape[3], v.shape[3]
    coefficients = (*(float(c) for c in call.coefficients), 0.0, 0.0)[:3]
    tiles = -(-d // TILE) if coefficients[2] else 0
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "D": d,
        "E": e,
        "BD": width(d),
        "BE": width(e),
        "TILES": tiles,
        "F": tiles * (tiles + 1) // 2 * TILE * TILE + d + 1,
        "CHUNK": chunk,
        "C": coefficients,
        "PRECISION": precision(q),
    }


def _tiles(q: Tensor, v: Tensor, chunk: int, queries: int, keys: int) -> dict[str, int]:
    """Tile sizes, which must divide the chunk."""
    wide = max(q.shape[3], v.shape[3]) > 64
    if q.dtype == torch.float32:
        queries, keys = 32, 32
    return {"BM": min(queries, chunk), "BN": min(keys, chunk), "num_warps": 8 if wide else 4, "num_stages": 2}
