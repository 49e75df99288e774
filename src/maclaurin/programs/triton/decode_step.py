"""Add one token to a state and read the state with its queries: one pass over the state, one over partial sums.

    S ← f S + w φ(k) [v, 1]ᵀ,        sums of order n:  Σ_{f of order n} φ_f(c q) S_f,          y = Σ_n α_n sums / D

with coefficients α_n that are numbers, or polynomials in the row's mean score, which follows from the sums.

The features of a head are split into blocks, one per program, so that batch size 1 fills the GPU. A feature is a
product of entries times a root, φ_f(x) = r_f Π_j x_{i_fj}, computed in registers; an index of d stands for the
factor 1. Each block writes its part of the sums, and a second program adds them up. If the coefficients are numbers,
the first program applies them, and a block may have features of several orders. No address of the state depends on
anything in memory.

With an exact window and sinks, the state holds the tail, that is all keys between them:

    w_s = e^{x_s − c}      for the last w keys, including the token's own, and the sinks
    w_s = κ(x_s)           for the tail; c is its mean score, or 0

The first program adds the key that leaves the window to the state and reads the state. The second adds the
exact keys, divides by the row sum, and writes the window shifted by one place.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import launch, on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.tiles import cdiv, divisor_of, power_of_2, width

#: features per block, and numbers of the state in it, at most
BLOCK = 32
TILE = 16384
#: columns that one warp holds; of longer rows it holds 64
COLUMNS = 128
#: numbers in a tile of sums that are added up
ADDED = 4096
#: warps that add them up
WARPS = 8


#: α_nj of each order n: its coefficient is Σ_j α_nj (−c)ʲ with the row's mean score c, or α_n0 alone
Table = tuple[tuple[float, ...], ...]


class Token(NamedTuple):
    """One token: k [B, K, d], q [B, H, d], v [B, K, e], or with a token axis as [B, 1, …]; log_forget and weight [B, K]
    in fp32, or None for 0 and 1.

    With a `count` [B] of earlier keys, the key is added only if count ≥ late.
    """

    k: Tensor
    q: Tensor
    v: Tensor
    log_forget: Tensor | None = None
    weight: Tensor | None = None
    count: Tensor | None = None
    late: int = 0


class Layout(NamedTuple):
    """Features are products of the entries [F, degree] times roots [F]; each order has `sizes` of them, in order."""

    entries: Tensor
    roots: Tensor
    sizes: tuple[int, ...]


# ------------------------------------------------------------------------------------------------------ blocks


class Split(NamedTuple):
    """Group n has the features features[n] … features[n + 1] − 1, in the blocks blocks[n] … blocks[n + 1] − 1 of up to
    `size` features."""

    features: tuple[int, ...]
    blocks: tuple[int, ...]
    size: int

    @property
    def number(self) -> int:
        """Blocks per head."""
        return self.blocks[-1]

    @property
    def is_full(self) -> bool:
        """Whether no group is smaller than a block."""
        return all(b - a >= self.size for a, b in pairwise(self.features))


def split(groups: tuple[int, ...], values: int) -> Split:
    """Blocks of features in groups of these sizes, for values of that size."""
    size = min(BLOCK, TILE // width(values))
    blocks = (cdiv(group, size) for group in groups)
    return Split(tuple(accumulate(groups, initial=0)), tuple(accumulate(blocks, initial=0)), size)


def split_for(sizes: tuple[int, ...], table: Table | None, values: int) -> Split:
    """Blocks with features of one order each, unless the table has one number per order."""
    separate = table is None or is_centred(table)
    return split(sizes if separate else (sum(sizes),), values)


def _warps(values: int) -> int:
    """Warps of a program. Each has all features of a block, so that sums over them need no exchange between warps."""
    columns = width(values)
    return 1 if columns <= COLUMNS else min(8, columns // 64)


def is_centred(table: Table) -> bool:
    """Whether the coefficients depend on the row's mean score."""
    return any(len(line) > 1 for line in table)


