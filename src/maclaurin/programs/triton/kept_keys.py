"""Attention with a window, sinks, and kept keys: each key is visible for a limited time.

Key s is visible from its own token to token until_s − 1; then it leaves the window or a better key takes its slot:

    seen      s ≤ t < until_s
    score_s   Σ_{s≤u<s+w} mean_g p_us,       p the softmax over window and sinks
    until_s   w + max(s, the M-th key, in the order of the text, that is better than s);  ∞ for sinks

A key's rank among those that have left the window only falls, so one number until_s per key is enough
(forms/ranking.py). Scores take two passes over the window, lifetimes one pass over pairs of scores. A tile of queries
then reads the list of keys that any of its queries sees, at most w + M + sinks + the size of the tile; first those
that all of them see, without masks. So time and
memory are linear in the text, except for comparing scores and making lists. The gradient of a key sums over the queries
that see it; tiles group the few keys with long lives together. Exponentials are to base 2. Tensors are [B, H, T, size],
with strides for the first three axes. Window, slots and sinks are read from a table with a line per key-value head, so
that every spec runs the same compiled program, and heads with different memories share its launches.

A text that continues from a state is read as one text: the exact keys of the state, BEGIN of them, then its T tokens:

    key        0 … sinks, kept keys, window … BEGIN−1     BEGIN … BEGIN+T−1
    query      none                                       0 … T−1, query t at place BEGIN + t

A state that is not full holds all keys so far, so this is the text itself; a full one leaves out only keys that no
later query sees. Old keys carry the scores that the state has for them. BEGIN may differ from head to head and from
row to row, and so may LENGTHS, the number of tokens of a row that are not padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.exact_step import Held
from maclaurin.programs.triton.launch import Launch, Layout, New, by_shapes, launched, new_tensors, prepared
from maclaurin.programs.triton.one_query import add_scores
from maclaurin.programs.triton.tiles import Tile, cdiv, load_rows, precision, tile_options, width

#: tiles by pass for head sizes up to 64 and up to 128
TILES = {
    "near": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    "received": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    "forward": (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)),
    "queries": (Tile(64, 32, 4, 3), Tile(64, 32, 4, 2)),
    "keys": (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
}
#: block sizes: scores compared, and keys listed, at a time
_COMPARED, _LISTED = 64, 1024
#: until_s of a sink
FOREVER = 1 << 30
_LOG2E, _LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
#: numbers that differ between specs and texts; triton must not compile a version for special values such as 1
_ANY = ("T", "S", "window", "sinks", "kept", "capacity", "batch_stride", "kv_heads", "heads", "before")


class Exact(NamedTuple):
    """How many keys of a head are exact: the last ones, the first ones, and slots for kept ones."""

    window: int
    sinks: int
    kept: int

    @property
    def most(self) -> int:
        """The most keys that one query sees."""
        return self.window + self.sinks + self.kept


#: of each key-value head
ExactOfHeads = tuple[Exact, ...]


@by_shapes
def _table(exact: ExactOfHeads, device: torch.device) -> Tensor:
    """The same on the device, [K, 3]."""
    with torch.inference_mode(False):
        return torch.tensor(exact, dtype=torch.int32, device=device)


@triton.jit
def _exact_of(EXACT, head):
    """Window, sinks and slots of a key-value head."""
    return tl.load(EXACT + 3 * head), tl.load(EXACT + 3 * head + 1), tl.load(EXACT + 3 * head + 2)


@triton.jit
def _first_place(BEGIN, row):
    """The place of the first token of a head's text: how many keys of a state come before it."""
    return 0 if BEGIN is None else tl.load(BEGIN + row)


@triton.jit
def _real_tokens(LENGTHS, b, T):
    """How many of the T tokens of a row are not padding."""
    return T if LENGTHS is None else tl.load(LENGTHS + b).to(tl.int32)


# ------------------------------------------------------------------------- a text that continues from a state


@triton.jit
def _gathered(pointer, stride_t, rows, inside, columns, SIZE: tl.constexpr):
    """Rows of a matrix by index, zeros where not `inside`."""
    inside = inside[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] * stride_t + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _copied(FROM, stride_t, source, there, TO, to, inside, columns, SIZE: tl.constexpr):
    """Copy vectors to the rows `to`; zeros where there is no source."""
    found = _gathered(FROM, stride_t, source, there, columns, SIZE)
    tl.store(
        TO + to[:, None] * SIZE + columns[None, :], found, mask=inside[:, None] & (columns < SIZE)[None, :]
    )


