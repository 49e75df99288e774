"""Add one token to a state and read the state with its queries: one pass over the state, one over partial sums.

    S ← f S + w φ(k) [v, 1]ᵀ,        sums of order n:  Σ_{f of order n} φ_f(c q) S_f,          y = Σ_n α_n sums / D

with coefficients α_n that are numbers, or polynomials in the row's mean score, which follows from the sums.

The features of a head are split into parts, so that batch size 1 fills the GPU; a part is a few blocks, read one after
the other. A feature is a product of entries times a root, φ_f(x) = r_f Π_j x_{i_fj}, computed in registers; an index of
d stands for the factor 1. Every part writes what it adds to the sums; a second program adds up the parts. If the
coefficients are numbers, the first program applies them, and a part may have features of several orders.

With an exact window and sinks, the state holds the tail, that is all keys between them:

    w_s = e^{x_s − c}      for the last w keys, including the token's own, and the sinks
    w_s = κ(x_s)           for the tail; c is its mean score, or 0

The first program adds the key that leaves the window to the state and reads the state. The second adds the
exact keys, divides by the row sum, and writes the window shifted by one place.

At batch size 1 a step takes microseconds, most of them latency. So a program starts while the one before it still runs
(a programmatic dependent launch) and waits for its results only when it reads them; and no address of the state
depends on anything in memory.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from maclaurin.programs.triton import INTERPRETED, launch, on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.tiles import cdiv, divisor_of, power_of_2, width

#: features per block, and numbers of the state in it, at most
BLOCK = 32
TILE = 16384
#: columns that one warp holds; of longer rows it holds 64
COLUMNS = 128
#: a part has several blocks where at least so many parts remain over all heads, up to MOST_BLOCKS
LEAST_PARTS = 4096
MOST_BLOCKS = 8
#: numbers in a tile of parts that are added up
ADDED = 4096
#: warps that add them up
WARPS = 8
#: what the second-level cache does with the state before the token, which is read once
POLICY = ""
#: whether programs start while the one before them still runs
EARLY = True
#: whether the pass over the state also adds up the sums, in one launch
ALONE = False


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


# ------------------------------------------------------------------------------------------------------- parts


class Split(NamedTuple):
    """Group n has the features features[n] … features[n + 1] − 1, and they are the parts parts[n] … parts[n + 1] − 1,
    each of up to `blocks` blocks of `block` features."""

    features: tuple[int, ...]
    parts: tuple[int, ...]
    blocks: int
    block: int

    @property
    def number(self) -> int:
        """Parts per head."""
        return self.parts[-1]

    @property
    def is_full(self) -> bool:
        """Whether no group is smaller than a block."""
        return all(b - a >= self.block for a, b in pairwise(self.features))


@lru_cache(maxsize=launch.MOST_SHAPES)
def split(sizes: tuple[int, ...], heads: int, values: int) -> Split:
    """Groups of features of these sizes, for so many heads over the whole batch and values of that size."""
    block, blocks = min(BLOCK, TILE // width(values)), 1
    while blocks < MOST_BLOCKS and heads * sum(_parts(sizes, 2 * blocks * block)) >= LEAST_PARTS:
        blocks *= 2
    parts = _parts(sizes, blocks * block)
    return Split(tuple(accumulate(sizes, initial=0)), tuple(accumulate(parts, initial=0)), blocks, block)


def _parts(sizes: tuple[int, ...], most: int) -> list[int]:
    return [cdiv(size, most) for size in sizes]


def split_for(sizes: tuple[int, ...], table: Table | None, heads: int, values: int) -> Split:
    """Parts of one order each, unless the table has one number per order."""
    separate = table is None or is_centred(table)
    return split(sizes if separate else (sum(sizes),), heads, values)


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
    """Numbers between the sums of two parts; 16 bytes are read at a time."""
    return 4 * cdiv(columns, 4)


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next program start, and wait for what earlier ones have written."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


# --------------------------------------------------------------------------------------------------- the sums


@triton.jit
def add_up(PARTIAL, start, stop, e, E: tl.constexpr, P: tl.constexpr, BB: tl.constexpr):
    """The sum of what parts start … stop − 1 have written for one query, whose parts are at PARTIAL."""
    total = tl.zeros((BB, e.shape[0]), tl.float32)
    for first in tl.range(start, stop, BB, loop_unroll_factor=4):
        part = first + tl.arange(0, BB)
        here = (part < stop)[:, None] & (e < E)[None, :]
        total += tl.load(PARTIAL + part[:, None] * P + e[None, :], mask=here, other=0.0)
    return tl.sum(total, 0)


@launched
@triton.jit
def _sums(
    PARTIAL, SUMS, rows,
    PARTS: tl.constexpr, ORDERS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, P: tl.constexpr,
    BB: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The sums of each order for one query."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    begin(EARLY)
    for n in tl.static_range(ORDERS):
        total = add_up(PARTIAL + row * PARTS[ORDERS] * P, PARTS[n], PARTS[n + 1], e, E, P, BB)
        tl.store(SUMS + (n * rows + row) * E + e, total, mask=e < E)


@triton.jit
def mean_score(PARTIAL, PARTS: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BB: tl.constexpr):
    """z₁/z₀ of a query's row, from orders 0 and 1 of the column that counts keys; 0 for an empty row."""
    last = E - 1 + tl.arange(0, 1)
    count = tl.sum(add_up(PARTIAL, PARTS[0], PARTS[1], last, E, P, BB), 0)
    first = tl.sum(add_up(PARTIAL, PARTS[1], PARTS[2], last, E, P, BB), 0)
    return tl.where(count > 1e-30, first / tl.where(count > 1e-30, count, 1.0), 0.0)


