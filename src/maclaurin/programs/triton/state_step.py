"""Add one token to a state and read the state with its queries: one pass over the state, one over partial sums.

    S ← f S + w φ(k) [v, 1]ᵀ,        sums of order n:  Σ_{f of order n} φ_f(c q) S_f,          y = Σ_n α_n sums / D

with coefficients α_n that are numbers, or polynomials in the row's mean score, which follows from the sums.

The state [F, E] of a head is cut into blocks of features, so that batch size 1 fills the GPU. All features of a block
have the same order. A feature is a product of entries times a root, φ_f(x) = r_f Π_j x_{i_fj}, computed in registers;
an index of d stands for the factor 1. Every block writes its part of the sums; a second program adds the parts.

With an exact window and sinks, the state holds the tail, that is all keys between them:

    w_s = e^{x_s − c}      for the last w keys, including the token's own, and the sinks
    w_s = κ(x_s)           for the tail; c is its mean score, or 0

The first program adds the key that leaves the window to the state and reads the state. The second adds the
exact keys, divides by the row sum, and writes the window shifted by one place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import launch, on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.tiles import divisor_of, width

#: features per block; one warp per 64 columns holds them, so that sums over features need no exchange between warps
BLOCK = 32
#: blocks whose parts are added at a time
BLOCKS = 64


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
    """How features are computed and split into blocks.

    Features are products of the entries [F, degree] times roots [F]; blocks of them are starts[i] … stops[i] − 1,
    and order n has the blocks cuts[n] … cuts[n + 1] − 1.
    """

    entries: Tensor
    roots: Tensor
    starts: Tensor
    stops: Tensor
    cuts: Tensor


@triton.jit
def _features(X, INDEX, ROOT, f, there, scale, D: tl.constexpr, DEGREE: tl.constexpr):
    """φ_f(scale x) for the features f."""
    found = tl.load(ROOT + f, mask=there, other=0.0)
    for j in tl.static_range(DEGREE):
        i = tl.load(INDEX + f * DEGREE + j, mask=there, other=D)
        entry = tl.load(X + i, mask=there & (i < D), other=0.0).to(tl.float32) * scale
        found *= tl.where(i < D, entry, 1.0)
    return found


@launched
@triton.jit
def _step(
    S, K, Q, V, LOG_FORGET, WEIGHT, COUNT, INDEX, ROOT, STARTS, STOPS, OUT, PARTIAL,
    k_strides, q_strides, v_strides, f_strides, w_strides, late, scale, F, heads, blocks,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
    DEGREE: tl.constexpr, COUNTED: tl.constexpr, FORGETS: tl.constexpr, WEIGHED: tl.constexpr,
    DELAYED: tl.constexpr,
):  # fmt: skip
    """One block of features of one key-value head. COUNTED: the last column of the state counts keys."""
    k_b, k_h = k_strides
    q_b, q_h = q_strides
    v_b, v_h = v_strides
    f_b, f_h = f_strides
    w_b, w_h = w_strides
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = row // heads, row % heads
    f = tl.load(STARTS + block) + tl.arange(0, BF)
    there = f < tl.load(STOPS + block)
    e = tl.arange(0, BE)
    VALUES: tl.constexpr = E - 1 if COUNTED else E
    inside = there[:, None] & (e < VALUES)[None, :]
    line = row * F * E + f * E
    state = tl.load(S + line[:, None] + e[None, :], mask=inside, other=0.0)
    if COUNTED:
        count = tl.load(S + line + VALUES, mask=there, other=0.0)
    key = _features(K + b * k_b + h * k_h, INDEX, ROOT, f, there, 1.0, D, DEGREE)
    if WEIGHED:
        key *= tl.load(WEIGHT + b * w_b + h * w_h)
    if DELAYED:
        key *= (tl.load(COUNT + b) >= late).to(tl.float32)
    kept = tl.exp(tl.load(LOG_FORGET + b * f_b + h * f_h).to(tl.float32)) if FORGETS else 1.0
    value = tl.load(V + b * v_b + h * v_h + e, mask=e < VALUES, other=0.0).to(tl.float32)
    state = state * kept + key[:, None] * value[None, :]
    tl.store(OUT + line[:, None] + e[None, :], state, mask=inside)
    if COUNTED:
        count = count * kept + key
        tl.store(OUT + line + VALUES, count, mask=there)
    for g in tl.static_range(GROUP):
        query = _features(Q + b * q_b + (h * GROUP + g) * q_h, INDEX, ROOT, f, there, scale, D, DEGREE)
        at = PARTIAL + ((row * GROUP + g) * blocks + block) * E
        tl.store(at + e, tl.sum(query[:, None] * state, 0), mask=e < VALUES)
        if COUNTED:
            tl.store(at + VALUES, tl.sum(query * count, 0))


@triton.jit
def add_up(PARTIAL, row, start, stop, blocks, e, E: tl.constexpr, BB: tl.constexpr):
    """The sum of what blocks start … stop − 1 have written for one query."""
    total = tl.zeros(e.shape, tl.float32)
    for first in range(start, stop, BB):
        b = first + tl.arange(0, BB)
        here = (b < stop)[:, None] & (e < E)[None, :]
        at = (row * blocks + b)[:, None] * E + e[None, :]
        total += tl.sum(tl.load(PARTIAL + at, mask=here, other=0.0), 0)
    return total


@launched
@triton.jit
def _sums(PARTIAL, CUTS, SUMS, rows, blocks, E: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr):
    """The sums of one order for one query."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = tl.arange(0, BE)
    total = add_up(PARTIAL, row, tl.load(CUTS + n), tl.load(CUTS + n + 1), blocks, e, E, BB)
    tl.store(SUMS + (n * rows + row) * E + e, total, mask=e < E)


