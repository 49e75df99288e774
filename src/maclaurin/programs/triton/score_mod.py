"""softmax(x)V with a modified score: a clamp, a forget gate, a window with sinks; forward and backward.

    x_ts = min(scale·q·k, clamp) + L_t − L_s,        seen: s ≤ t, and s > t − window or s < sinks
    p = e^{x − lse},   o = Σ p v,      dx = p (do·v − δ),   dL_t = Σ_s dx,   dL_s = −Σ_t dx

L is the running total of the log forget gate, in fp64. A tile subtracts the L of its own first token, so that large
totals cause no large rounding errors. The rest of L_t is one number per row, which does not change the softmax and is
added to the log-sum-exp only. For fp32 even that rounds too much within a tile, so L_t − L_s is computed pair by pair
(PAIRS). Rows without visible keys give 0 and a log-sum-exp of −∞. Exponentials are to base 2, as in hardware. Tensors
are [B, H, T, size] with strides for the first three axes.

Packed sequences are one row of `total` tokens, and PLACES says which sequence a tile belongs to (packed.py); m, n, T,
windows and sinks then count within the sequence. Packed calls have no forget gate. Without PLACES, the compiled program
contains none of this.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import empty_rows_of_heads, on_its_device
from maclaurin.programs.triton.launch import Launch, Layout, New, by_shapes, launched, new_tensors, prepared
from maclaurin.programs.triton.packed import place_of, places, tiles_of_packed
from maclaurin.programs.triton.tiles import (
    Tile,
    cdiv,
    load_rows,
    precision,
    tile_options,
    width,
    with_settings,
)

#: tiles by pass for head sizes up to 64 and up to 128
TILES = {
    "forward": (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)),
    "queries": (Tile(64, 32, 4, 3), Tile(64, 32, 4, 3)),
    "keys": (Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)),
}


class Call(NamedTuple):
    """The non-tensor arguments of a call; clamp and window may be None."""

    scale: float
    causal: bool
    clamp: float | None = None
    window: int | None = None
    sinks: int = 0


class Settings(NamedTuple):
    """The compile-time arguments of the three passes (S in kernels).

    GROUP             query heads per key-value head
    D, E, BD, BE      sizes of keys and values, and of their tiles
    BM, BN            queries and keys per tile
    CAUSAL, WINDOW, SINKS      which keys a query sees (WINDOW = 0: none is too old)
    CLAMP, DECAY      whether scores have an upper limit, and a forget gate
    PAIRS             whether L_t − L_s is computed pair by pair
    PRECISION         how products are computed (tiles.py)
    """

    GROUP: int
    D: int
    E: int
    BD: int
    BE: int
    BM: int
    BN: int
    CAUSAL: bool
    WINDOW: int
    SINKS: int
    CLAMP: bool
    DECAY: bool
    PAIRS: bool
    PRECISION: str


@triton.jit
def _seen(t, s, T, S: tl.constexpr):
    """Which keys s the queries t see; s and t are broadcast."""
    seen = (s < T) & (t < T)
    if S.CAUSAL:
        seen = seen & (s <= t)
    if S.WINDOW > 0:
        seen = seen & ((s > t - S.WINDOW) | (s < S.SINKS))
    return seen


@triton.jit
def _totals(TOTALS, at, n, T, DECAY: tl.constexpr):
    """L_n·log₂e; zeros beyond the text."""
    if DECAY:
        totals = tl.load(TOTALS + at + n, mask=n < T, other=0.0) * 1.4426950408889634
    else:
        totals = tl.zeros(n.shape, tl.float64)
    return totals


@triton.jit
def _own(totals, origin, PAIRS: tl.constexpr):
    """The part of L_t that `_score` leaves out of a row's scores."""
    return (totals - (totals if PAIRS else origin)).to(tl.float32)


@triton.jit
def _score(dot, of_row, of_key, origin, scale, clamp, S: tl.constexpr):
    """x·log₂e without the part of L_t that `_own` returns."""
    x = dot * scale
    if S.CLAMP:
        x = tl.minimum(x, clamp)
    if S.DECAY:
        x += ((of_row if S.PAIRS else origin) - of_key).to(tl.float32)
    return x


