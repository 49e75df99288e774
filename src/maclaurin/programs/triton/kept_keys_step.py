"""Decode one token with a window, sinks and kept keys: one launch, one program per key-value head.

    1. the key that leaves the window replaces the worst kept key, unless that one is better
    2. the new token attends to the updated window, sinks and slots
    3. the attention that each key in the window received (p over window and sinks) is added to its score

The queries of a key-value head are the rows of a tile. Each key is read once and written once at its new place; keys of
the window are read again for their scores. Keys and values have the dtype of q, scores are fp32. Exponentials are to
base 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.one_query import add_keys
from maclaurin.programs.triton.tiles import precision, width

#: keys per tile
KEYS = 64
_LOG2_E = 1.4426950408889634
#: numbers that differ from spec to spec; triton must not compile a version for special values such as 1
_ANY = ("W", "M", "SINKS")


class Held(NamedTuple):
    """Contents of a state, contiguous: keys and values [B, K, n, …], the newest last; scores [B, K, n] in fp32.

    A window without kept keys has neither these nor scores.
    """

    recent_k: Tensor
    recent_v: Tensor
    sink_k: Tensor
    sink_v: Tensor
    recent_score: Tensor | None = None
    kept_score: Tensor | None = None
    kept_k: Tensor | None = None
    kept_v: Tensor | None = None


@triton.jit
def moved(OLD, NEXT, head, number, source, place, is_new, new, inside, d, SIZE: tl.constexpr):
    """Load vectors [n, size] from their old places, or take the new one, and store them at their new places."""
    mask = inside[:, None] & (d < SIZE)[None, :]
    at = OLD + (head * number + source)[:, None] * SIZE + d[None, :]
    found = tl.load(at, mask=mask & (is_new == 0)[:, None], other=0.0)
    found = tl.where(is_new[:, None], new[None, :], found)
    tl.store(NEXT + (head * number + place)[:, None] * SIZE + d[None, :], found, mask=mask)
    return found


@triton.jit
def replaced_slot(KEPT_SCORE, leaving, may_enter, M, BM: tl.constexpr):
    """The slot whose key the leaving one replaces, and whether it does; M if not.

    It is the first with the lowest score, and an empty slot has −∞. Later slots move down by one, and the key becomes the last.
    """
    slot = tl.arange(0, BM)
    scores = tl.load(KEPT_SCORE + slot, mask=slot < M, other=float("inf"))
    lowest = tl.min(scores, 0)
    enters = may_enter & (leaving >= lowest)
    worst = tl.min(tl.where((scores == lowest) & (slot < M), slot, BM), 0)
    return tl.where(enters, worst, M), enters


@launched
@triton.jit(do_not_specialize=_ANY)
def _step(
    Q, K, V, COUNT, RECENT_K, RECENT_V, SINK_K, SINK_V, RECENT_SCORE, KEPT_SCORE, KEPT_K, KEPT_V,
    Y, AFTER, NEXT_K, NEXT_V, NEXT_SINK_K, NEXT_SINK_V, NEXT_SCORE, NEXT_KEPT_SCORE, NEXT_KEPT_K, NEXT_KEPT_V,
    q_strides, k_strides, v_strides, scale, kv_heads, W, M, SINKS,
    GROUP: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_b, q_h = q_strides
    k_b, k_h = k_strides
    v_b, v_h = v_strides
    head = tl.program_id(0).to(tl.int64)
    b, g = head // kv_heads, head % kv_heads
    d, e, row = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BG)
    count = tl.load(COUNT + b)
    rows = (row < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * q_b + (g * GROUP + row)[:, None] * q_h + d[None, :], mask=rows, other=0.0)
    new_k = tl.load(K + b * k_b + g * k_h + d, mask=d < D, other=0.0)
    new_v = tl.load(V + b * v_b + g * v_h + e, mask=e < E, other=0.0)

    # 1. the key to replace
    leaving = tl.load(RECENT_SCORE + head * W)
    worst, enters = replaced_slot(KEPT_SCORE + head * M, leaving, count - W >= SINKS, M, BM)
    slot = tl.arange(0, BM)
    source = tl.where(slot < worst, slot, slot + 1)
    last = enters & (slot == M - 1)
    shifted = tl.load(KEPT_SCORE + head * M + source, mask=(slot < M) & (last == 0), other=0.0)
    tl.store(NEXT_KEPT_SCORE + head * M + slot, tl.where(last, leaving, shifted), mask=slot < M)

    # 2. window and sinks, then slots
    acc = tl.zeros((BG, BE), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    largest = tl.full((BG,), float("-inf"), tl.float32)
    for first in range(0, W, BN):
        j = first + tl.arange(0, BN)
        inside, is_new = j < W, j == W - 1
        k = moved(RECENT_K, NEXT_K, head, W, j + 1, j, is_new, new_k, inside, d, D)
        v = moved(RECENT_V, NEXT_V, head, W, j + 1, j, is_new, new_v, inside, e, E)
        seen = inside & (count - W + 1 + j >= SINKS)
        acc, total, largest = add_keys(acc, total, largest, q, k, v, seen, scale, PRECISION)
    for first in range(0, SINKS, BN):
        i = first + tl.arange(0, BN)
        inside, is_new = i < SINKS, i == count
        k = moved(SINK_K, NEXT_SINK_K, head, SINKS, i, i, is_new, new_k, inside, d, D)
        v = moved(SINK_V, NEXT_SINK_V, head, SINKS, i, i, is_new, new_v, inside, e, E)
        acc, total, largest = add_keys(acc, total, largest, q, k, v, inside & (i <= count), scale, PRECISION)
    near = largest + tl.log2(total)
    old_k = tl.load(RECENT_K + head * W * D + d, mask=d < D, other=0.0)
    old_v = tl.load(RECENT_V + head * W * E + e, mask=e < E, other=0.0)
    for first in range(0, M, BN):
        i = first + tl.arange(0, BN)
        inside, is_new = i < M, enters & (i == M - 1)
        place = tl.where(i < worst, i, i + 1)
        k = moved(KEPT_K, NEXT_KEPT_K, head, M, place, i, is_new, old_k, inside, d, D)
        v = moved(KEPT_V, NEXT_KEPT_V, head, M, place, i, is_new, old_v, inside, e, E)
        score = tl.load(KEPT_SCORE + head * M + place, mask=inside & (is_new == 0), other=0.0)
        acc, total, largest = add_keys(
            acc, total, largest, q, k, v, inside & (score > float("-inf")), scale, PRECISION
        )
    y = (acc / total[:, None]).to(Y.dtype.element_ty)
    at = Y + (head * GROUP + row)[:, None] * E + e[None, :]
    tl.store(at, y, mask=(row < GROUP)[:, None] & (e < E)[None, :])

    # 3. scores of the window
    for first in range(0, W, BN):
        j = first + tl.arange(0, BN)
        inside, is_new = j < W, j == W - 1
        mask = (inside & (is_new == 0))[:, None] & (d < D)[None, :]
        k = tl.load(RECENT_K + (head * W + j + 1)[:, None] * D + d[None, :], mask=mask, other=0.0)
        k = tl.where(is_new[:, None], new_k[None, :], k)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = inside & (count - W + 1 + j >= SINKS)
        p = tl.where((row < GROUP)[:, None] & seen[None, :], tl.exp2(x - near[:, None]), 0.0)
        before = tl.load(RECENT_SCORE + head * W + j + 1, mask=inside & (is_new == 0), other=0.0)
        tl.store(NEXT_SCORE + head * W + j, before + tl.sum(p, 0) / GROUP, mask=inside)
    tl.store(AFTER + b, count + 1, mask=g == 0)


@on_its_device
def step(
    q: Tensor, k: Tensor, v: Tensor, count: Tensor, held: Held, scale: float
) -> tuple[Tensor, Tensor, Held]:
    """y [B, 1, H, e] divided by the row sum; the count of tokens and the contents of the state after the token.

    q [B, H, d], k and v [B, K, …] have the dtype of the held keys and values.
    """
    batch, heads, d = q.shape
    kv_heads, e = k.shape[1], v.shape[2]
    y = torch.empty(batch, 1, heads, e, dtype=q.dtype, device=q.device)
    assert held.kept_k is not None
    after = torch.empty_like(count)
    following = Held(*(None if u is None else torch.empty_like(u) for u in held))
    size, sinks, slots = held.recent_k.shape[2], held.sink_k.shape[2], held.kept_k.shape[2]
    group = heads // kv_heads
    _step[(batch * kv_heads,)](
        q, k, v, count, *held, y, after, *following, q.stride()[:2], k.stride()[:2], v.stride()[:2],
        scale * _LOG2_E, kv_heads, size, slots, sinks, GROUP=group, BG=width(group), D=d, E=e, BD=width(d), BE=width(e),
        BN=KEYS, BM=width(slots), PRECISION=precision(q), num_warps=4,
    )  # fmt: skip
    return y, after, following
