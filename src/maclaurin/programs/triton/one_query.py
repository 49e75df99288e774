"""Softmax attention of one query per head over many keys, some of which may be absent: two launches.

    y = Σ_s p_s v_s,     p the softmax over the keys that are present

Keys are split into stretches, so that a single text fills the GPU. The first program computes, for each
stretch, its largest score m, the sum z of e^{x−m} and the sum of e^{x−m} v. The second one combines stretches.
Absent keys are not read. The queries of a key-value head are the rows of a tile; exponentials are to base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.tiles import cdiv, precision, width

#: keys per tile
KEYS = 64
#: enough programs to fill a GPU twice; the largest number of stretches that are combined
_PROGRAMS, _MOST_STRETCHES = 264, 128
_LOG2_E = 1.4426950408889634
#: numbers that change with every token; triton must not compile a version for special values such as 1
_ANY = ("S", "stretch", "stretches", "present_stride")


@triton.jit
def add_keys(acc, total, largest, q, k, v, seen, scale, PRECISION: tl.constexpr):
    """Add a tile of keys to the running maximum, sum and output of all queries."""
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    return add_scores(acc, total, largest, tl.where(seen[None, :], x, float("-inf")), v, PRECISION)


@triton.jit
def add_scores(acc, total, largest, x, v, PRECISION: tl.constexpr):
    """The same for scores x that are computed already, −∞ where a key is not seen."""
    new = tl.maximum(largest, tl.max(x, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(largest - safe)
    p = tl.exp2(x - safe[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total * shrink + tl.sum(p, 1), new


@launched
@triton.jit(do_not_specialize=_ANY)
def _stretch(
    Q, K, V, PRESENT, SUMS, TOTAL, LARGEST, q_strides, k_strides, v_strides, present_stride, S, stretch, stretches,
    kv_heads, scale, GROUP: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All queries of one key-value head over one stretch of its keys."""
    q_b, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = head // kv_heads, head % kv_heads
    d, e, row = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BG)
    rows = (row < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * q_b + (g * GROUP + row)[:, None] * q_h + d[None, :], mask=rows, other=0.0)
    acc = tl.zeros((BG, BE), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    largest = tl.full((BG,), float("-inf"), tl.float32)
    last = tl.minimum((part + 1) * stretch, S)
    for first in range(part * stretch, last, BN):
        t = (first + tl.arange(0, BN)).to(tl.int64)
        seen = t < last
        if MASKED:
            seen = seen & (tl.load(PRESENT + b * present_stride + t, mask=seen, other=0) != 0)
        k = tl.load(
            K + b * k_b + g * k_h + t[:, None] * k_t + d[None, :],
            mask=seen[:, None] & (d < D)[None, :],
            other=0.0,
        )
        v = tl.load(
            V + b * v_b + g * v_h + t[:, None] * v_t + e[None, :],
            mask=seen[:, None] & (e < E)[None, :],
            other=0.0,
        )
        acc, total, largest = add_keys(acc, total, largest, q, k, v, seen, scale, PRECISION)
    at = (head * GROUP + row) * stretches + part
    store_stretch(SUMS, TOTAL, LARGEST, at, row < GROUP, acc, total, largest, e, E)


@triton.jit
def store_stretch(SUMS, TOTAL, LARGEST, at, inside, acc, total, largest, e, E: tl.constexpr):
    """Store what queries found in a stretch, at entries `at` of the tensors of all stretches."""
    tl.store(SUMS + at[:, None] * E + e[None, :], acc, mask=inside[:, None] & (e < E)[None, :])
    tl.store(TOTAL + at, total, mask=inside)
    tl.store(LARGEST + at, largest, mask=inside)


@triton.jit
def combined(SUMS, TOTAL, LARGEST, row, stretches, e, E: tl.constexpr, BN: tl.constexpr):
    """The row [e] of one query, from all stretches; zeros if it sees no key."""
    n = tl.arange(0, BN)
    there = n < stretches
    largest = tl.load(LARGEST + row * stretches + n, mask=there, other=float("-inf"))
    top = tl.max(largest, 0)
    factor = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(factor * tl.load(TOTAL + row * stretches + n, mask=there, other=0.0), 0)
    at = (row * stretches + n)[:, None] * E + e[None, :]
    sums = tl.load(SUMS + at, mask=there[:, None] & (e < E)[None, :], other=0.0)
    return tl.sum(factor[:, None] * sums, 0) / tl.where(total == 0, 1.0, total)


@launched
@triton.jit(do_not_specialize=_ANY)
def _combine(SUMS, TOTAL, LARGEST, Y, stretches, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr):
    """The row of one query, from all stretches."""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, BE)
    y = combined(SUMS, TOTAL, LARGEST, row, stretches, e, E, BN)
    tl.store(Y + row * E + e, y.to(Y.dtype.element_ty), mask=e < E)


def keys_per_stretch(keys: int, heads: int, tile: int) -> int:
    """A multiple of the tile, so that all stretches of these heads fill a GPU."""
    most = max(1, min(_MOST_STRETCHES, _PROGRAMS // heads, cdiv(keys, tile)))
    return cdiv(cdiv(keys, most), tile) * tile


@on_its_device
def rows(q: Tensor, k: Tensor, v: Tensor, present: Tensor | None, scale: float) -> Tensor:
    """y [B, 1, H, e] for q [B, 1, H, d], k [B, S, K, d], v [B, S, K, e] and present [B, S], with dense last axes."""
    batch, _, heads, d = q.shape
    keys, kv_heads, e = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    stretch = keys_per_stretch(keys, batch * kv_heads, KEYS)
    stretches = max(1, cdiv(keys, stretch))
    new = {"dtype": torch.float32, "device": q.device}
    sums = torch.empty(batch, heads, stretches, e, **new)
    total, largest = torch.empty(batch, heads, stretches, **new), torch.empty(batch, heads, stretches, **new)
    y = torch.empty(batch, 1, heads, e, dtype=q.dtype, device=q.device)
    _stretch[(batch * kv_heads, stretches)](
        q, k, v, present, sums, total, largest, (q.stride(0), q.stride(2)), k.stride()[:3], v.stride()[:3],
        0 if present is None else present.stride(0), keys, stretch, stretches, kv_heads, scale * _LOG2_E,
        GROUP=group, BG=width(group), D=d, E=e, BD=width(d), BE=width(e), BN=KEYS, MASKED=present is not None,
        PRECISION=precision(q), num_warps=4,
    )  # fmt: skip
    _combine[(batch * heads,)](
        sums, total, largest, y, stretches, E=e, BE=width(e), BN=width(stretches), num_warps=4
    )
    return y