@triton.jit
def mean_score(PARTIAL, CUTS, row, blocks, E: tl.constexpr, BB: tl.constexpr):
    """z₁/z₀ of a query's row, from orders 0 and 1 of the column that counts keys; 0 for an empty row."""
    last = E - 1 + tl.arange(0, 1)
    begin, middle, end = tl.load(CUTS), tl.load(CUTS + 1), tl.load(CUTS + 2)
    count = tl.sum(add_up(PARTIAL, row, begin, middle, blocks, last, E, BB), 0)
    first = tl.sum(add_up(PARTIAL, row, middle, end, blocks, last, E, BB), 0)
    return tl.where(count > 1e-30, first / tl.where(count > 1e-30, count, 1.0), 0.0)


@triton.jit
def weighed_sums(
    PARTIAL, CUTS, row, centre, blocks, e, E: tl.constexpr, BB: tl.constexpr, TABLE: tl.constexpr, ORDERS: tl.constexpr,
):  # fmt: skip
    """Σ_n α_n(c) · (sums of order n) for one query; the coefficients of α_n start at TABLE[n ORDERS]."""
    total = tl.zeros(e.shape, tl.float32)
    for n in tl.static_range(ORDERS):
        weight, power = 0.0, 1.0
        for j in tl.static_range(ORDERS):
            weight += TABLE[n * ORDERS + j] * power
            power *= -centre
        total += weight * add_up(PARTIAL, row, tl.load(CUTS + n), tl.load(CUTS + n + 1), blocks, e, E, BB)
    return total


