"""Decode one token with exact keys alone, split over the GPU: two launches for window, sinks and kept keys.

One thread block for all keys of a head takes time in proportion to them, while other multiprocessors idle. So window
and slots are split into stretches, with a program for each:

    1. a stretch   its keys are read, written at their new places, and attended to: largest score m, Σ e^{x−m} and
                   Σ e^{x−m} v, for window and sinks apart from slots. Scores x of the window are stored.
    2. the join    one program per query combines its stretches; others add the attention that each key of the window
                   received, e^{x−lse} with lse over window and sinks, to its score

So every key is read once and written once; a slot's program finds the key to replace by itself, from the scores of all
slots. Keys and values have the dtype of q, scores are fp32, exponentials are to base 2. Without kept keys there are
no scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.one_query import (
    add_keys,
    add_scores,
    combined,
    keys_per_stretch,
    store_stretch,
)
from maclaurin.programs.triton.tiles import cdiv, precision, width

#: keys per tile, and scores that one program increases
KEYS, SCORES = 64, 256
_LOG2_E = 1.4426950408889634
#: numbers that differ from spec to spec; triton must not compile a version for special values such as 1
_ANY = ("W", "M", "SINKS", "stretch", "near", "stretches", "kv_heads")


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
def _stretch_of_state(
    Q, K, V, COUNT, RECENT_K, RECENT_V, SINK_K, SINK_V, RECENT_SCORE, KEPT_SCORE, KEPT_K, KEPT_V,
    NEXT_K, NEXT_V, NEXT_SINK_K, NEXT_SINK_V, NEXT_KEPT_SCORE, NEXT_KEPT_K, NEXT_KEPT_V, X, SUMS, TOTAL, LARGEST,
    q_strides, k_strides, v_strides, scale, kv_heads, W, M, SINKS, stretch, near, stretches,
    GROUP: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, KEEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first `near` programs of a head have a stretch of its window each, the first one the sinks too; others slots."""
    q_b, q_h = q_strides
    k_b, k_h = k_strides
    v_b, v_h = v_strides
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = head // kv_heads, head % kv_heads
    d, e, row = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BG)
    count = tl.load(COUNT + b)
    rows = (row < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * q_b + (g * GROUP + row)[:, None] * q_h + d[None, :], mask=rows, other=0.0)
    acc = tl.zeros((BG, BE), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    largest = tl.full((BG,), float("-inf"), tl.float32)
    if part < near:
        new_k = tl.load(K + b * k_b + g * k_h + d, mask=d < D, other=0.0)
        new_v = tl.load(V + b * v_b + g * v_h + e, mask=e < E, other=0.0)
        end = tl.minimum((part + 1) * stretch, W)
        for first in range(part * stretch, end, BN):
            j = first + tl.arange(0, BN)
            inside, is_new = j < end, j == W - 1
            k = moved(RECENT_K, NEXT_K, head, W, j + 1, j, is_new, new_k, inside, d, D)
            v = moved(RECENT_V, NEXT_V, head, W, j + 1, j, is_new, new_v, inside, e, E)
            seen = inside & (count - W + 1 + j >= SINKS)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            x = tl.where(seen[None, :], x, float("-inf"))
            if KEEPS:
                at = X + (head * GROUP + row)[:, None] * W + j[None, :]
                tl.store(at, x, mask=(row < GROUP)[:, None] & inside[None, :])
            acc, total, largest = add_scores(acc, total, largest, x, v, PRECISION)
        for first in range(0, tl.where(part == 0, SINKS, 0), BN):
            i = first + tl.arange(0, BN)
            inside, is_new = i < SINKS, i == count
            k = moved(SINK_K, NEXT_SINK_K, head, SINKS, i, i, is_new, new_k, inside, d, D)
            v = moved(SINK_V, NEXT_SINK_V, head, SINKS, i, i, is_new, new_v, inside, e, E)
            seen = inside & (i <= count)
            acc, total, largest = add_keys(acc, total, largest, q, k, v, seen, scale, PRECISION)
    elif KEEPS:
        leaving = tl.load(RECENT_SCORE + head * W)
        worst, enters = replaced_slot(KEPT_SCORE + head * M, leaving, count - W >= SINKS, M, BM)
        old_k = tl.load(RECENT_K + head * W * D + d, mask=d < D, other=0.0)
        old_v = tl.load(RECENT_V + head * W * E + e, mask=e < E, other=0.0)
        end = tl.minimum((part - near + 1) * stretch, M)
        for first in range((part - near) * stretch, end, BN):
            i = first + tl.arange(0, BN)
            inside, is_new = i < end, enters & (i == M - 1)
            source = tl.where(i < worst, i, i + 1)
            k = moved(KEPT_K, NEXT_KEPT_K, head, M, source, i, is_new, old_k, inside, d, D)
            v = moved(KEPT_V, NEXT_KEPT_V, head, M, source, i, is_new, old_v, inside, e, E)
            score = tl.load(KEPT_SCORE + head * M + source, mask=inside & (is_new == 0), other=0.0)
            score = tl.where(is_new, leaving, score)
            tl.store(NEXT_KEPT_SCORE + head * M + i, score, mask=inside)
            seen = inside & (score > float("-inf"))
            acc, total, largest = add_keys(acc, total, largest, q, k, v, seen, scale, PRECISION)
    at = (head * GROUP + row) * stretches + part
    store_stretch(SUMS, TOTAL, LARGEST, at, row < GROUP, acc, total, largest, e, E)


@launched
@triton.jit(do_not_specialize=_ANY)
def _join(
    SUMS, TOTAL, LARGEST, COUNT, X, RECENT_SCORE, Y, AFTER, NEXT_SCORE, kv_heads, W, near, stretches,
    GROUP: tl.constexpr, BG: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """The first GROUP programs of a head combine the stretches of a query each; others increase BN scores of its window."""
    head, job = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = head // kv_heads, head % kv_heads
    if job < GROUP:
        e = tl.arange(0, BE)
        y = combined(SUMS, TOTAL, LARGEST, head * GROUP + job, stretches, e, E, BP)
        tl.store(Y + (head * GROUP + job) * E + e, y.to(Y.dtype.element_ty), mask=e < E)
        tl.store(AFTER + b, tl.load(COUNT + b) + 1, mask=(g == 0) & (job == 0))
    elif KEEPS:
        row, part = tl.arange(0, BG), tl.arange(0, BP)
        at = (head * GROUP + row)[:, None] * stretches + part[None, :]
        there = (row < GROUP)[:, None] & (part < near)[None, :]
        largest = tl.load(LARGEST + at, mask=there, other=float("-inf"))
        top = tl.max(largest, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.load(TOTAL + at, mask=there, other=0.0)
        lse = top + tl.log2(tl.sum(tl.exp2(largest - top[:, None]) * total, 1))
        j = (job - GROUP) * BN + tl.arange(0, BN)
        inside = (row < GROUP)[:, None] & (j < W)[None, :]
        x = tl.load(X + (head * GROUP + row)[:, None] * W + j[None, :], mask=inside, other=0.0)
        p = tl.where(inside, tl.exp2(x - lse[:, None]), 0.0)
        before = tl.load(RECENT_SCORE + head * W + j + 1, mask=j < W - 1, other=0.0)
        tl.store(NEXT_SCORE + head * W + j, before + tl.sum(p, 0) / GROUP, mask=j < W)


@on_its_device
def step(
    q: Tensor, k: Tensor, v: Tensor, count: Tensor, held: Held, scale: float
) -> tuple[Tensor, Tensor, Held]:
    """y [B, 1, H, e] divided by the row sum; the count of tokens and the contents of the state after the token.

    q [B, H, d], k and v [B, K, …] have the dtype of the held keys and values. Without kept keys, those and all scores
    are None.
    """
    batch, heads, d = q.shape
    kv_heads, e, device = k.shape[1], v.shape[2], q.device
    group, all_heads = heads // kv_heads, batch * kv_heads
    size, sinks = held.recent_k.shape[2], held.sink_k.shape[2]
    slots = 0 if held.kept_k is None else held.kept_k.shape[2]
    stretch = keys_per_stretch(size + slots, all_heads, KEYS)
    near = cdiv(size, stretch)
    stretches = near + cdiv(slots, stretch)
    numbers = {"dtype": torch.float32, "device": device}
    sums = torch.empty(batch, heads, stretches, e, **numbers)
    total, largest = (
        torch.empty(batch, heads, stretches, **numbers),
        torch.empty(batch, heads, stretches, **numbers),
    )
    x = torch.empty(batch, heads, size, **numbers) if slots else None
    y = torch.empty(batch, 1, heads, e, dtype=q.dtype, device=device)
    after = torch.empty_like(count)
    following = Held(*(None if u is None else torch.empty_like(u) for u in held))
    options = {"GROUP": group, "BG": width(group), "E": e, "BE": width(e), "KEEPS": slots > 0, "num_warps": 4}
    next_k, next_v, next_sink_k, next_sink_v, next_score, *next_kept = following
    _stretch_of_state[(all_heads, stretches)](
        q, k, v, count, *held, next_k, next_v, next_sink_k, next_sink_v, *next_kept, x, sums, total, largest,
        q.stride()[:2], k.stride()[:2], v.stride()[:2], scale * _LOG2_E, kv_heads, size, slots, sinks, stretch, near, stretches,
        D=d, BD=width(d), BN=KEYS, BM=width(slots), PRECISION=precision(q), **options,
    )  # fmt: skip
    _join[(all_heads, group + (cdiv(size, SCORES) if slots else 0))](
        sums, total, largest, count, x, held.recent_score, y, after, next_score, kv_heads, size, near, stretches,
        BP=width(stretches), BN=SCORES, **options,
    )  # fmt: skip
    return y, after, following