@triton.jit
def weighed_sums(
    PARTIAL, centre, e, PARTS: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BB: tl.constexpr,
    TABLE: tl.constexpr, ORDERS: tl.constexpr,
):  # fmt: skip
    """Σ_n α_n(c) · (sums of order n) for one query; the coefficients of α_n start at TABLE[n ORDERS]."""
    total = tl.zeros(e.shape, tl.float32)
    for n in tl.static_range(ORDERS):
        weight, power = 0.0, 1.0
        for j in tl.static_range(ORDERS):
            weight += TABLE[n * ORDERS + j] * power
            power *= -centre
        total += weight * add_up(PARTIAL, PARTS[n], PARTS[n + 1], e, E, P, BB)
    return total


@triton.jit
def _write_row(
    PARTIAL, COUNT, Y, AFTER, row, eps,
    HEADS: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, P: tl.constexpr, BB: tl.constexpr,
    TABLE: tl.constexpr, ORDERS: tl.constexpr, CENTRED: tl.constexpr, BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """The row of one query divided by its denominator; and the token count, one higher."""
    VALUES: tl.constexpr = E - 1 if COUNTED else E
    e = tl.arange(0, BE)
    PARTIAL += row * PARTS[ORDERS] * P
    seen = tl.load(COUNT + row // HEADS) + 1
    centre = mean_score(PARTIAL, PARTS, E, P, BB) if CENTRED else 0.0
    total = weighed_sums(PARTIAL, centre, e, PARTS, VALUES, P, BB, TABLE, ORDERS)
    last = tl.zeros((1,), tl.float32)
    if BY_SUM:
        last = weighed_sums(PARTIAL, centre, E - 1 + tl.arange(0, 1), PARTS, E, P, BB, TABLE, ORDERS)
    divisor = divisor_of(tl.sum(last, 0), seen, eps, BY_SUM, BY_COUNT)
    tl.store(Y + row * VALUES + e, (total / divisor).to(Y.dtype.element_ty), mask=e < VALUES)
    tl.store(AFTER + row // HEADS, seen, mask=row % HEADS == 0)


@launched
@triton.jit
def _rows(
    PARTIAL, COUNT, Y, AFTER, eps,
    HEADS: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, P: tl.constexpr, BB: tl.constexpr,
    TABLE: tl.constexpr, ORDERS: tl.constexpr, CENTRED: tl.constexpr, BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr,
    COUNTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The row of one query, from all parts of its sums."""
    begin(EARLY)
    _write_row(
        PARTIAL, COUNT, Y, AFTER, tl.program_id(0).to(tl.int64), eps, HEADS, PARTS, E, BE, P, BB, TABLE, ORDERS,
        CENTRED, BY_SUM, BY_COUNT, COUNTED,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------- the state


@triton.jit
def _span(part, FEATURES: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """The first feature of a part, and the end of its group."""
    start, stop = part * STEP, FEATURES[1]
    for n in tl.static_range(1, GROUPS):
        start = tl.where(part < PARTS[n], start, FEATURES[n] + (part - PARTS[n]) * STEP)
        stop = tl.where(part < PARTS[n], stop, FEATURES[n + 1])
    return start, stop


@triton.jit
def _end(start, stop, STEP: tl.constexpr, BF: tl.constexpr):
    """The end of a part's features; a part of one block is no loop."""
    return start + STEP if STEP == BF else tl.minimum(start + STEP, stop)


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
    S, K, Q, V, LOG_FORGET, WEIGHT, COUNT, INDEX, ROOT, OUT, PARTIAL, Y, AFTER, DONE,
    k_strides, q_strides, v_strides, f_strides, w_strides, late, scale, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, P: tl.constexpr, BF: tl.constexpr, STEP: tl.constexpr,
    FEATURES: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    FIRST: tl.constexpr, TABLE: tl.constexpr, ORDERS: tl.constexpr, DEGREE: tl.constexpr,
    FULL: tl.constexpr, COUNTED: tl.constexpr, FORGETS: tl.constexpr, WEIGHED: tl.constexpr, DELAYED: tl.constexpr,
    POLICY: tl.constexpr, EARLY: tl.constexpr, ALONE: tl.constexpr, BB: tl.constexpr, BY_SUM: tl.constexpr,
    BY_COUNT: tl.constexpr,
):  # fmt: skip
    """One part of the features of one key-value head. COUNTED: the last column of the state counts keys.

    FULL: no group is smaller than a block. The last block of a group then starts early enough to be full; features that
    the block before it has too get the same values again, and are left out of the sums.
    With ORDERS > 0 the sums are multiplied by the coefficients in TABLE.
    ALONE: the last part of a head to finish, by the count in DONE, adds up the sums. DONE is zero before and after.
    """
    k_b, k_h = k_strides
    q_b, q_h = q_strides
    v_b, v_h = v_strides
    f_b, f_h = f_strides
    w_b, w_h = w_strides
    number = PARTS[GROUPS]
    row, part = tl.program_id(0) // number, tl.program_id(0) % number
    start, stop = _span(part, FEATURES, PARTS, GROUPS, STEP)
    row = row.to(tl.int64)
    b, h = row // HEADS, row % HEADS
    VALUES: tl.constexpr = E - 1 if COUNTED else E
    e, lines, g = tl.arange(0, BE), tl.arange(0, BF), tl.arange(0, BG)
    sums, counts = tl.zeros((BG, BE), tl.float32), tl.zeros((BG,), tl.float32)
    begin(EARLY)
    for first in range(start, _end(start, stop, STEP, BF), BF):
        begun = tl.minimum(first, stop - BF) if FULL else first
        f = begun + lines
        there = tl.full((BF,), True, tl.int1) if FULL else f < stop
        entries, root = _entries(INDEX, f, there, D, DEGREE), tl.load(ROOT + f, mask=there, other=0.0)
        at = (row * F + begun) * E
        place, last = lines[:, None] * E + e[None, :], lines * E + VALUES
        inside = there[:, None] & (e < VALUES)[None, :]
        state = tl.load(S + at + place, mask=inside, other=0.0, eviction_policy=POLICY)
        if COUNTED:
            count = tl.load(S + at + last, mask=there, other=0.0, eviction_policy=POLICY)
        tl.debug_barrier()  # or the compiler lets the state wait for the entries
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
            sums += tl.where((g == n)[:, None], tl.sum(queries[n][:, None] * state, 0)[None, :], 0.0)
            if COUNTED:
                counts += tl.where(g == n, tl.sum(queries[n] * count, 0), 0.0)
    at = ((row * GROUP + g) * number + part) * P
    tl.store(PARTIAL + at[:, None] + e[None, :], sums, mask=(g < GROUP)[:, None] & (e < VALUES)[None, :])
    if COUNTED:
        tl.store(PARTIAL + at + VALUES, counts, mask=g < GROUP)
    if ALONE:
        tl.debug_barrier()
        if tl.atomic_add(DONE + row, 1, sem="acq_rel", scope="gpu") == number - 1:
            tl.store(DONE + row, 0)
            for n in tl.static_range(GROUP):
                _write_row(
                    PARTIAL, COUNT, Y, AFTER, row * GROUP + n, eps, HEADS * GROUP, PARTS, E, BE, P, BB, (1.0,), 1,
                    False, BY_SUM, BY_COUNT, COUNTED,
                )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the launches


def _by_head(u: launch.Layout) -> tuple[int, int]:
    """Strides over batch and heads."""
    return u.strides[0], u.strides[-2]


def _early() -> dict[str, bool]:
    """Options of programs that start while the one before them still runs; the interpreter has no such launch."""
    return {"EARLY": False} if INTERPRETED or not EARLY else {"EARLY": True, "launch_pdl": True}


@lru_cache(maxsize=launch.MOST_SHAPES)
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
    alone: tuple[str, float] | None,
) -> tuple[launch.Launch, Split]:
    """The pass over the state, and the parts of the sums that it writes."""
    batch, heads, size, e = state
    values, group = v.shape[-1], q.shape[-2] // heads
    parts, warps = split_for(sizes, table, batch * heads, values), _warps(values)
    coefficients = () if table is None or is_centred(table) else tuple(a for (a,) in table)
    numbers = (
        _by_head(k), _by_head(q), _by_head(v), of_forget or (0, 0), of_weight or (0, 0), late or 0, scale,
        0.0 if alone is None else alone[1],
    )  # fmt: skip
    options = {
        "HEADS": heads, "GROUP": group, "BG": power_of_2(group), "D": k.shape[-1], "F": size, "E": e,
        "BE": width(values), "P": _padded(e), "BF": parts.block, "STEP": parts.block * parts.blocks,
        "FEATURES": parts.features, "PARTS": parts.parts, "GROUPS": len(parts.parts) - 1,
        "FIRST": tuple(accumulate(sizes, initial=0)), "TABLE": coefficients, "ORDERS": len(coefficients),
        "DEGREE": degree, "FULL": parts.is_full, "COUNTED": e > values, "FORGETS": of_forget is not None,
        "WEIGHED": of_weight is not None, "DELAYED": late is not None, "POLICY": POLICY, **_early(),
        "ALONE": alone is not None, "BB": _tall(parts, values, ADDED // WARPS * warps),
        "BY_SUM": alone is not None and alone[0] == "sum", "BY_COUNT": alone is not None and alone[0] == "count",
        "num_warps": warps,
    }  # fmt: skip
    return launch.prepared(_step, (batch * heads * parts.number,), numbers, options), parts


class Finish(NamedTuple):
    """What the pass over the state writes if it also adds up the sums: rows divided by "sum", "count" or "one"."""

    y: Tensor
    count: Tensor
    after: Tensor
    done: Tensor
    divisor: str
    eps: float


def pass_over(
    state: Tensor,
    token: Token,
    layout: Layout,
    scale: float,
    table: Table | None,
    finish: Finish | None = None,
) -> tuple[Tensor, Tensor, Split]:
    """The state after the token, and each part of its queries' sums [B, H, parts, at least E]."""
    k, q, v, log_forget, weight, count, late = token
    queries = launch.Layout.of(q)
    start, parts = _pass_launch(
        state.shape, launch.Layout.of(k), queries, launch.Layout.of(v),
        None if log_forget is None else log_forget.stride(), None if weight is None else weight.stride(),
        None if count is None else late, scale, layout.sizes, layout.entries.shape[1], table,
        None if finish is None else (finish.divisor, finish.eps),
    )  # fmt: skip
    out = torch.empty_like(state)
    shape = (state.shape[0], queries.shape[-2], parts.number, _padded(state.shape[3]))
    partial = torch.empty(shape, dtype=torch.float32, device=state.device)
    y = after = done = None
    if finish is not None:
        y, count, after, done = finish[:4]
    start(
        state, k, q, v, log_forget, weight, count, layout.entries, layout.roots, out, partial, y, after, done
    )
    return out, partial, parts


class _Counters:
    """Counters of finished parts. Programs find them zero and leave them zero.

    Programs that can run at the same time must not share any. So every stream has its own, and every step that is
    recorded for a CUDA graph, since graphs replay on any stream.
    """

    #: counters per device for recorded steps; after that they take two launches
    FOR_RECORDED = 1 << 18

    def __init__(self) -> None:
        self._of_stream: dict[tuple[torch.device, int], Tensor] = {}
        self._unused: dict[torch.device, Tensor] = {}

    def take(self, number: int, device: torch.device) -> Tensor | None:
        """Counters for one launch on the current stream; None if a recorded step finds none left."""
        if device.type != "cuda":
            return torch.zeros(number, dtype=torch.int32)
        if torch.cuda.is_current_stream_capturing():
            return self._for_recorded(4 * cdiv(number, 4), device)
        key = (device, launch.current_stream(device.index))
        known = self._of_stream.get(key)
        if known is None or known.numel() < number:
            if device not in self._unused:
                self._unused[device] = torch.zeros(self.FOR_RECORDED, dtype=torch.int32, device=device)
            known = self._of_stream[key] = torch.zeros(max(number, 1024), dtype=torch.int32, device=device)
        return known

    def _for_recorded(self, number: int, device: torch.device) -> Tensor | None:
        left = self._unused.get(device)
        if left is None or left.numel() < number:
            return None
        self._unused[device] = left[number:]
        return left[:number]


_counters = _Counters()


def _tall(parts: Split, columns: int, added: int) -> int:
    """Parts in a tile of up to so many numbers."""
    most = max((b - a for a, b in pairwise(parts.parts)), default=1)
    return min(power_of_2(most), max(1, added // width(columns)))


class _Sums(NamedTuple):
    """Compile-time arguments of a program that adds up parts."""

    PARTS: tuple[int, ...]
    ORDERS: int
    E: int
    BE: int
    P: int
    BB: int


@lru_cache(maxsize=launch.MOST_SHAPES)
def _adding(parts: Split, e: int, columns: int) -> dict[str, Any]:
    """For so many columns of the sums; E = e."""
    return _Sums(
        parts.parts, len(parts.parts) - 1, e, width(columns), _padded(e), _tall(parts, columns, ADDED)
    )._asdict()


@lru_cache(maxsize=launch.MOST_SHAPES)
def _coefficients_left(table: Table) -> dict[str, Any]:
    """What is multiplied when parts are added up: nothing, if the coefficients are numbers."""
    centred = is_centred(table)
    return {"TABLE": flat(table) if centred else (1.0,), "CENTRED": centred}


@on_its_device
def sums(state: Tensor, token: Token, layout: Layout) -> tuple[Tensor, Tensor]:
    """The state after the token, and the sums of each order for its queries [orders, B, H, E].

    state [B, K, F, E] in fp32, contiguous; E = e, or e + 1 if it counts keys.
    """
    out, partial, parts = pass_over(state, token, layout, 1.0, None)
    batch, heads, e = *partial.shape[:2], state.shape[3]
    found = torch.empty(len(layout.sizes), batch, heads, e, dtype=torch.float32, device=state.device)
    rows = batch * heads
    _sums[(rows,)](partial, found, rows, **_adding(parts, e, e), num_warps=WARPS, **_early())
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
    done = _counters.take(batch * state.shape[1], state.device) if ALONE and not is_centred(table) else None
    finish = None if done is None else Finish(y, count, after, done, divisor, eps)
    out, partial, parts = pass_over(state, token, layout, scale, table, finish)
    if finish is None:
        start = _rows_launch(batch, heads, parts, state.shape[3], values, table, divisor, eps)
        start(partial, count, y, after)
    return y, out, after


@lru_cache(maxsize=launch.MOST_SHAPES)
def _rows_launch(
    batch: int, heads: int, parts: Split, e: int, values: int, table: Table, divisor: str, eps: float
) -> launch.Launch:
    options = {
        "HEADS": heads, **_adding(parts, e, values), **_coefficients_left(table), "BY_SUM": divisor == "sum",
        "BY_COUNT": divisor == "count", "COUNTED": e > values, "num_warps": WARPS, **_early(),
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
    P: tl.constexpr, BB: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, PARTS: tl.constexpr, TABLE: tl.constexpr,
    ORDERS: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr,
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
    begin(EARLY)
    centre, total, top = 0.0, tl.zeros((BE,), tl.float32), 0.0
    if ORDERS > 0:
        PARTIAL += row * PARTS[ORDERS] * P
        centre = mean_score(PARTIAL, PARTS, E, P, BB) if CENTRED else 0.0
        total = weighed_sums(PARTIAL, centre, e, PARTS, E, P, BB, TABLE, ORDERS)
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
    layout: Layout | None,
    scale: float,
    table: Table,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Exact]:
    """y [B, 1, H, e] divided by the row sum plus eps, in the dtype of q; state, count and exact keys after the token.

    state [B, K, F, e + 1] in fp32, contiguous; the table has a line per order of the layout. The layout is None
    without a tail.
    """
    k, q, v = (launch.Layout.of(u) for u in (token.k, token.q, token.v))
    batch, heads, d = q.shape[0], *q.shape[-2:]
    size, sinks, e = exact.recent_k.shape[2], exact.sink_k.shape[2], token.v.shape[-1]
    partial, parts = None, Split((0,), (0,), 1, BLOCK)
    if layout is not None:
        leaving = Token(
            exact.recent_k[:, :, 0], token.q, exact.recent_v[:, :, 0], count=count, late=size + sinks
        )
        state, partial, parts = pass_over(state, leaving, layout, scale, table)
    y = torch.empty(batch, 1, heads, e, dtype=token.q.dtype, device=token.q.device)
    after, following = torch.empty_like(count), Exact(*(torch.empty_like(u) for u in exact))
    _window_rows[(batch * heads,)](
        partial, count, token.q, token.k, token.v, *exact, y, after, *following,
        _by_head(q), _by_head(k), _by_head(v), scale, heads, eps, size,
        SINKS=sinks, GROUP=heads // k.shape[-2], D=d, BD=width(d), BW=min(KEYS, width(size)), BS=width(sinks),
        **_adding(parts, e + 1, e + 1), **_coefficients_left(table), num_warps=4, **_early(),
    )  # fmt: skip
    return y, state, after, following