@triton.jit
def _key_tiles(first, T, S: tl.constexpr):
    """The keys that a tile of queries from `first` on reads. All queries see keys begin … stop − 1, which need no mask.

    Some queries see keys 0 … sink_end − 1, edge … begin − 1 and stop … end − 1; `masked` counts the tiles of these.
    """
    end = tl.minimum(first + S.BM, T) if S.CAUSAL else T
    stop = first // S.BN * S.BN if S.CAUSAL else T // S.BN * S.BN
    edge, begin, sink_end = 0, 0, 0
    if S.WINDOW > 0:
        edge = tl.maximum(0, first - S.WINDOW + 1) // S.BN * S.BN
        begin = tl.minimum(tl.maximum(tl.cdiv(first + S.BM - S.WINDOW, S.BN) * S.BN, edge), stop)
        sink_end = tl.minimum(tl.cdiv(S.SINKS, S.BN) * S.BN, edge)
    masked = sink_end // S.BN + (begin - edge) // S.BN + tl.cdiv(tl.maximum(end - stop, 0), S.BN)
    return begin, stop, edge, sink_end, masked


@triton.jit
def _masked_start(tile, begin, stop, edge, sink_end, BN: tl.constexpr):
    """The first key of masked tile number `tile`."""
    start = edge + tile * BN - sink_end
    start = tl.where(start >= begin, start + stop - begin, start)
    return tl.where(tile * BN < sink_end, tile * BN, start)


