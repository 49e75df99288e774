"""Attention whose weights are a polynomial of the score: every pair once, nothing of size T² in memory.

    w_ts = Σ_n c_n s_ts^n, or σ of it,  s = q·k,      y_t = Σ_{s≤t} w_ts v_s / D_t,      D_t = Σ_s w_ts + eps, t, or 1

Unlike softmax, no running maximum is needed: sums are just added up, in fp32. Backward, with dn = dy/D and
dz = −Σ dn∘y (0 unless D is a row sum; rows.py):

    dv_s = Σ_t w_ts dn_t,    ds_ts = (dn_t·v_s + dz_t) w′_ts,    dq = ds K,    dk = dsᵀ Q

Weights and slopes are computed up to a constant, which multiplies finished sums (`_Form`). Where the series of exp ends at
order 2 or 4, both take fewer operations than by Horner's rule, with x = as and u = s + 1/a:

    1 + x + x²/2 = a²/2 (u² + 1/a²),                                      slope a² u
    1 + x + x²/2 + x³/6 + x⁴/24 = a⁴/24 (r² + 8u/a³),  r = u² + 3/a²,     slope a⁴/6 (u r + 2/a³)

With a decay gate, w is multiplied by e^{L_t − L_s}, where L is the running total of ln f (decay_totals.py). For different
tiles of queries and keys the factor is split at a token o between them, e^{L_t − L_o} e^{L_o − L_s}: one number per row
and one per column, none above one. The number of a column is the decay to the edge of its tile (computed once) times the
decay from there to o. The gradient of L_t is Σ g w over its row minus Σ g w over its column, with g = dn·v + dz.

Tensors are [B, T, heads, size]; b batch, h query head, g key-value head, m queries, n keys.

Packed sequences are one row of `total` tokens, and PLACES says which sequence a tile belongs to (packed.py); m, n and T
then count within the sequence. Without PLACES, the compiled program contains none of this.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.decay_totals import kept as kept_since
from maclaurin.programs.triton.decay_totals import padded, totals_backward, totals_of
from maclaurin.programs.triton.fast_math import (
    LOG2E,
    inverse_of_one_plus_power,
    power_of_two,
    rounded_to_bfloat16,
)
from maclaurin.programs.triton.launch import Launch, Layout, by_shapes, launched, prepared
from maclaurin.programs.triton.packed import place_of, places, tiles_of_packed
from maclaurin.programs.triton.rows import quotient_backward
from maclaurin.programs.triton.tiles import (
    Tile,
    cdiv,
    divisor_of,
    empty_rows,
    load_rows,
    load_tile,
    operand_options,
    store_rows,
    tile_options,
    width,
    with_settings,
)

#: tiles by pass for head sizes up to 64 and up to 128
TILES = {
    "forward": (Tile(64, 64, 4, 3, 128), Tile(64, 64, 4, 3)),
    "queries": (Tile(64, 64, 4, 3, 168), Tile(128, 64, 8, 3)),
    "keys": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
}


class Settings(NamedTuple):
    """The compile-time arguments of the three passes (S in kernels).

    GROUP                   query heads per key-value head
    D, E, BD, BE            sizes of keys and values, and of their tiles
    BM, BN                  queries and keys per tile
    C, FORM                 coefficients of the polynomial, and how weights are computed from them (`_Form`)
    BY_SUM, BY_COUNT        what rows are divided by
    CAUSAL, DECAY           whether there is a causal mask, and a decay gate
    WIDE                    whether the decay within a tile, and sums for the gate's gradient, need fp64
    NARROW                  whether y has a rounding error
    SUMS                    how row sums of weights are computed (`_kind_of_sums`)
    INSIDE                  whether no tile of the loop over whole tiles reaches beyond the text (backward)
    TOGETHER                whether weights and their gradients are computed at the same time, in tiles without a mask
    MASKED_TOGETHER         and in those with one
    OPERAND, PRECISION      how products are computed (tiles.py)
    """

    GROUP: int
    D: int
    E: int
    BD: int
    BE: int
    BM: int
    BN: int
    C: tuple[float, ...]
    FORM: str
    BY_SUM: bool
    BY_COUNT: bool
    CAUSAL: bool
    DECAY: bool
    WIDE: bool
    NARROW: bool
    SUMS: str
    INSIDE: bool
    TOGETHER: bool
    MASKED_TOGETHER: bool
    OPERAND: Any
    PRECISION: Any


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


class _Form(NamedTuple):
    """How weights are computed, and the constants by which they and their slopes are too small.

    kind    "powers" by Horner's rule, "sigmoid" of these, "square" s², "exp2" and "exp4" the series of e^{as} to that order
    """

    kind: str
    of_weight: float
    of_slope: float


@by_shapes
def _form(call: Call, size: int) -> _Form:
    """The form of weights for heads of this size."""
    c = call.coefficients
    if call.sigmoid:
        return _Form("sigmoid", 1.0, c[1] if len(c) == 2 else 1.0)
    if len(c) == 3 and not any(c[:2]):
        return _Form("square", c[2], 2 * c[2])
    lengths = (3, 5) if size <= 64 else (3,)  # order 4 takes more registers than large heads leave
    if len(c) in lengths and _is_series_of_exp(c):
        a = c[1] / c[0]
        if len(c) == 3:
            return _Form("exp2", c[0] * a**2 / 2, c[0] * a**2)
        return _Form("exp4", c[0] * a**4 / 24, c[0] * a**4 / 6)
    return _Form("powers", 1.0, 1.0)


def _is_series_of_exp(c: tuple[float, ...]) -> bool:
    """Whether c_n = c₀ aⁿ/n!, for an a whose powers are far from the limits of fp32."""
    if c[0] == 0 or not 1e-3 < abs(c[1] / c[0]) < 1e3:
        return False
    a = c[1] / c[0]
    return all(math.isclose(c[n], c[0] * a**n / math.factorial(n), rel_tol=1e-9) for n in range(len(c)))


@triton.jit
def _powers(s, C: tl.constexpr, FACTOR: tl.constexpr):
    """Σ c_n sⁿ by Horner's rule, times FACTOR."""
    p = tl.full(s.shape, C[len(C) - 1] * FACTOR, tl.float32)
    for i in tl.static_range(1, len(C)):
        p = p * s + C[len(C) - 1 - i] * FACTOR
    return p