@launched
@triton.jit(do_not_specialize=_ANY)
def _lay_out(
    K, V, COUNT, RECENT_K, RECENT_V, SINK_K, SINK_V, RECENT_SCORE, KEPT_SCORE, KEPT_K, KEPT_V,
    KEYS, VALUES, SCORE, BEGIN, k_strides, v_strides, T, S, kv_heads, before, heads, window, sinks, kept,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """BN keys and values of a state and of the text after it, one after the other, with the scores so far.

    The state is that of `heads` heads, which follow `before` others.
    """
    k_b, k_h, k_t = k_strides
    v_b, v_h, v_t = v_strides
    own = tl.program_id(1).to(tl.int64)  # among the heads of the state
    b, head = own // heads, before + own % heads
    row = b * kv_heads + head
    begin = tl.minimum(tl.load(COUNT + b), window + sinks + kept).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(BEGIN + row, begin)
    n, d, e = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BE)
    KEYS += row * S * D
    VALUES += row * S * E
    is_new = (n >= begin) & (n < S)
    there = is_new & (n < begin + T)
    _copied(K + b * k_b + head * k_h, k_t, n - begin, there, KEYS, n, is_new, d, D)
    _copied(V + b * v_b + head * v_h, v_t, n - begin, there, VALUES, n, is_new, e, E)
    is_sink = (n < begin) & (n < sinks)
    _copied(SINK_K + own * sinks * D, D, n, is_sink, KEYS, n, is_sink, d, D)
    _copied(SINK_V + own * sinks * E, E, n, is_sink, VALUES, n, is_sink, e, E)
    is_recent = (n < begin) & (n >= sinks) & (n >= begin - window)
    source = n - begin + window  # window and slots are filled from the right
    _copied(RECENT_K + own * window * D, D, source, is_recent, KEYS, n, is_recent, d, D)
    _copied(RECENT_V + own * window * E, E, source, is_recent, VALUES, n, is_recent, e, E)
    if KEEPS:
        is_kept = (n >= sinks) & (n < begin - window)
        slot = n - begin + window + kept
        _copied(KEPT_K + own * kept * D, D, slot, is_kept, KEYS, n, is_kept, d, D)
        _copied(KEPT_V + own * kept * E, E, slot, is_kept, VALUES, n, is_kept, e, E)
        score = tl.load(RECENT_SCORE + own * window + source, mask=is_recent, other=0.0)
        score = tl.where(is_kept, tl.load(KEPT_SCORE + own * kept + slot, mask=is_kept, other=0.0), score)
        tl.store(SCORE + row * S + n, score, mask=n < S)


# -------------------------------------------------------------------------------------- scores of keys


