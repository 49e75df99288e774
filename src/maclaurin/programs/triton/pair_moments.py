"""Reading the moments of order 2: sums over blocks S_a that belong to one entry a (block_layout.py).

    read_pairs          Σ_a x_a X S_a    [rows, e]      numerators, and gradients of values
    pairs_times         Σ_a x_a g S_aᵀ   [rows, d]      gradients of queries and keys, for rows g like those of S
    read_both           both

A head of more than 64 entries keeps the pairs (a, j) with a < 64 ≤ j in one place. They count twice in the first sum:
X has twice its upper columns there. In the second, an entry of the product P_a = g S_aᵀ stands for the pairs (a, j) and (j, a):

    upper part     Σ_{a<64} x_a P_aj + Σ_{a≥64} x_a P_aj
    lower part     Σ_{a<64} x_a P_aj,   and   Σ_{j≥64} x_j P_aj  for column a

That last sum is taken over the columns of the product, which saves a quarter of the products. Sums for column a are
kept in memory (LOWER) until the end: to add them to one column of a tile in registers takes a comparison for each of its columns.

Heads of 64 in two groups (block_layout.py) take the first sum in the same way. In the others they read every block whole:
each row of a block is contiguous.

Rows are given by pointers to their first entries and by a mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton.block_layout import COLUMNS, COLUMNS_OF_64, pairs_of

_COLUMNS = tl.constexpr(COLUMNS)
_COLUMNS_OF_64 = tl.constexpr(COLUMNS_OF_64)


def lower_sums(x: Tensor, order: int) -> Tensor | None:
    """Memory for LOWER [B, H, 64, T], given rows x [B, T, H, d]; None where it is not needed."""
    batch, tokens, heads, d = x.shape
    if order < 2 or d <= COLUMNS:
        return None
    return torch.empty(batch, heads, COLUMNS, tokens, dtype=torch.float32, device=x.device)


@triton.jit
def add_block(total, x, factor, block, PRECISION: tl.constexpr):
    """total + x_a X S_a, where the product X S_a is multiplied by the entry x_a.

    Multiplying X by x_a first would save a multiplication. But then X is in registers that the next iteration
    overwrites while a product may still be reading them: triton 3.6 does not wait for the last three parts of a product
    (head size 16 with a row sum had infinite gradients on an H200). This order is no slower, and rounds less.
    """
    return total + tl.dot(x, block, input_precision=PRECISION) * factor[:, None]


@triton.jit
def read_pairs(x, at, inside, S, there, e, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr):
    """Σ_a x_a X S_a [rows, e]; 0 unless `there`."""
    d = tl.arange(0, x.shape[1])
    total = tl.zeros((x.shape[0], e.shape[0]), tl.float32)
    C: tl.constexpr = _COLUMNS_OF_64 if D == _COLUMNS else _COLUMNS
    FIRST: tl.constexpr = D if D < C else C
    counted = _twice_upper(x, d, C)
    for a in range(there * FIRST):
        total = add_block(total, counted, _entry(at, inside, a), pairs_of(S, a, d, e, D, E), PRECISION)
    if D > C:
        j = tl.arange(0, C) + C
        upper = _columns(at, inside, j, D).to(x.dtype)
        for a in range(FIRST, there * (D - FIRST) + FIRST):
            total = add_block(total, upper, _entry(at, inside, a), pairs_of(S, a, j, e, D, E), PRECISION)
    return total


@triton.jit
def pairs_times(g, at, inside, S, there, LOWER, step, e, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Σ_a x_a g S_aᵀ [rows, d]; 0 unless `there`. LOWER: pointers to 64 numbers for each row, `step` apart, or None."""
    d = tl.arange(0, BD)
    if D <= _COLUMNS:
        total = tl.zeros((g.shape[0], BD), tl.float32)
        for a in range(there * D):
            block = tl.trans(pairs_of(S, a, d, e, D, E))
            total = add_block(total, g, _entry(at, inside, a), block, PRECISION)
    else:
        c = tl.arange(0, _COLUMNS)
        x_upper = _columns(at, inside, c + _COLUMNS, D).to(tl.float32)
        lower = tl.zeros((g.shape[0], _COLUMNS), tl.float32)
        upper = lower
        for a in range(there * _COLUMNS):
            product = tl.dot(g, tl.trans(pairs_of(S, a, d, e, D, E)), input_precision=PRECISION)
            left, right = _halves(product)
            tl.store(LOWER + a * step, tl.sum(right * x_upper, 1), mask=inside)
            factor = _entry(at, inside, a)[:, None]
            lower, upper = lower + left * factor, upper + right * factor
        for a in range(_COLUMNS, there * (D - _COLUMNS) + _COLUMNS):
            block = tl.trans(pairs_of(S, a, c + _COLUMNS, e, D, E))
            upper = add_block(upper, g, _entry(at, inside, a), block, PRECISION)
        tl.debug_barrier()  # other threads may have stored what this one loads
        known = inside[:, None] & ((c * 0 + there) > 0)[None, :]
        lower += tl.load(LOWER[:, None] + c[None, :] * step, mask=known, other=0.0)
        total = _side_by_side(lower, upper)
    return total


@triton.jit
def read_both(x, g, at, inside, S, there, LOWER, step, e, D: tl.constexpr, E: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Σ_a x_a X S_a [rows, e] and Σ_a x_a g S_aᵀ [rows, d]; 0 unless `there`.

    Heads of up to 64 entries load each block once for both. For larger ones the sums of both do not fit in registers
    beside two products, so one follows the other; the one with more registers first.
    """
    d = tl.arange(0, x.shape[1])
    if D > _COLUMNS:
        times = pairs_times(g, at, inside, S, there, LOWER, step, e, D, E, x.shape[1], PRECISION)
        read = read_pairs(x, at, inside, S, there, e, D, E, PRECISION)
    else:
        read = tl.zeros((x.shape[0], e.shape[0]), tl.float32)
        times = tl.zeros(x.shape, tl.float32)
        for a in range(there * D):
            factor, block = _entry(at, inside, a), pairs_of(S, a, d, e, D, E)
            read = add_block(read, x, factor, block, PRECISION)
            times = add_block(times, g, factor, tl.trans(block), PRECISION)
    return read, times


@triton.jit
def sums_at(LOWER, head, row, T):
    """Pointers to the numbers of rows of one head in LOWER [heads, 64, T]."""
    return LOWER + head * (T * _COLUMNS) + row


@triton.jit
def _entry(at, inside, a):
    """x_a of every row in fp32."""
    return tl.load(at + a, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _columns(at, inside, j, D: tl.constexpr):
    """The entries j of every row."""
    return tl.load(at[:, None] + j[None, :], mask=inside[:, None] & (j < D)[None, :], other=0.0)


@triton.jit
def _twice_upper(x, d, C: tl.constexpr):
    """X with its columns from C on twice as large; exact in every dtype."""
    if x.shape[1] > C:
        x = tl.where(d >= C, x + x, x)
    return x


@triton.jit
def _halves(product):
    """The lower and the upper 64 columns."""
    return tl.split(tl.permute(tl.reshape(product, (product.shape[0], 2, _COLUMNS)), (0, 2, 1)))


@triton.jit
def _side_by_side(lower, upper):
    """[lower | upper]"""
    both = tl.permute(tl.join(lower, upper), (0, 2, 1))
    return tl.reshape(both, (lower.shape[0], 2 * _COLUMNS))