@triton.jit
def _sigmoid(s, C: tl.constexpr):
    """σ(Σ c_n sⁿ)."""
    return inverse_of_one_plus_power(_powers(s, C, -LOG2E))


@triton.jit
def _weight(s, kept, S: tl.constexpr):
    """The weight over its constant, times the decay `kept`."""
    C: tl.constexpr = S.C
    if S.FORM == "square":
        w = s * (s * kept)
    else:
        if S.FORM == "exp2":
            u = s + C[0] / C[1]
            w = u * u + (C[0] / C[1]) * (C[0] / C[1])
        elif S.FORM == "exp4":
            u = s + C[0] / C[1]
            r = u * u + 3 * (C[0] / C[1]) * (C[0] / C[1])
            w = r * r + u * (8 * (C[0] / C[1]) * (C[0] / C[1]) * (C[0] / C[1]))
        elif S.FORM == "sigmoid":
            w = _sigmoid(s, C)
        else:
            w = _powers(s, C, 1.0)
        if S.DECAY:
            w *= kept
    return w


@triton.jit
def _slope(s, kept, S: tl.constexpr):
    """The derivative of the weight over its own constant, times the decay `kept`."""
    C: tl.constexpr = S.C
    if S.FORM == "square":
        slope = s * kept
    else:
        if S.FORM == "exp2":
            slope = s + C[0] / C[1]
        elif S.FORM == "exp4":
            u = s + C[0] / C[1]
            r = u * u + 3 * (C[0] / C[1]) * (C[0] / C[1])
            slope = u * r + 2 * (C[0] / C[1]) * (C[0] / C[1]) * (C[0] / C[1])
        elif S.FORM == "sigmoid":
            w = _sigmoid(s, C)
            slope = w - w * w
        else:
            slope = _slope_of_powers(s, C)
        if S.DECAY:
            slope *= kept
    return slope


@triton.jit
def _slope_of_powers(s, C: tl.constexpr):
    """Σ n c_n sⁿ⁻¹."""
    slope = tl.zeros(s.shape, tl.float32)
    for i in tl.static_range(0, len(C) - 1):
        slope = slope * s + C[len(C) - 1 - i] * (len(C) - 1 - i)
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
def _logs(TOTALS, SINCE, at, n, T, S: tl.constexpr):
    """L of the tokens n of a tile: in fp64 if WIDE, else log₂ of the decay since a token before the tile in fp32."""
    if S.DECAY and not S.WIDE:
        logs = tl.load(SINCE + n)
    else:
        logs = _totals(TOTALS, at, n, T, S.DECAY)
    return logs


