"""One token of an exact window with sinks beside a polynomial tail: two launches.

    w_s = e^{x_s − c}      for the last w keys, the token's own among them, and the first few
    w_s = κ(x_s)           for the tail, the state of all keys between them; c is its mean score, or 0

The first program puts the key that leaves the window into the state and reads the state (state_step.py). The second
adds the exact keys, divides by the row sum, and writes the window down again, one place further.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.state_step import (
    BLOCKS,
    Layout,
    Table,
    Token,
    flat,
    is_centred,
    mean_score,
    pass_over,
    weighed_sums,
)
from maclaurin.programs.triton.tiles import width

#: exact keys looked at together
KEYS = 32


class Exact(NamedTuple):
    """The last keys and values [B, K, w, …], the newest last, and the first ones [B, K, s, …]; contiguous."""

    recent_k: Tensor
    recent_v: Tensor
    sink_k: Tensor
    sink_v: Tensor


@triton.jit
def _keys(OLD, NEW, place, is_old, inside, d, SIZE: tl.constexpr):
    """Kept vectors at these places [n], or the new one where they are not old: [n, size]."""
    kept = tl.load(
        OLD + place[:, None] * SIZE + d[None, :],
        mask=(inside & is_old)[:, None] & (d < SIZE)[None, :],
        other=0.0,
    ).to(tl.float32)
    new = tl.load(NEW + d, mask=d < SIZE, other=0.0).to(tl.float32)
    return tl.where(is_old[:, None], kept, new[None, :])


@triton.jit
def _with_keys(total, top, q, k, v, centre, seen):
    """Σ weights [v, 1] of the row so far, over e^top, and those of the exact keys that are seen."""
    x = tl.where(seen, tl.sum(q[None, :] * k, 1) - centre, float("-inf"))
    higher = tl.maximum(top, tl.max(x, 0))
    weights = tl.exp(x - higher)
    return total * tl.exp(top - higher) + tl.sum(weights[:, None] * v, 0), higher


@launched
@triton.jit
def _window_rows(
    PARTIAL, CUTS, COUNT, Q, K, V, RECENT_K, RECENT_V, SINK_K, SINK_V, Y, AFTER, NEXT_K, NEXT_V, NEXT_SINK_K, NEXT_SINK_V,
    q_b, q_h, k_b, k_h, v_b, v_h, scale, heads, blocks, eps, W,
    SINKS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BB: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, TABLE: tl.constexpr, ORDERS: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """The row of one query; the first query of a key-value head writes its window. Column E − 1 is the row sum."""
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
    """y [B, 1, H, e] over the row sum and eps, in the dtype of q; state, count and exact keys after the token.

    state [B, K, F, e + 1] in fp32, contiguous; the table has a line per order of the layout, which is None without a
    tail.
    """
    batch, heads, d = token.q.shape
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
        *token.q.stride()[:2], *token.k.stride()[:2], *token.v.stride()[:2], scale, heads, blocks, eps, size,
        SINKS=sinks, GROUP=heads // token.k.shape[1], D=d, BD=width(d), E=e + 1, BE=width(e + 1), BB=BLOCKS,
        BW=min(KEYS, width(size)), BS=width(sinks), TABLE=flat(table), ORDERS=len(table), CENTRED=is_centred(table),
        num_warps=4,
    )  # fmt: skip
    return y, state, after, following