@launched
@triton.jit
def _rows(
    PARTIAL, CUTS, COUNT, Y, AFTER, heads, blocks, eps,
    E: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, TABLE: tl.constexpr, ORDERS: tl.constexpr,
    CENTRED: tl.constexpr, BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The row of one query divided by its denominator; and the token count, one higher."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    centre = mean_score(PARTIAL, CUTS, row, blocks, E, BB) if CENTRED else 0.0
    total = weighed_sums(PARTIAL, CUTS, row, centre, blocks, e, E, BB, TABLE, ORDERS)
    seen = tl.load(COUNT + row // heads) + 1
    last = tl.sum(tl.where(e == E - 1, total, 0.0), 0)
    divisor = divisor_of(tl.zeros((BE,), tl.float32) + last, seen, eps, BY_SUM, BY_COUNT)
    VALUES: tl.constexpr = E - 1 if COUNTED else E
    tl.store(Y + row * VALUES + e, (total / divisor).to(Y.dtype.element_ty), mask=e < VALUES)
    tl.store(AFTER + row // heads, seen, mask=row % heads == 0)


def _by_head(u: launch.Layout) -> tuple[int, int]:
    """Strides over batch and heads."""
    return u.strides[0], u.strides[-2]


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
    blocks: int,
    degree: int,
) -> launch.Launch:
    batch, heads, size, e = state
    values = v.shape[-1]
    numbers = (
        _by_head(k), _by_head(q), _by_head(v), of_forget or (0, 0), of_weight or (0, 0), late or 0, scale, size, heads,
        blocks,
    )  # fmt: skip
    options = {
        "GROUP": q.shape[-2] // heads, "D": k.shape[-1], "E": e, "BE": width(values), "BF": BLOCK, "DEGREE": degree,
        "COUNTED": e > values, "FORGETS": of_forget is not None, "WEIGHED": of_weight is not None,
        "DELAYED": late is not None, "num_warps": max(1, min(8, width(values) // 64)),
    }  # fmt: skip
    return launch.prepared(_step, (batch * heads, blocks), numbers, options)


def pass_over(state: Tensor, token: Token, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """The state after the token, and each block's part of its queries' sums [B, H, blocks, E]."""
    k, q, v, log_forget, weight, count, late = token
    blocks, queries = layout.starts.numel(), launch.Layout.of(q)
    start = _pass_launch(
        state.shape, launch.Layout.of(k), queries, launch.Layout.of(v),
        None if log_forget is None else log_forget.stride(), None if weight is None else weight.stride(),
        None if count is None else late, scale, blocks, layout.entries.shape[1],
    )  # fmt: skip
    out = torch.empty_like(state)
    shape = (state.shape[0], queries.shape[-2], blocks, state.shape[3])
    partial = torch.empty(shape, dtype=torch.float32, device=state.device)
    start(
        state, k, q, v, log_forget, weight, count, layout.entries, layout.roots, layout.starts, layout.stops, out, partial
    )  # fmt: skip
    return out, partial


@on_its_device
def sums(state: Tensor, token: Token, layout: Layout) -> tuple[Tensor, Tensor]:
    """The state after the token, and the sums of each order for its queries [orders, B, H, E].

    state [B, K, F, E] in fp32, contiguous; E = e, or e + 1 if it counts keys.
    """
    out, partial = pass_over(state, token, layout, 1.0)
    batch, heads, blocks, e = partial.shape
    orders, rows = layout.cuts.numel() - 1, batch * heads
    found = torch.empty(orders, batch, heads, e, dtype=torch.float32, device=state.device)
    _sums[(rows, orders)](partial, layout.cuts, found, rows, blocks, E=e, BE=width(e), BB=BLOCKS, num_warps=8)
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
    out, partial = pass_over(state, token, layout, scale)
    batch, heads, blocks, e = partial.shape
    values = token.v.shape[-1]
    y = torch.empty((batch, 1, heads, values), dtype=dtype, device=state.device)
    after = torch.empty_like(count)
    start = _rows_launch(batch, heads, blocks, e, values, table, divisor, eps)
    start(partial, layout.cuts, count, y, after)
    return y, out, after


@lru_cache(maxsize=launch.MOST_SHAPES)
def _rows_launch(
    batch: int, heads: int, blocks: int, e: int, values: int, table: Table, divisor: str, eps: float
) -> launch.Launch:
    options = {
        "E": e, "BE": width(e), "BB": BLOCKS, "TABLE": flat(table), "ORDERS": len(table), "CENTRED": is_centred(table),
        "BY_SUM": divisor == "sum", "BY_COUNT": divisor == "count", "COUNTED": e > values, "num_warps": 8,
    }  # fmt: skip
    return launch.prepared(_rows, (batch * heads,), (heads, blocks, eps), options)


def is_centred(table: Table) -> bool:
    """Whether the coefficients depend on the row's mean score."""
    return any(len(line) > 1 for line in table)


def flat(table: Table) -> tuple[float, ...]:
    """The lines of a table, padded with zeros to equal length, one after the other."""
    return tuple(a for line in table for a in (*line, *(0.0,) * (len(table) - len(line))))


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
    PARTIAL, CUTS, COUNT, Q, K, V, RECENT_K, RECENT_V, SINK_K, SINK_V, Y, AFTER, NEXT_K, NEXT_V, NEXT_SINK_K, NEXT_SINK_V,
    q_strides, k_strides, v_strides, scale, heads, blocks, eps, W,
    SINKS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BB: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, TABLE: tl.constexpr, ORDERS: tl.constexpr,
    CENTRED: tl.constexpr,
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
    centre = mean_score(PARTIAL, CUTS, row, blocks, E, BB) if CENTRED else 0.0
    total = weighed_sums(PARTIAL, CUTS, row, centre, blocks, e, E, BB, TABLE, ORDERS)
    top = 0.0
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
    partial = cuts = None
    blocks = 0
    if layout is not None:
        leaving = Token(
            exact.recent_k[:, :, 0], token.q, exact.recent_v[:, :, 0], count=count, late=size + sinks
        )
        state, partial = pass_over(state, leaving, layout, scale)
        cuts, blocks = layout.cuts, partial.shape[2]
    y = torch.empty(batch, 1, heads, e, dtype=token.q.dtype, device=token.q.device)
    after, following = torch.empty_like(count), Exact(*(torch.empty_like(u) for u in exact))
    _window_rows[(batch * heads,)](
        partial, cuts, count, token.q, token.k, token.v, *exact, y, after, *following,
        _by_head(q), _by_head(k), _by_head(v), scale, heads, blocks, eps, size,
        SINKS=sinks, GROUP=heads // k.shape[-2], D=d, BD=width(d), E=e + 1, BE=width(e + 1), BB=BLOCKS,
        BW=min(KEYS, width(size)), BS=width(sinks), TABLE=flat(table), ORDERS=len(table), CENTRED=is_centred(table),
        num_warps=4,
    )  # fmt: skip
    return y, state, after, following
