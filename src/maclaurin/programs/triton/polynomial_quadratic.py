"""Attention whose weights are a polynomial of the score: every pair once, nothing of size T² in memory.

    w_ts = Σ_n c_n s_ts^n, or σ of it,  s = q·k,      y_t = Σ_{s≤t} w_ts v_s / D_t,      D_t = Σ_s w_ts + eps, t, or 1

Unlike softmax, no running maximum is needed: sums are just added up, in fp32. Backward, with dn = dy/D and
dz = −Σ dn∘y (0 unless D is a row sum; rows.py):

    dv_s = Σ_t w_ts dn_t,    ds_ts = (dn_t·v_s + dz_t) w′_ts,    dq = ds K,    dk = dsᵀ Q

With a decay gate, w is multiplied by e^{L_t − L_s}, where L is the running total of ln f (fp64). For different tiles of
queries and keys the factor is split at a token o between them, e^{L_t − L_o} e^{L_o − L_s}: one number per row and one
per column, none above one. The number of a column is the decay to the edge of its tile (computed once,
`_decay_factors`) times the decay from there to o. The gradient of L_t is Σ g w over its row minus Σ g w over its
column, with g = dn·v + dz.

Tensors are [B, T, heads, size]; b batch, h query head, g key-value head, m queries, n keys.

Packed sequences are one row of `total` tokens, and PLACES says which sequence a tile belongs to (packed.py); m, n and T
then count within the sequence. Without PLACES, the compiled program contains none of this.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.launch import MOST_SHAPES, Launch, Layout, launched, prepared
from maclaurin.programs.triton.packed import place_of, places, tiles_of_packed
from maclaurin.programs.triton.rows import quotient_backward
from maclaurin.programs.triton.tiles import (
    Tile,
    add_sum,
    cdiv,
    divisor_of,
    empty_rows,
    load_rows,
    no_sums,
    operand_options,
    store_rows,
    sums_of,
    tile_options,
    width,
)

#: tiles by pass for head sizes up to 64 and up to 128
TILES = {
    "forward": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    "queries": (Tile(64, 64, 4, 3, 168), Tile(128, 64, 8, 3)),
    "keys": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
}
#: whether row sums of bf16 weights are computed as products with ones
SUMS_BY_PRODUCTS = False


class Call(NamedTuple):
    """The non-tensor arguments of a call.

    coefficients    c₀ … c_N of powers of s, the unscaled score
    sigmoid         whether the weight is σ of the polynomial
    divisor         "sum": D = row sum + eps; "count": the number of visible keys; "one"
    narrow          y in bf16, with its rounding error in a second tensor; else in fp32
    """

    coefficients: tuple[float, ...]
    divisor: str
    eps: float
    causal: bool
    sigmoid: bool = False
    narrow: bool = False


@triton.jit
def _weight(s, kept, C: tl.constexpr, SIGMOID: tl.constexpr, DECAY: tl.constexpr, PURE: tl.constexpr):
    """Σ c_n sⁿ by Horner's rule, or σ of it, times the decay `kept`."""
    if PURE:
        w = s * (s * kept)
    else:
        w = tl.full(s.shape, C[len(C) - 1], tl.float32)
        for i in tl.static_range(1, len(C)):
            w = w * s + C[len(C) - 1 - i]
        if SIGMOID:
            w = tl.sigmoid(w)
        if DECAY:
            w *= kept
    return w


@triton.jit
def _slope(s, kept, C: tl.constexpr, SIGMOID: tl.constexpr, DECAY: tl.constexpr, PURE: tl.constexpr):
    """Σ n c_n sⁿ⁻¹, times σ(1 − σ) if the weight is σ, times the decay `kept`; half of that for a pure square."""
    if PURE:
        slope = s * kept
    else:
        slope = tl.zeros(s.shape, tl.float32)
        for i in tl.static_range(0, len(C) - 1):
            slope = slope * s + C[len(C) - 1 - i] * (len(C) - 1 - i)
        if SIGMOID:
            w = _weight(s, kept, C, SIGMOID, False, False)
            slope *= w * (1 - w)
        if DECAY:
            slope *= kept
    return slope