@triton.jit
def _kept_of_pairs(of_query, of_key, S: tl.constexpr):
    """The decay of every pair of a tile, from `_logs`."""
    if not S.DECAY:
        kept = 1.0
    elif S.WIDE:
        kept = kept_since(of_query, of_key)
    else:
        kept = power_of_two(tl.minimum(of_query - of_key, 0.0))
    return kept


@triton.jit
def _kept_of_lines(FACTORS, at, later, earlier, DECAY: tl.constexpr, SIZE: tl.constexpr):
    """`_kept_of_pairs` as one number per token of a tile: the decay to the tile's edge (FACTORS) times the rest."""
    if DECAY:
        kept = tl.load(FACTORS + at) * kept_since(later, earlier)
    else:
        kept = tl.full((SIZE,), 1.0, tl.float32)
    return kept


@triton.jit
def _operand(x, OPERAND: tl.constexpr):
    """x in the dtype of products."""
    if tl.bfloat16 == OPERAND:
        short, _ = rounded_to_bfloat16(x)
    else:
        short = x.to(OPERAND)
    return short


@triton.jit
def _add_keys(acc, z, q, k, v, m, n, T, kept, S: tl.constexpr, MASKED: tl.constexpr):
    """Add one tile of keys to the sums of a tile of queries."""
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    w = _weight(tl.dot(q, tl.trans(k), input_precision=PRECISION), kept, S)
    if MASKED:
        seen = (n < T)[None, :]
        if S.CAUSAL:
            seen = seen & (n[None, :] <= m[:, None])
        w = tl.where(seen, w, 0.0)
    # sums of the rounded weights, so that those in the product sum to one
    if S.SUMS == "pairs":
        w, wide = rounded_to_bfloat16(w)
        z += tl.sum(wide, 1)
    else:
        w = w.to(OPERAND)
        if S.SUMS != "none":
            z += tl.sum(w.to(tl.float32), 1)
    return tl.dot(w, v.to(OPERAND), acc, input_precision=PRECISION), z