def flat(table: Table) -> tuple[float, ...]:
    """The lines of a table, padded with zeros to equal length, one after the other."""
    return tuple(a for line in table for a in (*line, *(0.0,) * (len(table) - len(line))))


def _padded(columns: int) -> int:
    """Numbers between the sums of two blocks; 16 bytes are read at a time."""
    return 4 * cdiv(columns, 4)


# --------------------------------------------------------------------------------------------------- the sums


@triton.jit
def add_up(PARTIAL, start, stop, e, E: tl.constexpr, P: tl.constexpr, BB: tl.constexpr):
    """The sum of what blocks start … stop − 1 have written for one query, whose partial sums are at PARTIAL."""
    total = tl.zeros((BB, e.shape[0]), tl.float32)
    for first in tl.range(start, stop, BB, loop_unroll_factor=4):
        block = first + tl.arange(0, BB)
        here = (block < stop)[:, None] & (e < E)[None, :]
        total += tl.load(PARTIAL + block[:, None] * P + e[None, :], mask=here, other=0.0)
    return tl.sum(total, 0)


@launched
@triton.jit
def _sums(
    PARTIAL, SUMS, rows,
    BLOCKS: tl.constexpr, ORDERS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, P: tl.constexpr,
    BB: tl.constexpr,
):  # fmt: skip
    """The sums of each order for one query."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    for n in tl.static_range(ORDERS):
        total = add_up(PARTIAL + row * BLOCKS[ORDERS] * P, BLOCKS[n], BLOCKS[n + 1], e, E, P, BB)
        tl.store(SUMS + (n * rows + row) * E + e, total, mask=e < E)


@triton.jit
def mean_score(PARTIAL, BLOCKS: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BB: tl.constexpr):
    """z₁/z₀ of a query's row, from orders 0 and 1 of the column that counts keys; 0 for an empty row."""
    last = E - 1 + tl.arange(0, 1)
    count = tl.sum(add_up(PARTIAL, BLOCKS[0], BLOCKS[1], last, E, P, BB), 0)
    first = tl.sum(add_up(PARTIAL, BLOCKS[1], BLOCKS[2], last, E, P, BB), 0)
    return tl.where(count > 1e-30, first / tl.where(count > 1e-30, count, 1.0), 0.0)


@triton.jit
def weighed_sums(
    PARTIAL, centre, e, BLOCKS: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BB: tl.constexpr,
    TABLE: tl.constexpr, ORDERS: tl.constexpr,
):  # fmt: skip
    """Σ_n α_n(c) · (sums of order n) for one query; the coefficients of α_n start at TABLE[n ORDERS]."""
    total = tl.zeros(e.shape, tl.float32)
    for n in tl.static_range(ORDERS):
        weight, power = 0.0, 1.0
        for j in tl.static_range(ORDERS):
            weight += TABLE[n * ORDERS + j] * power
            power *= -centre
        total += weight * add_up(PARTIAL, BLOCKS[n], BLOCKS[n + 1], e, E, P, BB)
    return total