@triton.jit
def _totals(TOTALS, at, n, T, DECAY: tl.constexpr):
    """L of the tokens n; beyond the text, L of its last token."""
    if DECAY:
        totals = tl.load(TOTALS + at + tl.minimum(n, T - 1))
    else:
        totals = n * 0.0
    return totals


@triton.jit
def _kept(of_query, of_key):
    """The decay e^{L_t − L_s}; at most 1, also for masked pairs."""
    return tl.exp(tl.minimum((of_query - of_key).to(tl.float32), 0.0))


@triton.jit
def _kept_of_pairs(of_query, of_key, C: tl.constexpr, DECAY: tl.constexpr, PURE: tl.constexpr):
    """The decay of every pair of a tile, times c₂ for a pure square."""
    if DECAY:
        kept = _kept(of_query, of_key)
        if PURE:
            kept *= C[2]
    else:
        kept = 1.0
    return kept


@triton.jit
def _kept_of_lines(FACTORS, n, later, earlier, C: tl.constexpr, DECAY: tl.constexpr, PURE: tl.constexpr):
    """`_kept_of_pairs` as one number per token n of a tile: the decay to the tile's edge (FACTORS) times the rest."""
    if DECAY:
        kept = tl.load(FACTORS + n) * (_kept(later, earlier) * (C[2] if PURE else 1.0))
    else:
        kept = n * 1.0
    return kept