@launched
@triton.jit
def _forward(
    Q, K, V, TOTALS, SINCE, KEPT, Y, REST, Z, PLACES,
    q_strides, k_strides, v_strides, y_strides,
    T, H, padded, eps, of_weight, S: tl.constexpr,
):  # fmt: skip
    """y and D of a tile of queries of one head."""
    BE: tl.constexpr = S.BE
    BM: tl.constexpr = S.BM
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    y_b, y_t, y_h = y_strides
    first, total = (tl.num_programs(0) - 1 - tl.program_id(0)) * S.BM, T  # the longest rows first
    if PLACES is not None:
        begin, T, index, _ = place_of(PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0))
        first = index * S.BM
        Q, K, V = Q + begin * q_t, K + begin * k_t, V + begin * v_t
        Y, Z, REST = Y + begin * y_t, Z + begin, REST + begin * y_t if S.NARROW else REST
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // S.GROUP
    i, j = tl.arange(0, S.BM), tl.arange(0, S.BN)
    m = first + i
    d, e = tl.arange(0, S.BD), tl.arange(0, S.BE)
    q = load_rows(Q + b * q_b + h * q_h, q_t, m, d, T, S.D)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    totals = (b * (H // S.GROUP) + g) * T
    if S.DECAY:
        of_head = (b * (H // S.GROUP) + g) * padded
        SINCE, KEPT = SINCE + of_head, KEPT + (of_head + j)
    origin = _totals(TOTALS, totals, first, T, S.DECAY)
    of_query = _logs(TOTALS, SINCE, totals, m, T, S)
    of_first = _logs(TOTALS, SINCE, totals, first, T, S)
    acc = tl.zeros((BM, BE), tl.float32)
    z = tl.zeros((BM,), tl.float32)
    whole = first // S.BN * S.BN if S.CAUSAL else T // S.BN * S.BN  # keys before this need no mask
    end = whole + tl.cdiv(S.BM, S.BN) * S.BN if S.CAUSAL else T
    for start in range(0, whole, S.BN):
        n = start + j
        k, v = load_tile(K, k_t, start, j, d, T, S.D, True), load_tile(V, v_t, start, j, e, T, S.E, True)
        of_line = _kept_of_lines(
            KEPT, start, origin, _totals(TOTALS, totals, start + S.BN - 1, T, S.DECAY), S.DECAY, S.BN
        )
        acc, z = _add_keys(acc, z, q, k, v, m, n, T, of_line[None, :], S, False)
    if S.DECAY:
        kept = _kept_of_pairs(of_query, of_first, S)
        acc, z = acc * kept[:, None], z * kept
    for start in range(whole, end, S.BN):
        n = start + j
        k, v = load_tile(K, k_t, start, j, d, T, S.D, False), load_tile(V, v_t, start, j, e, T, S.E, False)
        of_key = _logs(TOTALS, SINCE, totals, n, T, S)
        of_pair = _kept_of_pairs(of_query[:, None], of_key[None, :], S)
        acc, z = _add_keys(acc, z, q, k, v, m, n, T, of_pair, S, True)
    seen = m + 1 if S.CAUSAL else m * 0 + T
    divisor = divisor_of(z * of_weight, seen, eps, S.BY_SUM, S.BY_COUNT)
    inside = (m < T)[:, None] & (e < S.E)[None, :]
    at = b * y_b + h * y_h + m[:, None] * y_t + e[None, :]
    store_rows(Y, REST, at, acc * (of_weight / divisor)[:, None], inside, S.NARROW)
    tl.store(Z + (b * H + h) * total + m, divisor, mask=m < T)


@triton.jit
def _row_sums(DZ, rows, m, T, BY_SUM: tl.constexpr, INSIDE: tl.constexpr):
    """dz of the rows m."""
    if not BY_SUM:
        dz = tl.zeros(m.shape, tl.float32)
    elif INSIDE:
        dz = tl.load(DZ + rows + m)
    else:
        dz = tl.load(DZ + rows + m, mask=m < T, other=0.0)
    return dz


@triton.jit
def _add_queries(dk, dv, dl, k, v, q, dn, dz, m, n, kept, S: tl.constexpr, MASKED: tl.constexpr):
    """Add one tile of queries to the gradients of a tile of keys; tiles are [keys, queries].

    Queries beyond the text have zeros for q, dn and dz and add nothing; gradients of keys beyond it are not stored.
    """
    TOGETHER: tl.constexpr = S.MASKED_TOGETHER if MASKED else S.TOGETHER
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if not TOGETHER:
        w = _weight(s, kept, S)
        if MASKED:
            w = tl.where(n[:, None] <= m[None, :], w, 0.0)
        dv = tl.dot(_operand(w, OPERAND), dn, dv, input_precision=PRECISION)
    dw = tl.dot(v.to(OPERAND), tl.trans(dn), input_precision=PRECISION)
    if S.BY_SUM:
        dw += dz[None, :]
    if TOGETHER:
        w = _weight(s, kept, S)
    ds = dw * _slope(s, kept, S)
    if MASKED:
        seen = n[:, None] <= m[None, :]
        ds = tl.where(seen, ds, 0.0)
        w = tl.where(seen, w, 0.0)
    if TOGETHER:
        dv = tl.dot(_operand(w, OPERAND), dn, dv, input_precision=PRECISION)
    if S.DECAY:
        dl += tl.sum(w * dw, 1).to(dl.dtype)  # unrounded weights: sums along the text cancel
    return tl.dot(_operand(ds, OPERAND), q.to(OPERAND), dk, input_precision=PRECISION), dv, dl


@launched
@triton.jit
def _backward_keys(
    Q, K, V, DN, DZ, TOTALS, SINCE, KEPT, DK, DV, DL, PLACES,
    q_strides, k_strides, v_strides, n_strides, dk_strides, dv_strides,
    T, H, padded, of_weight, of_slope, S: tl.constexpr,
):  # fmt: skip
    """dk, dv and the part of dL from columns, of a tile of keys of one key-value head."""
    BD: tl.constexpr = S.BD
    BE: tl.constexpr = S.BE
    BN: tl.constexpr = S.BN
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dk_b, dk_t, dk_h = dk_strides
    dv_b, dv_t, dv_h = dv_strides
    first, total = tl.program_id(0) * S.BN, T
    if PLACES is not None:
        begin, T, index, _ = place_of(PLACES, tl.program_id(0), tl.num_programs(0))
        first = index * S.BN
        Q, K, V = Q + begin * q_t, K + begin * k_t, V + begin * v_t
        DN, DZ = DN + begin * n_t, DZ + begin if S.BY_SUM else DZ
        DK, DV = DK + begin * dk_t, DV + begin * dv_t
    kv_heads = H // S.GROUP
    b, g = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    i, j = tl.arange(0, S.BM), tl.arange(0, S.BN)
    n = first + j
    d, e = tl.arange(0, S.BD), tl.arange(0, S.BE)
    k = load_rows(K + b * k_b + g * k_h, k_t, n, d, T, S.D)
    v = load_rows(V + b * v_b + g * v_h, v_t, n, e, T, S.E)
    totals = (b * kv_heads + g) * T
    if S.DECAY:
        SINCE, KEPT = SINCE + (b * kv_heads + g) * padded, KEPT + (b * kv_heads + g) * padded
    origin = _totals(TOTALS, totals, first + S.BN - 1, T, S.DECAY)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    dl = tl.zeros((BN,), tl.float64 if S.WIDE else tl.float32)
    begin = first // S.BM * S.BM if S.CAUSAL else 0
    whole = tl.cdiv(first + S.BN, S.BM) * S.BM if S.CAUSAL else 0  # from here on, queries see the whole tile
    for member in range(S.GROUP):
        h = g * S.GROUP + member
        q_at, dn_at, rows = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h, (b * H + h) * total
        for start in range(whole, T, S.BM):
            m = start + i
            q, dn = (
                load_tile(q_at, q_t, start, i, d, T, S.D, S.INSIDE),
                load_tile(dn_at, n_t, start, i, e, T, S.E, S.INSIDE),
            )
            dz = _row_sums(DZ, rows, m, T, S.BY_SUM, S.INSIDE)
            of_line = _kept_of_lines(
                KEPT, m, _totals(TOTALS, totals, start, T, S.DECAY), origin, S.DECAY, S.BM
            )
            dk, dv, dl = _add_queries(dk, dv, dl, k, v, q, dn, dz, m, n, of_line[None, :], S, False)
    of_key = _logs(TOTALS, SINCE, totals, n, T, S)
    if S.DECAY:
        last = _logs(TOTALS, SINCE, totals, first + S.BN - 1, T, S)
        kept = _kept_of_pairs(last, of_key, S)
        dk, dv, dl = dk * kept[:, None], dv * kept[:, None], dl * kept
    for member in range(S.GROUP):
        h = g * S.GROUP + member
        q_at, dn_at, rows = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h, (b * H + h) * total
        for start in range(begin, tl.minimum(whole, T), S.BM):
            m = start + i
            q, dn = (
                load_tile(q_at, q_t, start, i, d, T, S.D, S.INSIDE),
                load_tile(dn_at, n_t, start, i, e, T, S.E, S.INSIDE),
            )
            dz, of_query = (
                _row_sums(DZ, rows, m, T, S.BY_SUM, S.INSIDE),
                _logs(TOTALS, SINCE, totals, m, T, S),
            )
            of_pair = _kept_of_pairs(of_query[None, :], of_key[:, None], S)
            dk, dv, dl = _add_queries(dk, dv, dl, k, v, q, dn, dz, m, n, of_pair, S, True)
    dk, dv = dk * of_slope, dv * of_weight
    inside_d = (n < T)[:, None] & (d < S.D)[None, :]
    inside_e = (n < T)[:, None] & (e < S.E)[None, :]
    tl.store(
        DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :], dk.to(DK.dtype.element_ty), mask=inside_d
    )
    tl.store(
        DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :], dv.to(DV.dtype.element_ty), mask=inside_e
    )
    if S.DECAY:
        tl.store(DL + totals + n, dl * of_weight, mask=n < T)


@triton.jit
def _add_keys_to_query(dq, dl, q, dn, dz, k, v, m, n, kept, S: tl.constexpr, MASKED: tl.constexpr):
    """Add one tile of keys to the gradient of a tile of queries; keys beyond the text are zeros and add nothing."""
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dw = tl.dot(dn, tl.trans(v.to(OPERAND)), input_precision=PRECISION)
    if S.BY_SUM:
        dw += dz[:, None]
    if MASKED:
        dw = tl.where(n[None, :] <= m[:, None], dw, 0.0)
    ds = dw * _slope(s, kept, S)
    if S.DECAY and S.FORM == "square":
        dl += tl.sum(ds * s, 1).to(dl.dtype)
    elif S.DECAY:
        dl += tl.sum(dw * _weight(s, kept, S), 1).to(dl.dtype)
    return tl.dot(_operand(ds, OPERAND), k.to(OPERAND), dq, input_precision=PRECISION), dl


@launched
@triton.jit
def _backward_queries(
    Q, K, V, DN, DZ, TOTALS, SINCE, KEPT, DQ, DL, PLACES,
    q_strides, k_strides, v_strides, n_strides, dq_strides,
    T, H, padded, of_weight, of_slope, S: tl.constexpr,
):  # fmt: skip
    """dq and the part of dL from rows, of a tile of queries of one head."""
    BD: tl.constexpr = S.BD
    BM: tl.constexpr = S.BM
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dq_b, dq_t, dq_h = dq_strides
    first, total = (tl.num_programs(0) - 1 - tl.program_id(0)) * S.BM, T
    if PLACES is not None:
        begin, T, index, _ = place_of(PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0))
        first = index * S.BM
        Q, K, V = Q + begin * q_t, K + begin * k_t, V + begin * v_t
        DN, DZ, DQ = DN + begin * n_t, DZ + begin if S.BY_SUM else DZ, DQ + begin * dq_t
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // S.GROUP
    i, j = tl.arange(0, S.BM), tl.arange(0, S.BN)
    m = first + i
    d, e = tl.arange(0, S.BD), tl.arange(0, S.BE)
    q = load_rows(Q + b * q_b + h * q_h, q_t, m, d, T, S.D)
    dn = load_rows(DN + b * n_b + h * n_h, n_t, m, e, T, S.E)
    dz = _row_sums(DZ, (b * H + h) * total, m, T, S.BY_SUM, False)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    totals = (b * (H // S.GROUP) + g) * T
    if S.DECAY:
        of_head = (b * (H // S.GROUP) + g) * padded
        SINCE, KEPT = SINCE + of_head, KEPT + (of_head + j)
    origin = _totals(TOTALS, totals, first, T, S.DECAY)
    of_query = _logs(TOTALS, SINCE, totals, m, T, S)
    of_first = _logs(TOTALS, SINCE, totals, first, T, S)
    dq = tl.zeros((BM, BD), tl.float32)
    dl = tl.zeros((BM,), tl.float64 if S.WIDE else tl.float32)
    whole = first // S.BN * S.BN if S.CAUSAL else T
    end = whole + tl.cdiv(S.BM, S.BN) * S.BN if S.CAUSAL else T
    for start in range(0, whole, S.BN):
        n = start + j
        k, v = (
            load_tile(K, k_t, start, j, d, T, S.D, S.INSIDE),
            load_tile(V, v_t, start, j, e, T, S.E, S.INSIDE),
        )
        of_line = _kept_of_lines(
            KEPT, start, origin, _totals(TOTALS, totals, start + S.BN - 1, T, S.DECAY), S.DECAY, S.BN
        )
        dq, dl = _add_keys_to_query(dq, dl, q, dn, dz, k, v, m, n, of_line[None, :], S, False)
    if S.DECAY:
        kept = _kept_of_pairs(of_query, of_first, S)
        dq, dl = dq * kept[:, None], dl * kept
    for start in range(whole, end, S.BN):
        n = start + j
        k, v = load_tile(K, k_t, start, j, d, T, S.D, False), load_tile(V, v_t, start, j, e, T, S.E, False)
        of_key = _logs(TOTALS, SINCE, totals, n, T, S)
        of_pair = _kept_of_pairs(of_query[:, None], of_key[None, :], S)
        dq, dl = _add_keys_to_query(dq, dl, q, dn, dz, k, v, m, n, of_pair, S, True)
    dq *= of_slope
    inside = (m < T)[:, None] & (d < S.D)[None, :]
    tl.store(
        DQ + b * dq_b + h * dq_h + m[:, None] * dq_t + d[None, :], dq.to(DQ.dtype.element_ty), mask=inside
    )
    if S.DECAY:
        tl.store(DL + (b * H + h) * T + m, dl * of_weight, mask=m < T)


# ------------------------------------------------------------------------------------ launching


class _Forward(NamedTuple):
    """The launch of a forward pass, and its tile."""

    start: Launch
    queries: int
    keys: int


@by_shapes
def _forward_launch(
    q: Layout, k: Layout, v: Layout, call: Call, tiles: tuple[Tile, Tile], decays: bool, sequences: int
) -> _Forward:
    batch, tokens, heads, _ = q.shape
    tile = _tile(tiles, q, v, tokens)
    y = Layout.contiguous((*q.shape[:3], v.shape[3]), torch.float32)
    form = _form(call, _largest(q, v))
    numbers = (
        q.strides[:3], k.strides[:3], v.strides[:3], y.strides[:3], tokens, heads, _padded(tokens, decays), call.eps, form.of_weight
    )  # fmt: skip
    settings = _settings(q, k, v, call, decays, tile)._replace(
        BY_COUNT=call.divisor == "count", NARROW=call.narrow, SUMS=_kind_of_sums(q, call)
    )
    grid = _tiles(tokens, tile["BM"], sequences), batch * heads
    start = prepared(_forward, grid, numbers, with_settings(settings, tile))
    return _Forward(start, tile["BM"], tile["BN"])


def _kind_of_sums(q: Layout, call: Call) -> str:
    """How row sums of weights are computed: "each" rounded and added, rounded in "pairs" and added, or not at all."""
    if call.divisor != "sum":
        return "none"
    return "pairs" if q.dtype == torch.bfloat16 else "each"


@on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, log_decay: Tensor | None = None, cuts: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y [B, T, H, e], its rounding error (dz = −Σ dn∘y needs the unrounded y), and D [B, H, T].

    `log_decay` [B, K, T] is the logarithm of a decay gate, for causal calls. `cuts` [n + 1] are the cuts
    of sequences packed into one row (B = 1), which have no decay gate.
    """
    batch, tokens, heads, _ = q.shape
    given = Layout.of(q), Layout.of(k), Layout.of(v)
    launch = _forward_launch(*given, call, TILES["forward"], log_decay is not None, _sequences(cuts))
    y, rest = empty_rows(q, v, call.narrow)
    z = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    totals = since = kept = None
    if log_decay is not None:
        totals, since, kept, _ = totals_of(log_decay, launch.keys, launch.queries)
    of_tiles = None if cuts is None else places(cuts, tokens, launch.queries)
    launch.start(q, k, v, totals, since, kept, y, rest, z, of_tiles)
    return y, rest, z


class _Backward(NamedTuple):
    """The launches of both backward passes, and their tiles: those of the own tokens, and those of the loop."""

    keys: Launch
    queries: Launch
    key_tile: tuple[int, int]
    query_tile: tuple[int, int]


@by_shapes
def _backward_launch(
    q: Layout,
    k: Layout,
    v: Layout,
    call: Call,
    tiles: tuple[tuple[Tile, Tile], tuple[Tile, Tile]],
    decays: bool,
    sequences: int,
) -> _Backward:
    batch, tokens, heads, _ = q.shape
    of_keys, of_queries = (_tile(tile, q, v, tokens) for tile in tiles)
    form = _form(call, _largest(q, v))
    strides = q.strides[:3], k.strides[:3], v.strides[:3]
    dn = _contiguous((*q.shape[:3], v.shape[3]))
    numbers = tokens, heads, _padded(tokens, decays), form.of_weight, form.of_slope
    # weights and their gradients at the same time: in tiles with a mask, and with a decay gate. Without one it is
    # slower, and larger heads have too few registers
    small = _largest(q, v) <= 64
    settings = _settings(q, k, v, call, decays, of_keys)._replace(
        INSIDE=tokens % of_keys["BM"] == 0 and not sequences, TOGETHER=decays and small, MASKED_TOGETHER=small
    )
    keys = prepared(
        _backward_keys,
        (_tiles(tokens, of_keys["BN"], sequences), batch * k.shape[2]),
        (*strides, dn, _contiguous(k.shape), _contiguous(v.shape), *numbers),
        with_settings(settings, of_keys),
    )
    inside = call.causal or (tokens % of_queries["BN"] == 0 and not sequences)
    settings = _settings(q, k, v, call, decays, of_queries)._replace(INSIDE=inside)
    queries = prepared(
        _backward_queries,
        (_tiles(tokens, of_queries["BM"], sequences), batch * heads),
        (*strides, dn, _contiguous(q.shape), *numbers),
        with_settings(settings, of_queries),
    )
    return _Backward(keys, queries, (of_keys["BN"], of_keys["BM"]), (of_queries["BM"], of_queries["BN"]))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return Layout.contiguous(shape, torch.float32).strides[:3]


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
    log_decay: Tensor | None = None,
    cuts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the dtypes of q, k, v, and the gradient of the log decay gate."""
    batch, tokens, heads, _ = q.shape
    given = Layout.of(q), Layout.of(k), Layout.of(v)
    tiles = TILES["keys"], TILES["queries"]
    launch = _backward_launch(*given, call, tiles, log_decay is not None, _sequences(cuts))
    dn, dz = quotient_backward(dy, y, rest, z, v, by_sum=call.divisor == "sum")
    dq, dk, dv = (torch.empty(u.shape, dtype=u.dtype, device=u.device) for u in (q, k, v))
    totals = since = kept_keys = kept_queries = of_rows = of_keys = None
    if log_decay is not None:
        totals, since, kept_keys, kept_queries = totals_of(
            log_decay, launch.query_tile[1], launch.key_tile[1]
        )
        kind = torch.float64 if _is_wide(q) else torch.float32
        of_rows = torch.empty(batch, heads, tokens, dtype=kind, device=q.device)
        of_keys = torch.empty(totals.shape, dtype=kind, device=q.device)
    (key_tile, _), (query_tile, _) = launch.key_tile, launch.query_tile
    found = {} if cuts is None else {size: places(cuts, tokens, size) for size in {key_tile, query_tile}}
    launch.keys(q, k, v, dn, dz, totals, since, kept_queries, dk, dv, of_keys, found.get(key_tile))
    launch.queries(q, k, v, dn, dz, totals, since, kept_keys, dq, of_rows, found.get(query_tile))
    if log_decay is None or of_rows is None or of_keys is None:
        return dq, dk, dv, None
    return dq, dk, dv, totals_backward(log_decay, of_rows, of_keys)


def _settings(q: Layout, k: Layout, v: Layout, call: Call, decays: bool, tile: dict[str, int]) -> Settings:
    d, e = q.shape[3], v.shape[3]
    return Settings(
        GROUP=q.shape[2] // k.shape[2],
        D=d,
        E=e,
        BD=width(d),
        BE=width(e),
        BM=tile["BM"],
        BN=tile["BN"],
        C=call.coefficients,
        FORM=_form(call, _largest(q, v)).kind,
        BY_SUM=call.divisor == "sum",
        BY_COUNT=False,
        CAUSAL=call.causal,
        DECAY=decays,
        WIDE=_is_wide(q),
        NARROW=False,
        SUMS="none",
        INSIDE=False,
        TOGETHER=False,
        MASKED_TOGETHER=False,
        **operand_options(q),  # weights and score gradients may leave the range of fp16
    )


def _largest(q: Layout, v: Layout) -> int:
    """The size of heads that tiles are chosen by."""
    return max(q.shape[3], v.shape[3])


def _is_wide(q: Tensor | Layout) -> bool:
    """Whether decays within a tile, and sums for the gate's gradient, need fp64; for bf16 fp32 is enough."""
    return q.dtype != torch.bfloat16


def _sequences(cuts: Tensor | None) -> int:
    return 0 if cuts is None else cuts.numel() - 1


def _tiles(tokens: int, size: int, sequences: int) -> int:
    """The number of tiles of a row, or of all sequences packed into it."""
    return tiles_of_packed(tokens, sequences, size) if sequences else cdiv(tokens, size)


def _padded(tokens: int, decays: bool) -> int:
    return padded(tokens) if decays else 0


def _tile(tiles: tuple[Tile, Tile], q: Tensor | Layout, v: Tensor | Layout, tokens: int) -> dict[str, int]:
    """The tile of a pass; smaller for fp32 and for fp16 (partly computed in fp32), which take more shared memory."""
    options = tile_options(tiles, q, v, tokens)
    if q.dtype == torch.bfloat16:
        return options
    options.pop("maxnreg", None)
    return options | {"BM": min(64, options["BM"]), "BN": min(32, options["BN"]), "num_warps": 8}