@launched
@triton.jit(do_not_specialize=_ANY)
def _near(
    Q, K, LSE, EXACT, BEGIN, q_strides, k_strides, T, S, H, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """log₂ Σ e^x over window and sinks; −∞ for heads that keep no keys."""
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_t = k_strides
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    t, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)
    q = load_rows(Q + b * q_b + h * q_h, q_t, t, d, T, D)
    K += b * k_b + (h // GROUP) * k_h
    window, sinks, kept = _exact_of(EXACT, h // GROUP)
    begin = _first_place(BEGIN, b * (H // GROUP) + h // GROUP)
    first, end = tl.program_id(0) * BM + begin, T + begin
    m = t + begin
    total = tl.zeros((BM,), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    edge = tl.maximum(0, first - window + 1) // BN * BN
    of_sinks = tl.minimum(tl.cdiv(sinks, BN), edge // BN)
    tiles = of_sinks + tl.cdiv(tl.minimum(first + BM, end) - edge, BN)
    for tile in range(tl.where(kept > 0, tiles, 0)):
        start = tl.where(tile < of_sinks, tile * BN, edge + (tile - of_sinks) * BN)
        n = start + tl.arange(0, BN)
        k = load_rows(K, k_t, n, d, end, D)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if (start <= first + BM - 1 - window) | (start + BN - 1 > first):  # some query does not see all keys
            near = (n[None, :] > m[:, None] - window) | (n < sinks)[None, :]
            x = tl.where(near & (n[None, :] <= m[:, None]), x, float("-inf"))
        new = tl.maximum(largest, tl.max(x, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(largest - safe) + tl.sum(tl.exp2(x - safe[:, None]), 1)
        largest = new
    total = tl.where(kept > 0, total, 1.0)
    tl.store(LSE + (b * H + h) * T + t, largest + tl.log2(total), mask=t < T)


@launched
@triton.jit(do_not_specialize=_ANY)
def _received(
    Q, K, LSE, EXACT, SCORE, BEGIN, LENGTHS, q_strides, k_strides, T, S, H, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The attention that keys receive while they are in the window; 0 for sinks and heads that keep no keys.

    After a state it is added to SCORE. Queries that are padding give none.
    """
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_t = k_strides
    first = tl.program_id(0) * BN
    kv_heads = H // GROUP
    b, g = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    n, d = first + tl.arange(0, BN), tl.arange(0, BD)
    window, sinks, kept = _exact_of(EXACT, g)
    begin = _first_place(BEGIN, b * kv_heads + g)
    real = _real_tokens(LENGTHS, b, T)
    k = load_rows(K + b * k_b + g * k_h, k_t, n, d, T + begin, D)
    score = tl.zeros((BN,), tl.float32)
    end = tl.where(kept > 0, tl.minimum(real, first - begin + BN + window - 1), 0)
    for member in range(GROUP):
        h = g * GROUP + member
        for start in range(tl.maximum(first - begin, 0) // BM * BM, end, BM):
            t = start + tl.arange(0, BM)
            q = load_rows(Q + b * q_b + h * q_h, q_t, t, d, T, D)
            lse = tl.load(LSE + (b * H + h) * T + t, mask=t < real, other=float("inf"))
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
            at = start + begin
            if (at < first + BN - 1) | (at + BM > first + window):  # some key is not in every window
                m = t + begin
                inside = (m[None, :] >= n[:, None]) & (m[None, :] < n[:, None] + window)
                p = tl.where(inside, p, 0.0)
            score += tl.sum(p, 1)
    score = score / GROUP
    SCORE += (b * kv_heads + g) * S
    if BEGIN is not None:
        score += tl.load(SCORE + n, mask=n < S, other=0.0)
    tl.store(SCORE + n, tl.where(n < sinks, 0.0, score), mask=n < S)


@launched
@triton.jit(do_not_specialize=_ANY)
def _lifetimes(SCORE, EXACT, UNTIL, BEGIN, T, S, kv_heads, forever, BLOCK: tl.constexpr):
    """until_s of each key. Of equal scores the later key is better; heads that keep no keys need no scores.

    Padding is after the real tokens, so they see what they see without it. It takes part like other keys: the list of
    every tile then fits its capacity.
    """
    row = tl.program_id(1).to(tl.int64)
    window, sinks, kept = _exact_of(EXACT, row % kv_heads)
    end = _first_place(BEGIN, row) + T
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    SCORE += row * S
    own = tl.load(SCORE + n, mask=n < S, other=0.0)
    better = tl.zeros((BLOCK,), tl.int32)
    last = tl.full((BLOCK,), forever, tl.int32)  # the M-th better key, which takes the slot
    last = tl.where(kept == 0, n, last)
    for start in range(sinks, tl.where(kept > 0, end, sinks), BLOCK):
        if tl.min(better) < kept:
            u = start + tl.arange(0, BLOCK)
            other = tl.load(SCORE + u, mask=u < end, other=float("-inf"))
            beats = (other[:, None] > own[None, :]) | (
                (other[:, None] == own[None, :]) & (u[:, None] > n[None, :])
            )
            beats = (beats & (u < end)[:, None]).to(tl.int32)
            after = better + tl.sum(beats, 0)
            crosses = (better < kept) & (after >= kept)
            if tl.max(crosses.to(tl.int32)) > 0:
                before = better[None, :] + tl.cumsum(beats, 0) < kept
                last = tl.where(crosses, start + tl.sum(before.to(tl.int32), 0), last)
            better = after
    until = tl.minimum(window + tl.maximum(n, last), forever)
    if BEGIN is not None:  # an empty slot
        until = tl.where((kept > 0) & (own == float("-inf")), 0, until)
    tl.store(UNTIL + row * S + n, tl.where(n < sinks, forever, until), mask=n < S)


# --------------------------------------------------------------------------------- keys seen by a tile


@launched
@triton.jit(do_not_specialize=_ANY)
def _lists(UNTIL, LIST, COUNT, BEGIN, T, S, capacity, BM: tl.constexpr, BLOCK: tl.constexpr):
    """List the keys that a tile of queries sees: those that all of its queries see, then the others, both in text order.

    COUNT: how many there are, and how many all queries see.
    """
    tiles, row = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    begin = _first_place(BEGIN, row)
    first = tl.program_id(0) * BM + begin
    end = tl.minimum(first + BM, T + begin)
    at = row * tiles + tl.program_id(0)
    UNTIL += row * S
    count = 0
    for start in range(0, first, BLOCK):
        n = start + tl.arange(0, BLOCK)
        seen = (tl.load(UNTIL + n, mask=n < first, other=0) >= end).to(tl.int32)
        tl.store(LIST + at * capacity + count + tl.cumsum(seen, 0) - 1, n, mask=seen > 0)
        count += tl.sum(seen, 0)
    tl.store(COUNT + 2 * at + 1, count)
    for start in range(0, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        until = tl.load(UNTIL + n, mask=n < end, other=0)
        seen = ((until > first) & ((until < end) | (n >= first))).to(tl.int32)
        tl.store(LIST + at * capacity + count + tl.cumsum(seen, 0) - 1, n, mask=seen > 0)
        count += tl.sum(seen, 0)
    tl.store(COUNT + 2 * at, count)


@triton.jit
def _gathered_whole(pointer, stride_t, rows, columns, SIZE: tl.constexpr):
    """Rows of a matrix by index."""
    at = pointer + rows[:, None] * stride_t + columns[None, :]
    if columns.shape[0] == SIZE:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(columns < SIZE)[None, :], other=0.0)
    return found


@triton.jit
def _listed_keys(LIST, UNTIL, start, count, BN: tl.constexpr):
    """One tile of the list: the keys, their until, and whether the entry exists."""
    at = start + tl.arange(0, BN)
    there = at < count
    n = tl.load(LIST + at, mask=there, other=0)
    return n, tl.load(UNTIL + n, mask=there, other=0), there


# ------------------------------------------------------------------------------------------- attention


@launched
@triton.jit(do_not_specialize=_ANY)
def _forward(
    Q, K, V, UNTIL, LIST, COUNT, O, LSE, BEGIN,
    q_strides, k_strides, v_strides, o_strides, T, S, H, scale, capacity,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_t = k_strides
    v_b, v_h, v_t = v_strides
    o_b, o_h, o_t = o_strides
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    row = b * (H // GROUP) + g
    t, d, e = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    q = load_rows(Q + b * q_b + h * q_h, q_t, t, d, T, D)
    m = t + _first_place(BEGIN, row)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    UNTIL += row * S
    tile = row * tl.num_programs(0) + tl.program_id(0)
    LIST += tile * capacity
    count, by_all = tl.load(COUNT + 2 * tile), tl.load(COUNT + 2 * tile + 1) // BN * BN
    acc = tl.zeros((BM, BE), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    for start in range(0, by_all, BN):
        n = tl.load(LIST + start + tl.arange(0, BN))
        k, v = _gathered_whole(K, k_t, n, d, D), _gathered_whole(V, v_t, n, e, E)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        acc, total, largest = add_scores(acc, total, largest, x, v, PRECISION)
    for start in range(by_all, count, BN):
        n, until, there = _listed_keys(LIST, UNTIL, start, count, BN)
        k, v = _gathered(K, k_t, n, there, d, D), _gathered(V, v_t, n, there, e, E)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        x = tl.where((n[None, :] <= m[:, None]) & (m[:, None] < until[None, :]), x, float("-inf"))
        acc, total, largest = add_scores(acc, total, largest, x, v, PRECISION)
    total = tl.where(t < T, total, 1.0)  # every query sees its own key
    inside = (t < T)[:, None] & (e < E)[None, :]
    o = (acc / total[:, None]).to(O.dtype.element_ty)
    tl.store(O + b * o_b + h * o_h + t[:, None] * o_t + e[None, :], o, mask=inside)
    tl.store(LSE + (b * H + h) * T + t, (largest + tl.log2(total)) * _LN2, mask=t < T)


@launched
@triton.jit(do_not_specialize=_ANY)
def _backward_queries(
    Q, K, V, DO, UNTIL, LIST, COUNT, LSE, DELTA, DQ,
    q_strides, k_strides, v_strides, o_strides, dq_strides, T, H, scale, capacity,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_t = k_strides
    v_b, v_h, v_t = v_strides
    o_b, o_h, o_t = o_strides
    dq_b, dq_h, dq_t = dq_strides
    first = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    row = b * (H // GROUP) + g
    m, d, e = first + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    q = load_rows(Q + b * q_b + h * q_h, q_t, m, d, T, D)
    do = load_rows(DO + b * o_b + h * o_h, o_t, m, e, T, E)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    UNTIL += row * T
    tile = row * tl.num_programs(0) + tl.program_id(0)
    LIST += tile * capacity
    count = tl.load(COUNT + 2 * tile)
    rows = (b * H + h) * T + m
    lse = tl.load(LSE + rows, mask=m < T, other=float("inf")) * _LOG2E
    delta = tl.load(DELTA + rows, mask=m < T, other=0.0)
    dq = tl.zeros((BM, BD), tl.float32)
    for start in range(0, count, BN):
        n, until, there = _listed_keys(LIST, UNTIL, start, count, BN)
        k, v = _gathered(K, k_t, n, there, d, D), _gathered(V, v_t, n, there, e, E)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None]
        x = tl.where((n[None, :] <= m[:, None]) & (m[:, None] < until[None, :]), x, float("-inf"))
        dx = tl.exp2(x) * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)
    inside = (m < T)[:, None] & (d < D)[None, :]
    dq = (dq * (scale * _LN2)).to(DQ.dtype.element_ty)
    tl.store(DQ + b * dq_b + h * dq_h + m[:, None] * dq_t + d[None, :], dq, mask=inside)


@launched
@triton.jit(do_not_specialize=_ANY)
def _backward_keys(
    Q, K, V, DO, UNTIL, ORDER, LSE, DELTA, DK, DV,
    q_strides, k_strides, v_strides, o_strides, dk_strides, dv_strides, T, H, scale,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys (in ORDER), over all queries that see any of them; tiles are [keys, queries]."""
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_t = k_strides
    v_b, v_h, v_t = v_strides
    o_b, o_h, o_t = o_strides
    dk_b, dk_h, dk_t = dk_strides
    dv_b, dv_h, dv_t = dv_strides
    kv_heads = H // GROUP
    b, g = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    n = tl.load(ORDER + (b * kv_heads + g) * T + at, mask=at < T, other=T)
    k = load_rows(K + b * k_b + g * k_h, k_t, n, d, T, D)
    v = load_rows(V + b * v_b + g * v_h, v_t, n, e, T, E)
    until = tl.load(UNTIL + (b * kv_heads + g) * T + n, mask=n < T, other=0)
    begin, end = tl.min(n, 0) // BM * BM, tl.minimum(T, tl.max(until, 0))
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    for member in range(GROUP):
        h = g * GROUP + member
        for start in range(begin, end, BM):
            m = start + tl.arange(0, BM)
            rows = (b * H + h) * T + m
            q = load_rows(Q + b * q_b + h * q_h, q_t, m, d, T, D)
            do = load_rows(DO + b * o_b + h * o_h, o_t, m, e, T, E)
            lse = tl.load(LSE + rows, mask=m < T, other=float("inf")) * _LOG2E
            delta = tl.load(DELTA + rows, mask=m < T, other=0.0)
            x = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :]
            x = tl.where((n[:, None] <= m[None, :]) & (m[None, :] < until[:, None]), x, float("-inf"))
            p = tl.exp2(x)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dx = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
    dk = (dk * (scale * _LN2)).to(DK.dtype.element_ty)
    at = DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :]
    tl.store(at, dk, mask=(n < T)[:, None] & (d < D)[None, :])
    at = DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :]
    tl.store(at, dv.to(DV.dtype.element_ty), mask=(n < T)[:, None] & (e < E)[None, :])


# ------------------------------------------------------------------------------------- the state after it


@launched
@triton.jit(do_not_specialize=_ANY)
def _kept_at_the_end(
    UNTIL, LIST, COUNT, PLACES, BEGIN, LENGTHS, T, S, kv_heads, capacity, BLOCK: tl.constexpr
):  # fmt: skip
    """List the keys that have left the window and are still seen by the last token, in the order of the text."""
    row = tl.program_id(0).to(tl.int64)
    PLACES += row % kv_heads * 10
    window, sinks, kept = tl.load(PLACES), tl.load(PLACES + 1), tl.load(PLACES + 2)
    end = _first_place(BEGIN, row) + _real_tokens(LENGTHS, row // kv_heads, T)
    UNTIL += row * S
    count = 0
    for start in range(sinks, tl.where(kept > 0, end - window, sinks), BLOCK):
        n = start + tl.arange(0, BLOCK)
        seen = (tl.load(UNTIL + n, mask=n < end - window, other=-1) >= end).to(tl.int32)
        tl.store(LIST + row * capacity + count + tl.cumsum(seen, 0) - 1, n, mask=seen > 0)
        count += tl.sum(seen, 0)
    tl.store(COUNT + row, count)


@launched
@triton.jit(do_not_specialize=_ANY)
def _exact_keys(
    K, V, SCORE, LIST, COUNT, PLACES, KEYS, VALUES, SCORES, BEGIN, LENGTHS,
    k_strides, v_strides, T, S, kv_heads, capacity,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Copy BN exact keys. A partly filled window or slots are filled from the right, sinks from the left.

    PLACES: for each key-value head a line of `_Places`, which says where its keys go in KEYS, VALUES and SCORES.
    """
    k_b, k_h, k_t = k_strides
    v_b, v_h, v_t = v_strides
    row = tl.program_id(1).to(tl.int64)
    b, head = row // kv_heads, row % kv_heads
    PLACES += head * 10
    window, sinks, kept = tl.load(PLACES), tl.load(PLACES + 1), tl.load(PLACES + 2)
    own = b * tl.load(PLACES + 3) + tl.load(PLACES + 4)
    if tl.program_id(0) * BN < window + sinks + kept:
        K += b * k_b + head * k_h
        V += b * v_b + head * v_h
        SCORE += row * S
        end = _first_place(BEGIN, row) + _real_tokens(LENGTHS, b, T)
        d, e = tl.arange(0, BD), tl.arange(0, BE)
        place = tl.program_id(0) * BN + tl.arange(0, BN)
        inside, source = place < window, end - window + place
        there = inside & (source >= 0)
        to = tl.load(PLACES + 5) + own * window + place
        _copied(K, k_t, source, there, KEYS, to, inside, d, D)
        _copied(V, v_t, source, there, VALUES, to, inside, e, E)
        if KEEPS:
            score = tl.load(SCORE + source, mask=there, other=0.0)
            at = tl.load(PLACES + 8) + own * window + place
            tl.store(SCORES + at, score, mask=place < tl.where(kept > 0, window, 0))
        source = place - window
        inside = (source >= 0) & (source < sinks)
        to = tl.load(PLACES + 6) + own * sinks + source
        _copied(K, k_t, source, inside & (source < end), KEYS, to, inside, d, D)
        _copied(V, v_t, source, inside & (source < end), VALUES, to, inside, e, E)
        if KEEPS:
            slot = place - window - sinks
            inside = (slot >= 0) & (slot < kept)
            listed = slot - kept + tl.load(COUNT + row)
            there = inside & (listed >= 0)
            source = tl.load(LIST + row * capacity + listed, mask=there, other=0)
            to = tl.load(PLACES + 7) + own * kept + slot
            _copied(K, k_t, source, there, KEYS, to, inside, d, D)
            _copied(V, v_t, source, there, VALUES, to, inside, e, E)
            score = tl.load(SCORE + source, mask=there, other=float("-inf"))
            tl.store(SCORES + tl.load(PLACES + 9) + own * kept + slot, score, mask=inside)


# ------------------------------------------------------------------------------------------- launching


class Before(NamedTuple):
    """The state that a group of adjacent heads continues from."""

    #: tokens so far, [B]
    count: Tensor
    held: Held

    @property
    def group(self) -> GroupOfHeads:
        """How many heads and exact keys it has."""
        _, heads, window, _ = self.held.recent_k.shape
        kept = 0 if self.held.kept_k is None else self.held.kept_k.shape[2]
        return GroupOfHeads(heads, Exact(window, self.held.sink_k.shape[2], kept))


@on_its_device
def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    exact: ExactOfHeads,
    groups: tuple[GroupOfHeads, ...],
    lengths: Tensor | None = None,
    before: tuple[Before, ...] = (),
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """y [B, T, H, e] for q [B, T, H, d] and k, v [B, T, K, ·], without gradients; and the exact keys after the text.

    The exact keys are those of `exact_keys`, of each of the groups; none if no groups are given. `lengths` [B]: the
    real tokens of each row, with padding after them; None for all. `before`: the states of all groups, unless the text
    starts here. Everything that follows from shapes is computed once: a layer of a prompt takes few operations besides
    its launches.
    """
    its = _reading(
        q.shape, q.stride(), k.stride(), v.shape, v.stride(), q.dtype, v.dtype, q.device, scale, exact, groups,
        tuple(state.group for state in before),
    )  # fmt: skip
    y, lse, until, score, listed, count = new_tensors(q, *its.made)
    begin = None
    if before:
        keys, values, begin = new_tensors(q, *its.laid_out)
        for start, (so_far, held) in zip(its.lay_out, before, strict=True):
            start(k, v, so_far, *held, keys, values, score, begin)
        k, v = keys, values
    if its.keeps:
        its.scores.near(q, k, lse, its.table, begin)
        its.scores.received(q, k, lse, its.table, score, begin, lengths)
    its.scores.lifetimes(score, its.table, until, begin)
    its.lists(until, listed, count, begin)
    its.forward(q, k, v, until, listed, count, y, lse, begin)
    if its.end is None:
        return y, []
    return y, _written(its.end, its.places, k, v, until, score, begin, lengths)


class _Reading(NamedTuple):
    """The launches of `read`, their tables, and the tensors they write."""

    #: one for each group of the state before the text, and keys, values and their places, if there is a state
    lay_out: tuple[Launch, ...]
    laid_out: tuple[New, ...]
    scores: _ScoreLaunches
    lists: Launch
    forward: Launch
    end: _End | None
    keeps: bool
    table: Tensor
    places: Tensor | None
    made: tuple[New, ...]


@by_shapes
def _reading(
    q_shape: tuple[int, ...],
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_shape: tuple[int, ...],
    v_strides: tuple[int, ...],
    dtype: torch.dtype,
    v_dtype: torch.dtype,
    device: torch.device,
    scale: float,
    exact: ExactOfHeads,
    groups: tuple[GroupOfHeads, ...],
    before: tuple[GroupOfHeads, ...],
) -> _Reading:
    batch, tokens, heads, d = q_shape
    kv_heads, e = v_shape[2:]

    def heads_first(number: int, size: int, strides: tuple[int, ...], its: torch.dtype) -> Layout:
        by_batch, by_token, by_head, by_entry = strides
        return Layout((batch, number, tokens, size), (by_batch, by_head, by_token, by_entry), its)

    q, k = heads_first(heads, d, q_strides, dtype), heads_first(kv_heads, d, k_strides, dtype)
    v = heads_first(kv_heads, e, v_strides, v_dtype)
    y = heads_first(heads, e, (tokens * heads * e, heads * e, e, 1), v_dtype)
    lay_out: tuple[Launch, ...] = ()
    laid_out: tuple[New, ...] = ()
    if before:
        longest = max(head.most for head in exact) + tokens
        lay_out = tuple(_lay_out_launches(k, v, longest, before))
        k, v = (Layout.contiguous((batch, kv_heads, longest, u.shape[3]), u.dtype) for u in (k, v))
        laid_out = (New(k.shape, k.dtype), New(v.shape, v.dtype), New((batch, kv_heads), torch.int32))
    keys = k.shape[2]
    queries = tile_options(TILES["forward"], q, v, tokens)["BM"]
    tiles, capacity = cdiv(tokens, queries), _capacity(exact, queries, keys)
    of_keys = (batch, kv_heads, keys)
    return _Reading(
        lay_out,
        laid_out,
        _score_launches(q, k, scale),
        _lists_launch(tiles, batch * kv_heads, tokens, keys, capacity, queries),
        _forward_launch(q, k, v, y, scale, capacity),
        _end(k, v, torch.float32, groups, tokens) if groups else None,
        any(head.kept for head in exact),
        _table(exact, device),
        _table_of_places(batch, groups, device) if groups else None,
        (
            New((batch, tokens, heads, e), v_dtype),
            New((batch, heads, tokens), torch.float32),
            New(of_keys, torch.int32),
            New(of_keys, torch.float32),
            New((batch, kv_heads, tiles, capacity), torch.int32),
            New((batch, kv_heads, tiles, 2), torch.int32),
        ),
    )


def _lay_out_launches(k: Layout, v: Layout, keys: int, before: tuple[GroupOfHeads, ...]) -> Iterator[Launch]:
    """For each group of a state, the launch that puts its keys before those of the text; `keys`: how many in all."""
    batch, kv_heads, tokens, d = k.shape
    e, first = v.shape[3], 0
    for heads, exact in before:
        sizes = {
            "D": d, "E": e, "BD": width(d), "BE": width(e), "BN": 64, "KEEPS": exact.kept > 0, "num_warps": 4
        }  # fmt: skip
        yield prepared(
            _lay_out,
            (cdiv(keys, 64), batch * heads),
            (k.strides[:3], v.strides[:3], tokens, keys, kv_heads, first, heads, *exact),
            sizes,
        )
        first += heads


@on_its_device
def lifetimes(q: Tensor, k: Tensor, scale: float, exact: ExactOfHeads) -> tuple[Tensor, Tensor]:
    """until [B, K, T] in int32, and scores [B, K, T] in fp32 (zeros for heads that keep no keys)."""
    batch, heads, tokens, _ = q.shape
    kv_heads, keeps = k.shape[1], any(head.kept for head in exact)
    table = _table(exact, q.device)
    until = torch.empty(batch, kv_heads, tokens, dtype=torch.int32, device=q.device)
    make = torch.empty if keeps else torch.zeros
    score = make(batch, kv_heads, tokens, dtype=torch.float32, device=q.device)
    launches = _score_launches(Layout.of(q), Layout.of(k), scale)
    if keeps:
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
        launches.near(q, k, lse, table, None)
        launches.received(q, k, lse, table, score, None, None)
    launches.lifetimes(score, table, until, None)
    return until, score


class _ScoreLaunches(NamedTuple):
    near: Launch
    received: Launch
    lifetimes: Launch


@by_shapes
def _score_launches(q: Layout, k: Layout, scale: float) -> _ScoreLaunches:
    batch, heads, tokens, d = q.shape
    kv_heads, keys = k.shape[1:3]
    sizes = {"GROUP": heads // kv_heads, "D": d, "BD": width(d), "PRECISION": precision(q)}
    numbers = (q.strides[:3], k.strides[:3], tokens, keys, heads, scale * _LOG2E.value)
    near, received = (tile_options(TILES[name], q, q, tokens) for name in ("near", "received"))
    return _ScoreLaunches(
        prepared(_near, (cdiv(tokens, near["BM"]), batch * heads), numbers, {**sizes, **near}),
        prepared(_received, (cdiv(keys, received["BN"]), batch * kv_heads), numbers, {**sizes, **received}),
        prepared(
            _lifetimes,
            (cdiv(keys, _COMPARED), batch * kv_heads),
            (tokens, keys, kv_heads, FOREVER),
            {"BLOCK": _COMPARED, "num_warps": 4},
        ),
    )


@on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, until: Tensor, scale: float, exact: ExactOfHeads
) -> tuple[Tensor, Tensor]:
    """o [B, H, T, e] in the dtype of v and lse [B, H, T]."""
    batch, heads, tokens, _ = q.shape
    o = torch.empty(batch, tokens, heads, v.shape[3], dtype=v.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    of_q, of_v = Layout.of(q), Layout.of(v)
    listed, count, capacity = _keys_of_tiles(
        until, exact, tile_options(TILES["forward"], of_q, of_v, tokens)["BM"]
    )
    start = _forward_launch(of_q, Layout.of(k), of_v, Layout.of(o), scale, capacity)
    start(q, k, v, until, listed, count, o, lse, None)
    return o, lse


@by_shapes
def _forward_launch(q: Layout, k: Layout, v: Layout, o: Layout, scale: float, capacity: int) -> Launch:
    batch, heads, tokens, _ = q.shape
    tile = tile_options(TILES["forward"], q, v, tokens)
    strides = (q.strides[:3], k.strides[:3], v.strides[:3], o.strides[:3])
    numbers = (*strides, tokens, k.shape[2], heads, scale * _LOG2E.value, capacity)
    return prepared(_forward, (cdiv(tokens, tile["BM"]), batch * heads), numbers, {**_sizes(q, k, v), **tile})


@on_its_device
def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, until: Tensor, lse: Tensor, delta: Tensor, scale: float,
    exact: ExactOfHeads,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv."""
    batch, heads, tokens, _ = q.shape
    dq, dk, dv = (torch.empty_like(u) for u in (q, k, v))
    strides = (q.stride()[:3], k.stride()[:3], v.stride()[:3], do.stride()[:3])
    tile = tile_options(TILES["queries"], q, v, tokens)
    listed, count, capacity = _keys_of_tiles(until, exact, tile["BM"])
    _backward_queries[(cdiv(tokens, tile["BM"]), batch * heads)](
        q, k, v, do, until, listed, count, lse, delta, dq, *strides, dq.stride()[:3],
        tokens, heads, scale * _LOG2E.value, capacity, **_sizes(q, k, v), **tile,
    )  # fmt: skip
    tile = tile_options(TILES["keys"], q, v, tokens)
    _backward_keys[(cdiv(tokens, tile["BN"]), batch * k.shape[1])](
        q, k, v, do, until, _order(until, exact), lse, delta, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3],
        tokens, heads, scale * _LOG2E.value, **_sizes(q, k, v), **tile,
    )  # fmt: skip
    return dq, dk, dv


@on_its_device
def exact_keys(
    k: Tensor, v: Tensor, until: Tensor, score: Tensor, groups: tuple[GroupOfHeads, ...]
) -> list[dict[str, Tensor]]:
    """Exact keys of the states after the text, of each group of adjacent heads, by name.

    They are the last, the first and the kept ones, each oldest first, for until and score [B, K, T]. All of them
    are views of one tensor of keys, one of values and one of scores.
    """
    end = _end(Layout.of(k), Layout.of(v), score.dtype, groups, k.shape[2])
    return _written(end, _table_of_places(k.shape[0], groups, k.device), k, v, until, score, None, None)


def _written(
    end: _End,
    places: Tensor | None,
    k: Tensor,
    v: Tensor,
    until: Tensor,
    score: Tensor,
    begin: Tensor | None,
    lengths: Tensor | None,
) -> list[dict[str, Tensor]]:
    """Launch the end of a text."""
    keys, values, scores = new_tensors(k, *end.made)
    if end.listed is None:
        end.copied(k, v, score, None, None, places, keys, values, None, begin, lengths)
    else:
        listed, count = new_tensors(k, *end.lists)
        end.listed(until, listed, count, places, begin, lengths)
        end.copied(k, v, score, listed, count, places, keys, values, scores, begin, lengths)
    whole = (keys, values, scores)
    return [
        {name: whole[which].as_strided(*view) for name, which, view in of_group} for of_group in end.views
    ]


class GroupOfHeads(NamedTuple):
    """Adjacent key-value heads with the same exact keys."""

    heads: int
    exact: Exact


class _Places(NamedTuple):
    """Where the exact keys of a head are, in rows of the tensors of all groups; `_exact_keys` reads it."""

    window: int
    sinks: int
    kept: int
    #: heads of its group, and its number among them
    heads: int
    number: int
    #: first rows of its group among keys and values: the last keys, the first ones, the kept ones
    recent: int
    sink: int
    slots: int
    #: first places of its group among scores
    recent_score: int
    kept_score: int


#: scores of a group begin at multiples of this, so that they are aligned to 16 bytes
_ALIGNED_SCORES = 4


@by_shapes
def _places(batch: int, groups: tuple[GroupOfHeads, ...]) -> tuple[tuple[_Places, ...], int, int]:
    """The places of the first head of each group, and how many rows of keys and places of scores there are."""
    found, rows, scores = [], 0, 0

    def aligned(number: int) -> int:
        return cdiv(number, _ALIGNED_SCORES) * _ALIGNED_SCORES

    for heads, (window, sinks, kept) in groups:
        each = batch * heads
        sink, slots = rows + each * window, rows + each * (window + sinks)
        kept_score = scores + (aligned(each * window) if kept else 0)
        found.append(_Places(window, sinks, kept, heads, 0, rows, sink, slots, scores, kept_score))
        rows += each * (window + sinks + kept)
        scores = kept_score + (aligned(each * kept) if kept else 0)
    return tuple(found), rows, scores


@by_shapes
def _table_of_places(batch: int, groups: tuple[GroupOfHeads, ...], device: torch.device) -> Tensor:
    """The places of each head on the device, [K, 10]."""
    lines = [first._replace(number=n) for first in _places(batch, groups)[0] for n in range(first.heads)]
    with torch.inference_mode(False):
        return torch.tensor(lines, dtype=torch.int32, device=device)


#: shape, strides and offset of a part of a tensor
_View = tuple[tuple[int, ...], tuple[int, ...], int]


class _End(NamedTuple):
    """The launches that make the exact keys after a text, the tensors they write, and the parts of these."""

    listed: Launch | None
    copied: Launch
    lists: tuple[New, ...]
    made: tuple[New, ...]
    #: of each group: name, which tensor (keys, values, scores), and where
    views: tuple[tuple[tuple[str, int, _View], ...], ...]


@by_shapes
def _end(k: Layout, v: Layout, of_scores: torch.dtype, groups: tuple[GroupOfHeads, ...], tokens: int) -> _End:
    batch, kv_heads, all_keys, d = k.shape
    e, capacity = v.shape[3], max(group.exact.kept for group in groups)
    first, rows, scores = _places(batch, groups)
    numbers = (tokens, all_keys, kv_heads, capacity)
    sizes = {
        "D": d,
        "E": e,
        "BD": width(d),
        "BE": width(e),
        "BN": 64,
        "KEEPS": capacity > 0,
        "num_warps": 4,
    }
    block = {"BLOCK": min(_LISTED, width(all_keys)), "num_warps": 4}
    most = max(group.exact.most for group in groups)
    return _End(
        prepared(_kept_at_the_end, (batch * kv_heads,), numbers, block) if capacity else None,
        prepared(
            _exact_keys,
            (cdiv(most, 64), batch * kv_heads),
            (k.strides[:3], v.strides[:3], *numbers),
            sizes,
        ),
        (New((batch * kv_heads, capacity), torch.int32), New((batch * kv_heads,), torch.int32)),
        (New((rows, d), k.dtype), New((rows, e), v.dtype), New((scores,), of_scores)),
        tuple(tuple(_views(batch, places, d, e)) for places in first),
    )


def _views(batch: int, places: _Places, d: int, e: int) -> Iterator[tuple[str, int, _View]]:
    """The tensors of a group by name; those with scores only if keys are kept."""
    heads = places.heads
    numbers = {"recent": (places.window, places.recent), "sink": (places.sinks, places.sink)}
    if places.kept:
        numbers["kept"] = places.kept, places.slots
    for name, (number, row) in numbers.items():
        for letter, which, size in (("k", 0, d), ("v", 1, e)):
            strides = (heads * number * size, number * size, size, 1)
            yield f"{name}_{letter}", which, ((batch, heads, number, size), strides, row * size)
    if places.kept:
        of_scores = (("recent", places.window, places.recent_score), ("kept", places.kept, places.kept_score))
        for name, number, start in of_scores:
            yield f"{name}_score", 2, ((batch, heads, number), (heads * number, number, 1), start)


def _order(until: Tensor, exact: ExactOfHeads) -> Tensor:
    """The order of keys in tiles: those dropped with the window first, then those seen longer, both in text order.

    A tile loops over all queries that see any of its keys, so the few keys with long lives are put together.
    """
    number = torch.arange(until.shape[2], dtype=torch.int32, device=until.device)
    if not any(head.kept for head in exact):
        return number.expand(until.shape).contiguous()
    windows = _table(exact, until.device)[:, :1]
    lives_long = until > number + windows
    return lives_long.to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)


def _keys_of_tiles(until: Tensor, exact: ExactOfHeads, queries: int) -> tuple[Tensor, Tensor, int]:
    """Lists [B, K, tiles, capacity] of keys, how many keys each holds and all queries see, and the capacity."""
    batch, kv_heads, tokens = until.shape
    tiles = cdiv(tokens, queries)
    capacity = _capacity(exact, queries, tokens)
    listed = torch.empty(batch, kv_heads, tiles, capacity, dtype=torch.int32, device=until.device)
    count = torch.empty(batch, kv_heads, tiles, 2, dtype=torch.int32, device=until.device)
    _lists_launch(tiles, batch * kv_heads, tokens, tokens, capacity, queries)(until, listed, count, None)
    return listed, count, capacity


def _capacity(exact: ExactOfHeads, queries: int, keys: int) -> int:
    """The most of the keys that a tile of queries sees."""
    return min(max(head.most for head in exact) + queries, keys)


@by_shapes
def _lists_launch(tiles: int, rows: int, tokens: int, keys: int, capacity: int, queries: int) -> Launch:
    options = {"BM": queries, "BLOCK": min(_LISTED, width(keys)), "num_warps": 4}
    return prepared(_lists, (tiles, rows), (tokens, keys, capacity), options)


def _sizes(q: Tensor | Layout, k: Tensor | Layout, v: Tensor | Layout) -> dict:
    d, e = q.shape[3], v.shape[3]
    return {
        "GROUP": q.shape[1] // k.shape[1], "D": d, "E": e, "BD": width(d), "BE": width(e), "PRECISION": precision(q)
    }  # fmt: skip