@launched
@triton.jit
def _decay_factors(TOTALS, KEYS, QUERIES, T, padded, BK: tl.constexpr, BQ: tl.constexpr):
    """e^{L_last − L_s} within each tile of BK keys, and e^{L_t − L_first} within each tile of BQ queries."""
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * 128 + tl.arange(0, 128)
    totals = row * T
    own = _totals(TOTALS, totals, n, T, True)
    last = _totals(TOTALS, totals, n // BK * BK + BK - 1, T, True)
    first = _totals(TOTALS, totals, n // BQ * BQ, T, True)
    tl.store(KEYS + row * padded + n, _kept(last, own))
    tl.store(QUERIES + row * padded + n, _kept(own, first))


@triton.jit
def _add_keys(acc, z, q, k, v, m, n, T, kept, C: tl.constexpr, SIGMOID: tl.constexpr, DECAY: tl.constexpr, PURE: tl.constexpr,
              MASKED: tl.constexpr, CAUSAL: tl.constexpr, ONES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of keys to the sums of a tile of queries."""
    w = _weight(tl.dot(q, tl.trans(k), input_precision=PRECISION), kept, C, SIGMOID, DECAY, PURE)
    if MASKED:
        seen = (n < T)[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= m[:, None])
        w = tl.where(seen, w, 0.0)
    w = w.to(OPERAND)
    z = add_sum(z, w, ONES)  # of the rounded weights, so that those in the product sum to one
    return tl.dot(w, v.to(OPERAND), acc, input_precision=PRECISION), z


@launched
@triton.jit
def _forward(
    Q, K, V, TOTALS, KEPT, Y, REST, Z, PLACES,
    q_strides, k_strides, v_strides, y_strides,
    T, H, padded, eps,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, SIGMOID: tl.constexpr, BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr,
    CAUSAL: tl.constexpr, DECAY: tl.constexpr, PURE: tl.constexpr, NARROW: tl.constexpr, ONES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    y_b, y_t, y_h = y_strides
    first, total = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM, T  # the longest rows first
    if PLACES is not None:
        begin, T, index, _ = place_of(PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0))
        first = index * BM
        Q, K, V = Q + begin * q_t, K + begin * k_t, V + begin * v_t
        Y, Z, REST = Y + begin * y_t, Z + begin, REST + begin * y_t if NARROW else REST
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q = load_rows(Q + b * q_b + h * q_h, q_t, m, d, T, D)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    totals, lines = (b * (H // GROUP) + g) * T, KEPT + (b * (H // GROUP) + g) * padded if DECAY else KEPT
    of_query, origin = _totals(TOTALS, totals, m, T, DECAY), _totals(TOTALS, totals, first, T, DECAY)
    acc = tl.zeros((BM, BE), tl.float32)
    z = no_sums(BM, ONES)
    whole = first // BN * BN if CAUSAL else T // BN * BN  # keys before this need no mask
    end = tl.minimum(first + BM, T) if CAUSAL else T
    for start in range(0, whole, BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(K, k_t, n, d, T, D), load_rows(V, v_t, n, e, T, E)
        of_line = _kept_of_lines(
            lines, n, origin, _totals(TOTALS, totals, start + BN - 1, T, DECAY), C, DECAY, PURE
        )
        acc, z = _add_keys(
            acc, z, q, k, v, m, n, T, of_line[None, :], C, SIGMOID, DECAY, PURE, False, CAUSAL, ONES, OPERAND, PRECISION
        )  # fmt: skip
    if DECAY:
        kept = _kept(of_query, origin)
        acc, z = acc * kept[:, None], z * (kept[:, None] if ONES else kept)
    for start in range(whole, end, BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(K, k_t, n, d, T, D), load_rows(V, v_t, n, e, T, E)
        of_key = _totals(TOTALS, totals, n, T, DECAY)
        of_pair = _kept_of_pairs(of_query[:, None], of_key[None, :], C, DECAY, PURE)
        acc, z = _add_keys(
            acc, z, q, k, v, m, n, T, of_pair, C, SIGMOID, DECAY, PURE, True, CAUSAL, ONES, OPERAND, PRECISION
        )  # fmt: skip
    seen = m + 1 if CAUSAL else m * 0 + T
    divisor = divisor_of(sums_of(z, ONES), seen, eps, BY_SUM, BY_COUNT)
    inside = (m < T)[:, None] & (e < E)[None, :]
    at = b * y_b + h * y_h + m[:, None] * y_t + e[None, :]
    store_rows(Y, REST, at, acc / divisor[:, None], inside, NARROW)
    tl.store(Z + (b * H + h) * total + m, divisor, mask=m < T)


@triton.jit
def _row_sums(DZ, rows, m, T, BY_SUM: tl.constexpr):
    """dz of the rows m."""
    if BY_SUM:
        dz = tl.load(DZ + rows + m, mask=m < T, other=0.0)
    else:
        dz = tl.zeros(m.shape, tl.float32)
    return dz


@triton.jit
def _add_queries(dk, dv, dl, k, v, q, dn, dz, m, n, kept, C: tl.constexpr, SIGMOID: tl.constexpr, BY_SUM: tl.constexpr,
                 DECAY: tl.constexpr, PURE: tl.constexpr, MASKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of queries to the gradients of a tile of keys; tiles are [keys, queries].

    Queries beyond the text have zeros for q, dn and dz and add nothing; gradients of keys beyond it are not stored.
    """
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    w = _weight(s, kept, C, SIGMOID, DECAY, PURE)
    seen = n[:, None] <= m[None, :]
    if MASKED:
        w = tl.where(seen, w, 0.0)
    dv = tl.dot(w.to(OPERAND), dn, dv, input_precision=PRECISION)
    dw = tl.dot(v.to(OPERAND), tl.trans(dn), input_precision=PRECISION)
    if BY_SUM:
        dw += dz[None, :]
    if DECAY:
        dl += tl.sum(w * dw, 1).to(dl.dtype)  # unrounded weights: sums along the text cancel
    ds = dw * _slope(s, kept, C, SIGMOID, DECAY, PURE)
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(OPERAND), q.to(OPERAND), dk, input_precision=PRECISION), dv, dl


@launched
@triton.jit
def _backward_keys(
    Q, K, V, DN, DZ, TOTALS, KEPT, DK, DV, DL, PLACES,
    q_strides, k_strides, v_strides, n_strides, dk_strides, dv_strides,
    T, H, padded,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, SIGMOID: tl.constexpr, BY_SUM: tl.constexpr,
    CAUSAL: tl.constexpr, DECAY: tl.constexpr, PURE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dk_b, dk_t, dk_h = dk_strides
    dv_b, dv_t, dv_h = dv_strides
    first, total = tl.program_id(0) * BN, T
    if PLACES is not None:
        begin, T, index, _ = place_of(PLACES, tl.program_id(0), tl.num_programs(0))
        first = index * BN
        Q, K, V = Q + begin * q_t, K + begin * k_t, V + begin * v_t
        DN, DZ = DN + begin * n_t, DZ + begin if BY_SUM else DZ
        DK, DV = DK + begin * dk_t, DV + begin * dv_t
    kv_heads = H // GROUP
    b, g = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    n = first + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    k = load_rows(K + b * k_b + g * k_h, k_t, n, d, T, D)
    v = load_rows(V + b * v_b + g * v_h, v_t, n, e, T, E)
    totals, lines = (b * kv_heads + g) * T, KEPT + (b * kv_heads + g) * padded if DECAY else KEPT
    of_key, origin = _totals(TOTALS, totals, n, T, DECAY), _totals(TOTALS, totals, first + BN - 1, T, DECAY)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    dl = tl.zeros((BN,), of_key.dtype)
    begin = first // BM * BM if CAUSAL else 0
    whole = tl.cdiv(first + BN, BM) * BM if CAUSAL else 0  # from here on, queries see the whole tile
    for member in range(GROUP):
        h = g * GROUP + member
        q_at, dn_at, rows = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h, (b * H + h) * total
        for start in range(whole, T, BM):
            m = start + tl.arange(0, BM)
            q, dn = load_rows(q_at, q_t, m, d, T, D), load_rows(dn_at, n_t, m, e, T, E)
            dz = _row_sums(DZ, rows, m, T, BY_SUM)
            of_line = _kept_of_lines(
                lines, m, _totals(TOTALS, totals, start, T, DECAY), origin, C, DECAY, PURE
            )
            dk, dv, dl = _add_queries(
                dk, dv, dl, k, v, q, dn, dz, m, n, of_line[None, :], C, SIGMOID, BY_SUM, DECAY, PURE, False, OPERAND, PRECISION
            )  # fmt: skip
    if DECAY:
        kept = _kept(origin, of_key)
        dk, dv, dl = dk * kept[:, None], dv * kept[:, None], dl * kept
    for member in range(GROUP):
        h = g * GROUP + member
        q_at, dn_at, rows = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h, (b * H + h) * total
        for start in range(begin, tl.minimum(whole, T), BM):
            m = start + tl.arange(0, BM)
            q, dn = load_rows(q_at, q_t, m, d, T, D), load_rows(dn_at, n_t, m, e, T, E)
            dz, of_query = _row_sums(DZ, rows, m, T, BY_SUM), _totals(TOTALS, totals, m, T, DECAY)
            of_pair = _kept_of_pairs(of_query[None, :], of_key[:, None], C, DECAY, PURE)
            dk, dv, dl = _add_queries(
                dk, dv, dl, k, v, q, dn, dz, m, n, of_pair, C, SIGMOID, BY_SUM, DECAY, PURE, True, OPERAND, PRECISION
            )  # fmt: skip
    if PURE:
        dk *= 2
    inside_d = (n < T)[:, None] & (d < D)[None, :]
    inside_e = (n < T)[:, None] & (e < E)[None, :]
    tl.store(
        DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :], dk.to(DK.dtype.element_ty), mask=inside_d
    )
    tl.store(
        DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :], dv.to(DV.dtype.element_ty), mask=inside_e
    )
    if DECAY:
        tl.store(DL + totals + n, dl, mask=n < T)


@triton.jit
def _add_keys_to_query(dq, dl, q, dn, dz, k, v, m, n, kept, C: tl.constexpr, SIGMOID: tl.constexpr, BY_SUM: tl.constexpr,
                       DECAY: tl.constexpr, PURE: tl.constexpr, MASKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of keys to the gradient of a tile of queries; keys beyond the text are zeros and add nothing."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dw = tl.dot(dn, tl.trans(v.to(OPERAND)), input_precision=PRECISION)
    if BY_SUM:
        dw += dz[:, None]
    if MASKED:
        dw = tl.where(n[None, :] <= m[:, None], dw, 0.0)
    ds = dw * _slope(s, kept, C, SIGMOID, DECAY, PURE)
    if PURE:
        dl += tl.sum(ds * s, 1).to(dl.dtype)
    elif DECAY:
        dl += tl.sum(dw * _weight(s, kept, C, SIGMOID, DECAY, PURE), 1).to(dl.dtype)
    return tl.dot(ds.to(OPERAND), k.to(OPERAND), dq, input_precision=PRECISION), dl


@launched
@triton.jit
def _backward_queries(
    Q, K, V, DN, DZ, TOTALS, KEPT, DQ, DL, PLACES,
    q_strides, k_strides, v_strides, n_strides, dq_strides,
    T, H, padded,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, SIGMOID: tl.constexpr, BY_SUM: tl.constexpr,
    CAUSAL: tl.constexpr, DECAY: tl.constexpr, PURE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dq_b, dq_t, dq_h = dq_strides
    first, total = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM, T
    if PLACES is not None:
        begin, T, index, _ = place_of(PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0))
        first = index * BM
        Q, K, V = Q + begin * q_t, K + begin * k_t, V + begin * v_t
        DN, DZ, DQ = DN + begin * n_t, DZ + begin if BY_SUM else DZ, DQ + begin * dq_t
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q = load_rows(Q + b * q_b + h * q_h, q_t, m, d, T, D)
    dn = load_rows(DN + b * n_b + h * n_h, n_t, m, e, T, E)
    dz = _row_sums(DZ, (b * H + h) * total, m, T, BY_SUM)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    totals, lines = (b * (H // GROUP) + g) * T, KEPT + (b * (H // GROUP) + g) * padded if DECAY else KEPT
    of_query, origin = _totals(TOTALS, totals, m, T, DECAY), _totals(TOTALS, totals, first, T, DECAY)
    dq = tl.zeros((BM, BD), tl.float32)
    dl = tl.zeros((BM,), of_query.dtype)
    whole = first // BN * BN if CAUSAL else T
    end = tl.minimum(first + BM, T) if CAUSAL else T
    for start in range(0, whole, BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(K, k_t, n, d, T, D), load_rows(V, v_t, n, e, T, E)
        of_line = _kept_of_lines(
            lines, n, origin, _totals(TOTALS, totals, start + BN - 1, T, DECAY), C, DECAY, PURE
        )
        dq, dl = _add_keys_to_query(
            dq, dl, q, dn, dz, k, v, m, n, of_line[None, :], C, SIGMOID, BY_SUM, DECAY, PURE, False, OPERAND, PRECISION
        )  # fmt: skip
    if DECAY:
        kept = _kept(of_query, origin)
        dq, dl = dq * kept[:, None], dl * kept
    for start in range(whole, end, BN):
        n = start + tl.arange(0, BN)
        k, v = load_rows(K, k_t, n, d, T, D), load_rows(V, v_t, n, e, T, E)
        of_key = _totals(TOTALS, totals, n, T, DECAY)
        of_pair = _kept_of_pairs(of_query[:, None], of_key[None, :], C, DECAY, PURE)
        dq, dl = _add_keys_to_query(
            dq, dl, q, dn, dz, k, v, m, n, of_pair, C, SIGMOID, BY_SUM, DECAY, PURE, True, OPERAND, PRECISION
        )  # fmt: skip
    if PURE:
        dq *= 2
    inside = (m < T)[:, None] & (d < D)[None, :]
    tl.store(
        DQ + b * dq_b + h * dq_h + m[:, None] * dq_t + d[None, :], dq.to(DQ.dtype.element_ty), mask=inside
    )
    if DECAY:
        tl.store(DL + (b * H + h) * T + m, dl, mask=m < T)


# ------------------------------------------------------------------------------------ launching


class _Forward(NamedTuple):
    """The launch of a forward pass, and its tile."""

    start: Launch
    queries: int
    keys: int


@lru_cache(maxsize=MOST_SHAPES)
def _forward_launch(
    q: Layout, k: Layout, v: Layout, call: Call, tiles: tuple[Tile, Tile], decays: bool, sequences: int
) -> _Forward:
    batch, tokens, heads, _ = q.shape
    tile = _tile(tiles, q, v, tokens)
    y = Layout.contiguous((*q.shape[:3], v.shape[3]), torch.float32)
    numbers = (
        q.strides[:3], k.strides[:3], v.strides[:3], y.strides[:3], tokens, heads, _padded(tokens) if decays else 0, call.eps
    )  # fmt: skip
    options = {
        **_sizes(q, k, v),
        **tile,
        "C": call.coefficients,
        "SIGMOID": call.sigmoid,
        "BY_SUM": call.divisor == "sum",
        "BY_COUNT": call.divisor == "count",
        "CAUSAL": call.causal,
        "DECAY": decays,
        "PURE": _is_pure(call, decays),
        "NARROW": call.narrow,
        "ONES": SUMS_BY_PRODUCTS and q.dtype == torch.bfloat16,
    }
    grid = _tiles(tokens, tile["BM"], sequences), batch * heads
    start = prepared(_forward, grid, numbers, options)
    return _Forward(start, tile["BM"], tile["BN"])


@on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, totals: Tensor | None = None, cuts: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y [B, T, H, e], its rounding error (dz = −Σ dn∘y needs the unrounded y), and D [B, H, T].

    `totals` [B, K, T] in fp64 are running totals of the log decay gate, for causal calls. `cuts` [n + 1] are the cuts
    of sequences packed into one row (B = 1), which have no decay gate.
    """
    batch, tokens, heads, _ = q.shape
    given = Layout.of(q), Layout.of(k), Layout.of(v)
    launch = _forward_launch(*given, call, TILES["forward"], totals is not None, _sequences(cuts))
    y, rest = empty_rows(q, v, call.narrow)
    z = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    kept = None if totals is None else _factors(totals, launch.keys, launch.queries)[0]
    of_tiles = None if cuts is None else places(cuts, tokens, launch.queries)
    launch.start(q, k, v, totals, kept, y, rest, z, of_tiles)
    return y, rest, z


@on_its_device
def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    rest: Tensor | None,
    z: Tensor,
    call: Call,
    totals: Tensor | None = None,
    cuts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the dtypes of q, k, v, and the gradient of the totals in fp64."""
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    dn, dz = quotient_backward(dy, y, rest, z, v, by_sum=call.divisor == "sum")
    dq, dk, dv = (torch.empty(u.shape, dtype=u.dtype, device=u.device) for u in (q, k, v))
    common = {
        **_sizes(q, k, v),
        "C": call.coefficients,
        "SIGMOID": call.sigmoid,
        "BY_SUM": call.divisor == "sum",
        "CAUSAL": call.causal,
        "DECAY": totals is not None,
        "PURE": _is_pure(call, totals is not None),
    }
    of_rows = of_keys = None
    if totals is not None:
        of_rows = torch.empty(batch, heads, tokens, dtype=torch.float64, device=q.device)
        of_keys = torch.empty_like(totals)
    strides = (q.stride()[:3], k.stride()[:3], v.stride()[:3], dn.stride()[:3])
    of_key_tiles, of_query_tiles = (_tile(TILES[kind], q, v, tokens) for kind in ("keys", "queries"))
    kept_keys = kept_queries = None
    if totals is not None:
        kept_keys, kept_queries = _factors(totals, of_query_tiles["BN"], of_key_tiles["BM"])
    padded = 0 if totals is None else _padded(tokens)
    sequences, key_tile, query_tile = _sequences(cuts), of_key_tiles["BN"], of_query_tiles["BM"]
    found = {} if cuts is None else {size: places(cuts, tokens, size) for size in {key_tile, query_tile}}
    _backward_keys[(_tiles(tokens, key_tile, sequences), batch * kv_heads)](
        q, k, v, dn, dz, totals, kept_queries, dk, dv, of_keys, found.get(key_tile), *strides, dk.stride()[:3], dv.stride()[:3],
        tokens, heads, padded, **common, **of_key_tiles,
    )  # fmt: skip
    _backward_queries[(_tiles(tokens, query_tile, sequences), batch * heads)](
        q, k, v, dn, dz, totals, kept_keys, dq, of_rows, found.get(query_tile), *strides, dq.stride()[:3],
        tokens, heads, padded, **common, **of_query_tiles,
    )  # fmt: skip
    if of_rows is None or of_keys is None:
        return dq, dk, dv, None
    return dq, dk, dv, of_rows.unflatten(1, (kv_heads, -1)).sum(2) - of_keys


def _sequences(cuts: Tensor | None) -> int:
    return 0 if cuts is None else cuts.numel() - 1


def _tiles(tokens: int, size: int, sequences: int) -> int:
    """The number of tiles of a row, or of all sequences packed into it."""
    return tiles_of_packed(tokens, sequences, size) if sequences else cdiv(tokens, size)


def _tile(tiles: tuple[Tile, Tile], q: Tensor | Layout, v: Tensor | Layout, tokens: int) -> dict[str, int]:
    """The tile of a pass; smaller for fp32 and for fp16 (partly computed in fp32), which take more shared memory."""
    options = tile_options(tiles, q, v, tokens)
    if q.dtype == torch.bfloat16:
        return options
    options.pop("maxnreg", None)
    return options | {"BM": min(64, options["BM"]), "BN": min(32, options["BN"]), "num_warps": 8}


def _sizes(q: Tensor | Layout, k: Tensor | Layout, v: Tensor | Layout) -> dict[str, Any]:
    d, e = q.shape[3], v.shape[3]
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "D": d,
        "E": e,
        "BD": width(d),
        "BE": width(e),
        **operand_options(q),  # weights and score gradients may leave the range of fp16
    }


def _padded(tokens: int) -> int:
    return cdiv(tokens, 128) * 128


def _factors(totals: Tensor, keys: int, queries: int) -> tuple[Tensor, Tensor]:
    """The decay from each key to the end of its tile, and from the start of its tile to each query, [B·K, padded]."""
    batch, heads, tokens = totals.shape
    padded = _padded(tokens)
    found = torch.empty(2, batch * heads, padded, dtype=torch.float32, device=totals.device)
    _decay_factors[(padded // 128, batch * heads)](
        totals, found[0], found[1], tokens, padded, BK=keys, BQ=queries, num_warps=4
    )
    return found[0], found[1]


def _is_pure(call: Call, decays: bool) -> bool:
    """Whether weights are c₂ s² times a decay, which takes fewer multiplications."""
    return decays and not call.sigmoid and len(call.coefficients) == 3 and not any(call.coefficients[:2])
