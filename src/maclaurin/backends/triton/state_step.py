"""One token into a state and its queries out of it: one launch, one pass over memory.

    S ← f S + φ(k) [v, 1]ᵀ,          sums of order n:  Σ_{f of order n} φ_f(q) S_f

The state [F, E] of a head is cut into blocks of features, none of which holds features of two orders, so that batch 1
fills the chip. A feature is a product of entries times a root, φ_f(x) = r_f Π_j x_{i_fj}, made in registers; an index
of d stands for 1. Every block writes what its queries read of it, and whichever block of a head is done last adds up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.backends.triton import on_its_device
from maclaurin.backends.triton.tiles import width

#: features per block
BLOCK = 16
#: few numbers a thread, so that many loads are under way
WARPS = 4


@triton.jit
def _features(X, INDEX, ROOT, f, there, D: tl.constexpr, DEGREE: tl.constexpr):
    """φ_f(x) for the features f."""
    found = tl.load(ROOT + f, mask=there, other=0.0)
    for j in tl.static_range(DEGREE):
        i = tl.load(INDEX + f * DEGREE + j, mask=there, other=D)
        found *= tl.load(X + i, mask=there & (i < D), other=1.0)
    return found


@triton.jit
def _add_up(
    PARTIAL, SUMS, CUTS, row, rows, blocks,
    GROUP: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BB: tl.constexpr, ORDERS: tl.constexpr,
):  # fmt: skip
    """The sums of each order and query, from what the blocks of its features have written."""
    e = tl.arange(0, BE)
    for i in range(GROUP * ORDERS):
        g, n = i // ORDERS, i % ORDERS
        end = tl.load(CUTS + n + 1)
        total = tl.zeros((BE,), tl.float32)
        for start in range(tl.load(CUTS + n), end, BB):
            b = start + tl.arange(0, BB)
            at = ((row * GROUP + g) * blocks + b)[:, None] * E + e[None, :]
            here = (b < end)[:, None] & (e < E)[None, :]
            total += tl.sum(tl.load(PARTIAL + at, mask=here, other=0.0, cache_modifier=".cg"), 0)
        tl.store(SUMS + ((n * rows + row) * GROUP + g) * E + e, total, mask=e < E)


@triton.jit
def _step(
    S, K, Q, COLUMNS, FORGET, INDEX, ROOT, STARTS, STOPS, CUTS, DONE, OUT, PARTIAL, SUMS,
    F, rows, blocks,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BB: tl.constexpr,
    DEGREE: tl.constexpr, ORDERS: tl.constexpr, FORGETS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """LAST: the last column lies beside a tile that is full without it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    f = tl.load(STARTS + block) + tl.arange(0, BF)
    there = f < tl.load(STOPS + block)
    e = tl.arange(0, BE)
    column = e < (E - 1 if LAST else E)
    inside = there[:, None] & column[None, :]
    line = row * F * E + f * E
    state = tl.load(S + line[:, None] + e[None, :], mask=inside, other=0.0)
    key = _features(K + row * D, INDEX, ROOT, f, there, D, DEGREE)
    kept = tl.load(FORGET + row) if FORGETS else 1.0
    state = state * kept + key[:, None] * tl.load(COLUMNS + row * E + e, mask=column, other=0.0)[None, :]
    tl.store(OUT + line[:, None] + e[None, :], state, mask=inside)
    if LAST:
        last = tl.load(S + line + E - 1, mask=there, other=0.0) * kept
        last += key * tl.load(COLUMNS + row * E + E - 1)
        tl.store(OUT + line + E - 1, last, mask=there)
    for g in tl.static_range(GROUP):
        query = _features(Q + (row * GROUP + g) * D, INDEX, ROOT, f, there, D, DEGREE)
        at = PARTIAL + ((row * GROUP + g) * blocks + block) * E
        tl.store(at + e, tl.sum(query[:, None] * state, 0), mask=column)
        if LAST:
            tl.store(at + E - 1, tl.sum(query * last, 0))
    tl.debug_barrier()  # all of the block's sums are written before it counts as done
    if tl.atomic_add(DONE + row, 1, sem="acq_rel") == blocks - 1:
        _add_up(PARTIAL, SUMS, CUTS, row, rows, blocks, GROUP, E, 2 * BE if LAST else BE, BB, ORDERS)


@on_its_device
def forward(
    state: Tensor,
    k: Tensor,
    q: Tensor,
    columns: Tensor,
    forget: Tensor | None,
    index: Tensor,
    roots: Tensor,
    starts: Tensor,
    stops: Tensor,
    cuts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The state after the token, and what queries read of each order [orders, B, K, G, E].

    state [B, K, F, E], k [B, K, d], q [B, K, G, d], columns [B, K, E], forget [B, K]; all contiguous, in fp32. Features
    are products of the entries index [F, degree] times roots [F]; blocks of them are starts[i] … stops[i] − 1, and
    order n has the blocks cuts[n] … cuts[n + 1] − 1.
    """
    batch, heads, size, e = state.shape
    group, d, blocks, orders = q.shape[2], q.shape[3], starts.numel(), cuts.numel() - 1
    out = torch.empty_like(state)
    partial = torch.empty(batch, heads, group, blocks, e, dtype=state.dtype, device=state.device)
    sums = torch.empty(orders, batch, heads, group, e, dtype=state.dtype, device=state.device)
    done = torch.zeros(batch * heads, dtype=torch.int32, device=state.device)
    last = e > 16 and width(e - 1) == e - 1
    _step[(batch * heads, blocks)](
        state, k, q, columns, forget, index, roots, starts, stops, cuts, done, out, partial, sums,
        size, batch * heads, blocks,
        GROUP=group, D=d, E=e, BE=width(e - 1 if last else e), BF=BLOCK, BB=16, DEGREE=index.shape[1], ORDERS=orders,
        FORGETS=forget is not None, LAST=last, num_warps=WARPS,
    )  # fmt: skip
    return out, sums