@launched
@triton.jit
def _forward(
    Q, K, V, TOTALS, O, LSE, PLACES,
    q_strides, k_strides, v_strides, o_strides,
    T, H, scale, clamp, S: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = S.BM
    BE: tl.constexpr = S.BE
    PRECISION: tl.constexpr = S.PRECISION
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_t = k_strides
    v_b, v_h, v_t = v_strides
    o_b, o_h, o_t = o_strides
    first, total = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM, T  # the longest rows first
    if PLACES is not None:
        offset, T, index, _ = place_of(PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0))
        first = index * BM
        Q, K, V = Q + offset * q_t, K + offset * k_t, V + offset * v_t
        O, LSE = O + offset * o_t, LSE + offset
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // S.GROUP
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, S.BD), tl.arange(0, BE)
    q = load_rows(Q + b * q_b + h * q_h, q_t, m, d, T, S.D)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    totals = (b * (H // S.GROUP) + g) * T
    of_row = _totals(TOTALS, totals, m, T, S.DECAY)
    origin = _totals(TOTALS, totals, first, T, S.DECAY)
    acc = tl.zeros((BM, BE), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    begin, stop, edge, sink_end, masked = _key_tiles(first, T, S)
    for start in range(begin, stop, S.BN):
        n = start + tl.arange(0, S.BN)
        k, v = load_rows(K, k_t, n, d, T, S.D), load_rows(V, v_t, n, e, T, S.E)
        of_key = _totals(TOTALS, totals, n, T, S.DECAY)
        dot = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        x = _score(dot, of_row[:, None], of_key[None, :], origin, scale, clamp, S)
        acc, row_sum, largest = _add(acc, row_sum, largest, x, v, PRECISION)
    for tile in range(masked):
        start = _masked_start(tile, begin, stop, edge, sink_end, S.BN)
        n = start + tl.arange(0, S.BN)
        k, v = load_rows(K, k_t, n, d, T, S.D), load_rows(V, v_t, n, e, T, S.E)
        of_key = _totals(TOTALS, totals, n, T, S.DECAY)
        dot = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        x = _score(dot, of_row[:, None], of_key[None, :], origin, scale, clamp, S)
        x = tl.where(_seen(m[:, None], n[None, :], T, S), x, float("-inf"))
        acc, row_sum, largest = _add(acc, row_sum, largest, x, v, PRECISION)
    empty = row_sum == 0
    o = acc / tl.where(empty, 1.0, row_sum)[:, None]
    log2 = largest + tl.log2(tl.where(empty, 1.0, row_sum)) + _own(of_row, origin, S.PAIRS)
    lse = tl.where(empty, float("-inf"), log2 * 0.6931471805599453)
    inside = (m < T)[:, None] & (e < S.E)[None, :]
    tl.store(O + b * o_b + h * o_h + m[:, None] * o_t + e[None, :], o.to(O.dtype.element_ty), mask=inside)
    tl.store(LSE + (b * H + h) * total + m, lse, mask=m < T)


@triton.jit
def _add(acc, total, largest, x, v, PRECISION: tl.constexpr):
    """Add one tile of scores to the running maximum, sum and output."""
    new = tl.maximum(largest, tl.max(x, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(largest - safe)
    p = tl.exp2(x - safe[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, new


@triton.jit
def _log2_of_row(LSE, rows, own, m, T):
    """The number to subtract from a row's scores, p = 2^(x − ·): lse·log₂e − `own`; 0 for empty rows."""
    lse = tl.load(LSE + rows + m, mask=m < T, other=float("inf"))  # rows beyond the text get weight 0
    return tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634 - own)


@triton.jit
def _add_keys(dq, dl, q, do, log2, delta, of_row, origin, K, V, TOTALS, k_t, v_t, totals, start, m, d, e, T, scale, clamp,
              S: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add one tile of keys to the gradient of a tile of queries."""
    PRECISION: tl.constexpr = S.PRECISION
    n = start + tl.arange(0, S.BN)
    k, v = load_rows(K, k_t, n, d, T, S.D), load_rows(V, v_t, n, e, T, S.E)
    of_key = _totals(TOTALS, totals, n, T, S.DECAY)
    dot = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    x = _score(dot, of_row[:, None], of_key[None, :], origin, scale, clamp, S) - log2[:, None]
    if MASKED:
        x = tl.where(_seen(m[:, None], n[None, :], T, S), x, float("-inf"))
    dx = tl.exp2(x) * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    if S.DECAY:
        dl += tl.sum(dx, 1).to(dl.dtype)
    if S.CLAMP:
        dx = tl.where(dot * scale <= clamp, dx, 0.0)
    return tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION), dl


@launched
@triton.jit
def _backward_queries(
    Q, K, V, DO, TOTALS, LSE, DELTA, DQ, DL, PLACES,
    q_strides, k_strides, v_strides, o_strides, dq_strides,
    T, H, scale, clamp, S: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = S.BM
    BD: tl.constexpr = S.BD
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_t = k_strides
    v_b, v_h, v_t = v_strides
    o_b, o_h, o_t = o_strides
    dq_b, dq_h, dq_t = dq_strides
    first, total = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM, T
    if PLACES is not None:
        offset, T, index, _ = place_of(PLACES, tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0))
        first = index * BM
        Q, K, V = Q + offset * q_t, K + offset * k_t, V + offset * v_t
        DO, DQ = DO + offset * o_t, DQ + offset * dq_t
        LSE, DELTA = LSE + offset, DELTA + offset
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // S.GROUP
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, S.BE)
    q = load_rows(Q + b * q_b + h * q_h, q_t, m, d, T, S.D)
    do = load_rows(DO + b * o_b + h * o_h, o_t, m, e, T, S.E)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    totals, rows = (b * (H // S.GROUP) + g) * T, (b * H + h) * total
    of_row = _totals(TOTALS, totals, m, T, S.DECAY)
    origin = _totals(TOTALS, totals, first, T, S.DECAY)
    log2 = _log2_of_row(LSE, rows, _own(of_row, origin, S.PAIRS), m, T)
    delta = tl.load(DELTA + rows + m, mask=m < T, other=0.0)
    dq = tl.zeros((BM, BD), tl.float32)
    dl = tl.zeros((BM,), tl.float64 if S.PAIRS else tl.float32)
    begin, stop, edge, sink_end, masked = _key_tiles(first, T, S)
    for start in range(begin, stop, S.BN):
        dq, dl = _add_keys(dq, dl, q, do, log2, delta, of_row, origin, K, V, TOTALS, k_t, v_t, totals, start, m, d, e, T,
                           scale, clamp, S, False)  # fmt: skip
    for tile in range(masked):
        start = _masked_start(tile, begin, stop, edge, sink_end, S.BN)
        dq, dl = _add_keys(dq, dl, q, do, log2, delta, of_row, origin, K, V, TOTALS, k_t, v_t, totals, start, m, d, e, T,
                           scale, clamp, S, True)  # fmt: skip
    inside = (m < T)[:, None] & (d < S.D)[None, :]
    dq *= scale * 0.6931471805599453
    tl.store(
        DQ + b * dq_b + h * dq_h + m[:, None] * dq_t + d[None, :], dq.to(DQ.dtype.element_ty), mask=inside
    )
    if S.DECAY:
        tl.store(DL + rows + m, dl, mask=m < T)


@triton.jit
def _add_queries(dk, dv, dl, k, v, of_key, origin, n, Q, DO, TOTALS, LSE, DELTA, q_t, o_t, totals, rows, start,
                 d, e, T, scale, clamp, S: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add one tile of queries to the gradients of a tile of keys; tiles are [keys, queries].

    Queries beyond the text have zeros for do and δ and add nothing.
    """
    PRECISION: tl.constexpr = S.PRECISION
    m = start + tl.arange(0, S.BM)
    q, do = load_rows(Q, q_t, m, d, T, S.D), load_rows(DO, o_t, m, e, T, S.E)
    of_row = _totals(TOTALS, totals, m, T, S.DECAY)
    log2 = _log2_of_row(LSE, rows, _own(of_row, origin, S.PAIRS), m, T)
    delta = tl.load(DELTA + rows + m, mask=m < T, other=0.0)
    dot = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    x = _score(dot, of_row[None, :], of_key[:, None], origin, scale, clamp, S) - log2[None, :]
    if MASKED:
        x = tl.where(_seen(m[None, :], n[:, None], T, S), x, float("-inf"))
    p = tl.exp2(x)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dx = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    if S.DECAY:
        dl -= tl.sum(dx, 1).to(dl.dtype)
    if S.CLAMP:
        dx = tl.where(dot * scale <= clamp, dx, 0.0)
    dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv, dl


@launched
@triton.jit
def _backward_keys(
    Q, K, V, DO, TOTALS, LSE, DELTA, DK, DV, DL, PLACES,
    q_strides, k_strides, v_strides, o_strides, dk_strides, dv_strides,
    T, H, scale, clamp, S: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = S.BN
    BD: tl.constexpr = S.BD
    BE: tl.constexpr = S.BE
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_t = k_strides
    v_b, v_h, v_t = v_strides
    o_b, o_h, o_t = o_strides
    dk_b, dk_h, dk_t = dk_strides
    dv_b, dv_h, dv_t = dv_strides
    first, total = tl.program_id(0) * BN, T
    if PLACES is not None:
        offset, T, index, _ = place_of(PLACES, tl.program_id(0), tl.num_programs(0))
        first = index * BN
        Q, K, V = Q + offset * q_t, K + offset * k_t, V + offset * v_t
        DO, DK, DV = DO + offset * o_t, DK + offset * dk_t, DV + offset * dv_t
        LSE, DELTA = LSE + offset, DELTA + offset
    kv_heads = H // S.GROUP
    b, g = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    n = first + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    k = load_rows(K + b * k_b + g * k_h, k_t, n, d, T, S.D)
    v = load_rows(V + b * v_b + g * v_h, v_t, n, e, T, S.E)
    totals = (b * kv_heads + g) * T
    of_key = _totals(TOTALS, totals, n, T, S.DECAY)
    origin = _totals(TOTALS, totals, first, T, S.DECAY)
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    dl = tl.zeros((BN,), tl.float64 if S.PAIRS else tl.float32)
    # queries begin … stop − 1 see all keys of the tile and need no mask, unless keys lie beyond the text
    edge, end = first // S.BM * S.BM if S.CAUSAL else 0, T
    begin, stop = tl.minimum(tl.cdiv(first + BN, S.BM) * S.BM, T) if S.CAUSAL else 0, T
    if S.WINDOW > 0:
        if first >= S.SINKS:
            end = tl.minimum(T, first + BN + S.WINDOW - 1)
        stop = tl.minimum(tl.maximum((first + S.WINDOW) // S.BM * S.BM, begin), end)
        stop = tl.where(first < S.SINKS, begin, stop)
    begin = tl.where(first + BN > T, end, tl.minimum(begin, end))
    stop = tl.where(first + BN > T, end, tl.maximum(stop, begin))
    before = tl.cdiv(begin - edge, S.BM)
    for member in range(S.GROUP):
        h = g * S.GROUP + member
        q_at, do_at, rows = Q + b * q_b + h * q_h, DO + b * o_b + h * o_h, (b * H + h) * total
        for tile in range(before + tl.cdiv(end - stop, S.BM)):
            start = tl.where(tile < before, edge + tile * S.BM, stop + (tile - before) * S.BM)
            dk, dv, dl = _add_queries(dk, dv, dl, k, v, of_key, origin, n, q_at, do_at, TOTALS, LSE, DELTA, q_t, o_t,
                                      totals, rows, start, d, e, T, scale, clamp, S, True)  # fmt: skip
        for start in range(begin, stop, S.BM):
            dk, dv, dl = _add_queries(dk, dv, dl, k, v, of_key, origin, n, q_at, do_at, TOTALS, LSE, DELTA, q_t,
                                      o_t, totals, rows, start, d, e, T, scale, clamp, S, False)  # fmt: skip
    inside_d, inside_e = (n < T)[:, None] & (d < S.D)[None, :], (n < T)[:, None] & (e < S.E)[None, :]
    dk *= scale * 0.6931471805599453
    at = DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :]
    tl.store(at, dk.to(DK.dtype.element_ty), mask=inside_d)
    at = DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :]
    tl.store(at, dv.to(DV.dtype.element_ty), mask=inside_e)
    if S.DECAY:
        tl.store(DL + totals + n, dl, mask=n < T)


# ------------------------------------------------------------------------------------ launching


@on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, totals: Tensor | None, call: Call, cuts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, H, T, e] in the dtype of v and lse [B, H, T]; totals [B, K, T] in fp64 or None.

    `cuts` [n + 1] are the cuts of sequences packed into one row (B = 1), which have no totals.
    """
    given = Layout.of(q), Layout.of(k), Layout.of(v)
    launch = _forward_launch(*given, call, totals is not None, _sequences(cuts))
    o = empty_rows_of_heads(v, q.shape[1], packed=cuts is not None)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    totals = None if totals is None else totals.contiguous()
    found = None if cuts is None else places(cuts, q.shape[2], launch.tile)
    launch.start(q, k, v, totals, o, lse, found)
    return o, lse


@on_its_device
def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    totals: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    call: Call,
    cuts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and the gradient of the totals [B, K, T]."""
    given = Layout.of(q), Layout.of(k), Layout.of(v), Layout.of(do)
    launches = _backward_launches(*given, call, totals is not None, _sequences(cuts))
    of_queries, of_keys = launches.queries, launches.keys
    totals = None if totals is None else totals.contiguous()
    dq, dk, dv = (empty_rows_of_heads(u, u.shape[1], packed=cuts is not None) for u in (q, k, v))
    by_rows, by_keys = new_tensors(q, *launches.of_totals)
    found = {}
    if cuts is not None:
        found = {size: places(cuts, q.shape[2], size) for size in {of_queries.tile, of_keys.tile}}
    of_queries.start(q, k, v, do, totals, lse, delta, dq, by_rows, found.get(of_queries.tile))
    of_keys.start(q, k, v, do, totals, lse, delta, dk, dv, by_keys, found.get(of_keys.tile))
    if totals is None:
        return dq, dk, dv, None
    return dq, dk, dv, by_keys + by_rows.unflatten(1, (k.shape[1], -1)).sum(2)


class _Pass(NamedTuple):
    """A launch, and the size of its tiles, which packed sequences are cut into."""

    start: Launch
    tile: int


class _Backward(NamedTuple):
    queries: _Pass
    keys: _Pass
    #: gradients of the totals by row and by key, empty without totals
    of_totals: tuple[New, New]


@by_shapes
def _forward_launch(q: Layout, k: Layout, v: Layout, call: Call, decays: bool, sequences: int) -> _Pass:
    batch, heads, tokens, _ = q.shape
    tile = tile_options(TILES["forward"], q, v, tokens)
    o = _strides_of_rows(v, heads, sequences)
    numbers = (q.strides[:3], k.strides[:3], v.strides[:3], o, tokens, heads, *_score_options(call))
    grid = _tiles(tokens, tile["BM"], sequences), batch * heads
    return _Pass(prepared(_forward, grid, numbers, _options(q, k, v, decays, call, tile)), tile["BM"])


@by_shapes
def _backward_launches(
    q: Layout,
    k: Layout,
    v: Layout,
    do: Layout,
    call: Call,
    decays: bool,
    sequences: int,
) -> _Backward:
    batch, heads, tokens, _ = q.shape
    kv_heads = k.shape[1]
    strides, others = [u.strides[:3] for u in (q, k, v, do)], (tokens, heads, *_score_options(call))
    dq, dk, dv = (_strides_of_rows(u, u.shape[1], sequences) for u in (q, k, v))
    by_query, by_key = (tile_options(TILES[kind], q, v, tokens) for kind in ("queries", "keys"))
    queries = prepared(
        _backward_queries,
        (_tiles(tokens, by_query["BM"], sequences), batch * heads),
        (*strides, dq, *others),
        _options(q, k, v, decays, call, by_query),
    )
    keys = prepared(
        _backward_keys,
        (_tiles(tokens, by_key["BN"], sequences), batch * kv_heads),
        (*strides, dk, dv, *others),
        _options(q, k, v, decays, call, by_key),
    )
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    of_rows, of_keys = (New((batch, count, tokens) if decays else (0,), wide) for count in (heads, kv_heads))
    return _Backward(_Pass(queries, by_query["BM"]), _Pass(keys, by_key["BN"]), (of_rows, of_keys))


def _sequences(cuts: Tensor | None) -> int:
    return 0 if cuts is None else cuts.numel() - 1


def _tiles(tokens: int, size: int, sequences: int) -> int:
    """The number of tiles of a row, or of all sequences packed into it."""
    return tiles_of_packed(tokens, sequences, size) if sequences else cdiv(tokens, size)


def _strides_of_rows(like: Layout, heads: int, sequences: int) -> tuple[int, ...]:
    """The first strides of `empty_rows_of_heads`."""
    tokens, size = like.shape[2:]
    if sequences:
        return tokens * heads * size, size, heads * size
    return heads * tokens * size, tokens * size, size


def _score_options(call: Call) -> tuple[float, float]:
    """Scale and clamp of scores to base 2."""
    log2_e = 1.4426950408889634
    return call.scale * log2_e, (call.clamp or 0.0) * log2_e


def _options(
    q: Layout, k: Layout, v: Layout, decays: bool, call: Call, tile: dict[str, int]
) -> dict[str, Any]:
    """The compile-time arguments of a launch: its settings, and the options of triton that a tile has."""
    d, e = q.shape[3], v.shape[3]
    settings = Settings(
        GROUP=q.shape[1] // k.shape[1],
        D=d,
        E=e,
        BD=width(d),
        BE=width(e),
        BM=tile["BM"],
        BN=tile["BN"],
        CAUSAL=call.causal,
        WINDOW=call.window or 0,
        SINKS=call.sinks,
        CLAMP=call.clamp is not None,
        DECAY=decays,
        PAIRS=q.dtype == torch.float32,
        PRECISION=precision(q),
    )
    return with_settings(settings, tile)