@launched
@triton.jit
def _rows(
    PARTIAL, COUNT, Y, AFTER, eps,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, P: tl.constexpr, BB: tl.constexpr,
    TABLE: tl.constexpr, ORDERS: tl.constexpr, CENTRED: tl.constexpr, BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """The row of one query divided by its denominator; and the token count, one higher."""
    row = tl.program_id(0).to(tl.int64)
    VALUES: tl.constexpr = E - 1 if COUNTED else E
    e = tl.arange(0, BE)
    PARTIAL += row * BLOCKS[ORDERS] * P
    seen = tl.load(COUNT + row // HEADS) + 1
    centre = mean_score(PARTIAL, BLOCKS, E, P, BB) if CENTRED else 0.0
    total = weighed_sums(PARTIAL, centre, e, BLOCKS, VALUES, P, BB, TABLE, ORDERS)
    last = tl.zeros((1,), tl.float32)
    if BY_SUM:
        last = weighed_sums(PARTIAL, centre, E - 1 + tl.arange(0, 1), BLOCKS, E, P, BB, TABLE, ORDERS)
    divisor = divisor_of(tl.sum(last, 0), seen, eps, BY_SUM, BY_COUNT)
    tl.store(Y + row * VALUES + e, (total / divisor).to(Y.dtype.element_ty), mask=e < VALUES)
    tl.store(AFTER + row // HEADS, seen, mask=row % HEADS == 0)


# -------------------------------------------------------------------------------------------------- the state


@triton.jit
def _span(block, FEATURES: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, BF: tl.constexpr):
    """The first feature of a block, and the end of its group."""
    first, stop = block * BF, FEATURES[1]
    for n in tl.static_range(1, GROUPS):
        first = tl.where(block < BLOCKS[n], first, FEATURES[n] + (block - BLOCKS[n]) * BF)
        stop = tl.where(block < BLOCKS[n], stop, FEATURES[n + 1])
    return first, stop


@triton.jit
def _entries(INDEX, f, there, D: tl.constexpr, DEGREE: tl.constexpr):
    """Which entries are multiplied for the features f."""
    found = ()
    for j in tl.static_range(DEGREE):
        found = found + (tl.load(INDEX + f * DEGREE + j, mask=there, other=D),)  # noqa: RUF005 (no stars in triton)
    return found


@triton.jit
def _features(X, entries, root, scale, D: tl.constexpr, DEGREE: tl.constexpr):
    """φ_f(scale x) for the features with these entries and roots."""
    found = root
    for j in tl.static_range(DEGREE):
        i = entries[j]
        entry = tl.load(X + i, mask=i < D, other=0.0).to(tl.float32) * scale
        found *= tl.where(i < D, entry, 1.0)
    return found


@triton.jit
def _coefficients(f, FIRST: tl.constexpr, TABLE: tl.constexpr, ORDERS: tl.constexpr):
    """α_n of the features f; order n starts at feature FIRST[n]."""
    found = tl.full(f.shape, TABLE[0], tl.float32)
    for n in tl.static_range(1, ORDERS):
        found = tl.where(f < FIRST[n], found, TABLE[n])
    return found


@launched
@triton.jit
def _step(
    S, K, Q, V, LOG_FORGET, WEIGHT, COUNT, INDEX, ROOT, OUT, PARTIAL,
    k_strides, q_strides, v_strides, f_strides, w_strides, late, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    P: tl.constexpr, BF: tl.constexpr, FEATURES: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
    FIRST: tl.constexpr, TABLE: tl.constexpr, ORDERS: tl.constexpr, DEGREE: tl.constexpr,
    FULL: tl.constexpr, COUNTED: tl.constexpr, FORGETS: tl.constexpr, WEIGHED: tl.constexpr, DELAYED: tl.constexpr,
):  # fmt: skip
    """One block of the features of one key-value head. COUNTED: the last column of the state counts keys.

    FULL: no group is smaller than a block. The last block of a group then starts early enough to be full; features that
    the block before it has too get the same values again, and are left out of the sums.
    With ORDERS > 0 the sums are multiplied by the coefficients in TABLE.
    """
    k_b, k_h = k_strides
    q_b, q_h = q_strides
    v_b, v_h = v_strides
    f_b, f_h = f_strides
    w_b, w_h = w_strides
    number = BLOCKS[GROUPS]
    row, block = (tl.program_id(0) // number).to(tl.int64), tl.program_id(0) % number
    b, h = row // HEADS, row % HEADS
    first, stop = _span(block, FEATURES, BLOCKS, GROUPS, BF)
    start = tl.minimum(first, stop - BF) if FULL else first
    VALUES: tl.constexpr = E - 1 if COUNTED else E
    e, lines = tl.arange(0, BE), tl.arange(0, BF)
    f = start + lines
    there = tl.full((BF,), True, tl.int1) if FULL else f < stop
    entries, root = _entries(INDEX, f, there, D, DEGREE), tl.load(ROOT + f, mask=there, other=0.0)
    at = (row * F + start) * E
    place, last = lines[:, None] * E + e[None, :], lines * E + VALUES
    inside = there[:, None] & (e < VALUES)[None, :]
    state = tl.load(S + at + place, mask=inside, other=0.0)
    if COUNTED:
        count = tl.load(S + at + last, mask=there, other=0.0)
    tl.debug_barrier()  # without it, loads of the state start after the entries are there
    value = tl.load(V + b * v_b + h * v_h + e, mask=e < VALUES, other=0.0).to(tl.float32)
    key = _features(K + b * k_b + h * k_h, entries, root, 1.0, D, DEGREE)
    if WEIGHED:
        key *= tl.load(WEIGHT + b * w_b + h * w_h)
    if DELAYED:
        key *= (tl.load(COUNT + b) >= late).to(tl.float32)
    kept = tl.exp(tl.load(LOG_FORGET + b * f_b + h * f_h).to(tl.float32)) if FORGETS else 1.0
    if ORDERS > 0:
        root *= _coefficients(f, FIRST, TABLE, ORDERS)
    if FULL:
        root = tl.where(f < first, 0.0, root)
    queries = ()
    for n in tl.static_range(GROUP):
        query = Q + b * q_b + (h * GROUP + n) * q_h
        queries = queries + (_features(query, entries, root, scale, D, DEGREE),)  # noqa: RUF005
    state = state * kept + key[:, None] * value[None, :]
    tl.store(OUT + at + place, state, mask=inside)
    if COUNTED:
        count = count * kept + key
        tl.store(OUT + at + last, count, mask=there)
    for n in tl.static_range(GROUP):
        sums = PARTIAL + ((row * GROUP + n) * number + block) * P
        tl.store(sums + e, tl.sum(queries[n][:, None] * state, 0), mask=e < VALUES)
        if COUNTED:
            tl.store(sums + VALUES, tl.sum(queries[n] * count, 0))


# ------------------------------------------------------------------------------------------------ the launches


def _by_head(u: launch.Layout) -> tuple[int, int]:
    """Strides over batch and heads."""
    return u.strides[0], u.strides[-2]


@launch.by_shapes
def _pass_launch(
    state: tuple[int, ...],
    k: launch.Layout,
    q: launch.Layout,
    v: launch.Layout,
    of_forget: tuple[int, int] | None,
    of_weight: tuple[int, int] | None,
    late: int | None,
    scale: float,
    sizes: tuple[int, ...],
    degree: int,
    table: Table | None,
) -> tuple[launch.Launch, Split]:
    """The pass over the state, and the blocks that it reads."""
    batch, heads, size, e = state
    values, group = v.shape[-1], q.shape[-2] // heads
    blocks = split_for(sizes, table, values)
    coefficients = () if table is None or is_centred(table) else tuple(a for (a,) in table)
    numbers = (
        _by_head(k), _by_head(q), _by_head(v), of_forget or (0, 0), of_weight or (0, 0), late or 0, scale,
    )  # fmt: skip
    options = {
        "HEADS": heads, "GROUP": group, "D": k.shape[-1], "F": size, "E": e, "BE": width(values), "P": _padded(e),
        "BF": blocks.size, "FEATURES": blocks.features, "BLOCKS": blocks.blocks, "GROUPS": len(blocks.blocks) - 1,
        "FIRST": tuple(accumulate(sizes, initial=0)), "TABLE": coefficients, "ORDERS": len(coefficients),
        "DEGREE": degree, "FULL": blocks.is_full, "COUNTED": e > values, "FORGETS": of_forget is not None,
        "WEIGHED": of_weight is not None, "DELAYED": late is not None, "num_warps": _warps(values),
    }  # fmt: skip
    return launch.prepared(_step, (batch * heads * blocks.number,), numbers, options), blocks


def pass_over(
    state: Tensor, token: Token, layout: Layout, scale: float, table: Table | None
) -> tuple[Tensor, Tensor, Split]:
    """The state after the token, and each block's part of its queries' sums [B, H, blocks, at least E]."""
    k, q, v, log_forget, weight, count, late = token
    queries = launch.Layout.of(q)
    start, blocks = _pass_launch(
        state.shape, launch.Layout.of(k), queries, launch.Layout.of(v),
        None if log_forget is None else log_forget.stride(), None if weight is None else weight.stride(),
        None if count is None else late, scale, layout.sizes, layout.entries.shape[1], table,
    )  # fmt: skip
    out = torch.empty_like(state)
    shape = (state.shape[0], queries.shape[-2], blocks.number, _padded(state.shape[3]))
    partial = torch.empty(shape, dtype=torch.float32, device=state.device)
    start(state, k, q, v, log_forget, weight, count, layout.entries, layout.roots, out, partial)
    return out, partial, blocks


class _Sums(NamedTuple):
    """Compile-time arguments of a program that adds up the sums of all blocks."""

    BLOCKS: tuple[int, ...]
    ORDERS: int
    E: int
    BE: int
    P: int
    BB: int


@launch.by_shapes
def _adding(blocks: Split, e: int, columns: int) -> dict[str, Any]:
    """For so many columns of the sums; E = e."""
    groups, most = blocks.blocks, max((b - a for a, b in pairwise(blocks.blocks)), default=1)
    height = min(power_of_2(most), max(1, ADDED // width(columns)))
    return _Sums(groups, len(groups) - 1, e, width(columns), _padded(e), height)._asdict()


@launch.by_shapes
def _coefficients_left(table: Table) -> dict[str, Any]:
    """What multiplies the sums when they are added up: nothing, if the coefficients are numbers."""
    centred = is_centred(table)
    return {"TABLE": flat(table) if centred else (1.0,), "CENTRED": centred}


@on_its_device
def sums(state: Tensor, token: Token, layout: Layout) -> tuple[Tensor, Tensor]:
    """The state after the token, and the sums of each order for its queries [orders, B, H, E].

    state [B, K, F, E] in fp32, contiguous; E = e, or e + 1 if it counts keys.
    """
    out, partial, blocks = pass_over(state, token, layout, 1.0, None)
    batch, heads, e = *partial.shape[:2], state.shape[3]
    found = torch.empty(len(layout.sizes), batch, heads, e, dtype=torch.float32, device=state.device)
    rows = batch * heads
    _sums[(rows,)](partial, found, rows, **_adding(blocks, e, e), num_warps=WARPS)
    return out, found


@on_its_device
def rows(
    state: Tensor,
    count: Tensor,
    token: Token,
    layout: Layout,
    scale: float,
    table: Table,
    divisor: str,
    eps: float,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, 1, H, e], the state and the count of keys after the token; the table has a line per order of the layout.

    Rows are divided by their sum plus eps ("sum"), the visible keys ("count"), or 1. See `sums` for the state.
    """
    batch, heads, values = state.shape[0], token.q.shape[-2], token.v.shape[-1]
    y = torch.empty((batch, 1, heads, values), dtype=dtype, device=state.device)
    after = torch.empty_like(count)
    out, partial, blocks = pass_over(state, token, layout, scale, table)
    start = _rows_launch(batch, heads, blocks, state.shape[3], values, table, divisor, eps)
    start(partial, count, y, after)
    return y, out, after


@launch.by_shapes
def _rows_launch(
    batch: int, heads: int, blocks: Split, e: int, values: int, table: Table, divisor: str, eps: float
) -> launch.Launch:
    options = {
        "HEADS": heads, **_adding(blocks, e, values), **_coefficients_left(table), "BY_SUM": divisor == "sum",
        "BY_COUNT": divisor == "count", "COUNTED": e > values, "num_warps": WARPS,
    }  # fmt: skip
    return launch.prepared(_rows, (batch * heads,), (eps,), options)


# -------------------------------------------------------------------------------------------- window and tail


#: exact keys per tile
KEYS = 32


class Exact(NamedTuple):
    """The last keys and values [B, K, w, …], the newest last, and the first ones [B, K, s, …]; fp32, contiguous."""

    recent_k: Tensor
    recent_v: Tensor
    sink_k: Tensor
    sink_v: Tensor


@triton.jit
def _keys(OLD, NEW, place, is_old, inside, d, SIZE: tl.constexpr):
    """Vectors [n, size]: the stored ones at `place` where `is_old`, else the new one."""
    kept = tl.load(
        OLD + place[:, None] * SIZE + d[None, :],
        mask=(inside & is_old)[:, None] & (d < SIZE)[None, :],
        other=0.0,
    ).to(tl.float32)
    new = tl.load(NEW + d, mask=d < SIZE, other=0.0).to(tl.float32)
    return tl.where(is_old[:, None], kept, new[None, :])


@triton.jit
def _with_keys(total, top, q, k, v, centre, seen):
    """Add exact keys to the row's Σ weights [v, 1], which is stored divided by e^top; returns both, updated."""
    x = tl.where(seen, tl.sum(q[None, :] * k, 1) - centre, float("-inf"))
    higher = tl.maximum(top, tl.max(x, 0))
    weights = tl.exp(x - higher)
    return total * tl.exp(top - higher) + tl.sum(weights[:, None] * v, 0), higher


@launched
@triton.jit
def _window_rows(
    PARTIAL, COUNT, Q, K, V, RECENT_K, RECENT_V, SINK_K, SINK_V, Y, AFTER, NEXT_K, NEXT_V, NEXT_SINK_K, NEXT_SINK_V,
    q_strides, k_strides, v_strides, scale, heads, eps, W,
    SINKS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    P: tl.constexpr, BB: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, BLOCKS: tl.constexpr, TABLE: tl.constexpr,
    ORDERS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """The row of one query; the first query of a key-value head also writes its window. Column E − 1 is the row sum."""
    q_b, q_h = q_strides
    k_b, k_h = k_strides
    v_b, v_h = v_strides
    row = tl.program_id(0).to(tl.int64)
    b, h = row // heads, row % heads
    head = row // GROUP
    most = tl.where(row % GROUP == 0, W + SINKS, 0)  # places it may write
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    PARTIAL += row * BLOCKS[ORDERS] * P
    centre = mean_score(PARTIAL, BLOCKS, E, P, BB) if CENTRED else 0.0
    total, top = weighed_sums(PARTIAL, centre, e, BLOCKS, E, P, BB, TABLE, ORDERS), 0.0
    count = tl.load(COUNT + b)
    q = tl.load(Q + b * q_b + h * q_h + d, mask=d < D, other=0.0).to(tl.float32) * scale
    new_k, new_v = K + b * k_b + (h // GROUP) * k_h, V + b * v_b + (h // GROUP) * v_h
    VALUES: tl.constexpr = E - 1
    for first in range(0, W, BW):
        j = first + tl.arange(0, BW)
        inside = j < W
        k = _keys(RECENT_K + head * W * D, new_k, j + 1, j < W - 1, inside, d, D)
        v = _keys(RECENT_V + head * W * VALUES, new_v, j + 1, j < W - 1, inside, e, VALUES)
        seen = inside & (count - W + j + 1 >= SINKS)
        total, top = _with_keys(total, top, q, k, tl.where(e[None, :] == VALUES, 1.0, v), centre, seen)
        at = (head * W + j)[:, None]
        tl.store(NEXT_K + at * D + d[None, :], k, mask=(inside & (j < most))[:, None] & (d < D)[None, :])
        tl.store(
            NEXT_V + at * VALUES + e[None, :], v, mask=(inside & (j < most))[:, None] & (e < VALUES)[None, :]
        )
    if SINKS > 0:
        i = tl.arange(0, BS)
        inside = i < SINKS
        k = _keys(SINK_K + head * SINKS * D, new_k, i, i < count, inside, d, D)
        v = _keys(SINK_V + head * SINKS * VALUES, new_v, i, i < count, inside, e, VALUES)
        seen = inside & (i <= count)
        total, top = _with_keys(total, top, q, k, tl.where(e[None, :] == VALUES, 1.0, v), centre, seen)
        at = (head * SINKS + i)[:, None]
        tl.store(NEXT_SINK_K + at * D + d[None, :], k, mask=(inside & (i < most))[:, None] & (d < D)[None, :])
        tl.store(
            NEXT_SINK_V + at * VALUES + e[None, :],
            v,
            mask=(inside & (i < most))[:, None] & (e < VALUES)[None, :],
        )
    divisor = tl.sum(tl.where(e == VALUES, total, 0.0), 0) + eps * tl.exp(-top)
    y = total / tl.where(divisor == 0, 1.0, divisor)
    tl.store(Y + row * VALUES + e, y.to(Y.dtype.element_ty), mask=e < VALUES)
    tl.store(AFTER + b, count + 1, mask=h == 0)


@on_its_device
def window_rows(
    state: Tensor,
    count: Tensor,
    exact: Exact,
    token: Token,
    layout: Layout,
    scale: float,
    table: Table,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Exact]:
    """y [B, 1, H, e] divided by the row sum plus eps, in the dtype of q; state, count and exact keys after the token.

    state [B, K, F, e + 1] in fp32, contiguous; the table has a line per order of the layout.
    """
    recent_k, recent_v = exact.recent_k, exact.recent_v
    size, sinks, e = recent_k.shape[2], exact.sink_k.shape[2], token.v.shape[-1]
    leaving = Token(recent_k[:, :, 0], token.q, recent_v[:, :, 0], count=count, late=size + sinks)
    state, partial, blocks = pass_over(state, leaving, layout, scale, table)
    q = launch.Layout.of(token.q)
    y = torch.empty((q.shape[0], 1, q.shape[-2], e), dtype=q.dtype, device=token.q.device)
    after = torch.empty_like(count)
    following = Exact(
        torch.empty_like(recent_k),
        torch.empty_like(recent_v),
        torch.empty_like(exact.sink_k),
        torch.empty_like(exact.sink_v),
    )
    start = _window_launch(
        q, launch.Layout.of(token.k), launch.Layout.of(token.v), size, sinks, blocks, scale, table, eps
    )
    start(partial, count, token.q, token.k, token.v, *exact, y, after, *following)
    return y, state, after, following


@launch.by_shapes
def _window_launch(
    q: launch.Layout,
    k: launch.Layout,
    v: launch.Layout,
    size: int,
    sinks: int,
    blocks: Split,
    scale: float,
    table: Table,
    eps: float,
) -> launch.Launch:
    batch, heads, d, e = q.shape[0], *q.shape[-2:], v.shape[-1]
    options = {
        "SINKS": sinks, "GROUP": heads // k.shape[-2], "D": d, "BD": width(d), "BW": min(KEYS, width(size)), "BS": width(sinks),
        **_adding(blocks, e + 1, e + 1), **_coefficients_left(table), "num_warps": 4,
    }  # fmt: skip
    numbers = (_by_head(q), _by_head(k), _by_head(v), scale, heads, eps, size)
    return launch.prepared(_window_rows, (batch * heads,), numbers, options)
