"""Blocks of moments: how x^{⊗n} of orders 2 and 3 is split, on the host and in programs.

    S_i = Σ_s x_a X gᵀ  [rows, e],      order 2: X = a group of up to 64 neighbouring x_j
                                        order 3: X = the products x_b x_j of a group of P neighbouring b (P·d rows)

In both orders a block belongs to one entry a and one group. P is chosen so that the products fill a tile of 64 columns.
A group has one block for each a up to its last entry. If a is smaller than every entry of the group, the block counts
twice, once for x_a x_b and once for x_b x_a. So in order 2 a head of up to 64 entries has one group and all pairs, and
one of 128 leaves out a quarter of them:

              j < 64      j ≥ 64
    a < 64    group 0     group 1, twice
    a ≥ 64    –           group 1

One program computes GROUPED blocks of a group, so groups are padded to a multiple of that; padding is never read.

With $MACLAURIN_HALVES=1 heads of exactly 64 have two groups of 32 columns in the same way (to be timed: docs/LOG.md). A
program then computes blocks of all 64 columns for entries below 32, and of the upper 32 for as many entries above.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton.tiles import width

#: blocks that one program computes in one pass over the text
GROUPED = 4
_GROUPED = tl.constexpr(GROUPED)
#: columns of a tile of products
COLUMNS = 64
_COLUMNS = tl.constexpr(COLUMNS)
#: columns of a group for heads of exactly 64
COLUMNS_OF_64 = 32 if os.environ.get("MACLAURIN_HALVES") == "1" else COLUMNS
_COLUMNS_OF_64 = tl.constexpr(COLUMNS_OF_64)


def group_columns(d: int) -> int:
    """Columns of a group of order 2."""
    return COLUMNS_OF_64 if d == COLUMNS else COLUMNS


class Block(NamedTuple):
    """The entry a of a block, its group, its first row among those of all blocks, its rows, and how often it counts.

    Padding counts 0 times.
    """

    a: int
    group: int
    first_row: int
    rows: int
    times: int


def together(d: int, order: int) -> int:
    """P: how many neighbouring b's a block of order 3 has; 1 in order 2, which has no b."""
    return 1 if order == 2 else max(1, COLUMNS // width(d))


@lru_cache(maxsize=64)
def block_list(d: int, order: int) -> list[Block]:
    """Every block, with the padding of its group."""
    found: list[Block] = []
    size = group_columns(d) if order == 2 else together(d, order)
    first_row = 0
    for group in range(-(-d // size)):
        members = min(d, (group + 1) * size)
        rows = members - group * size if order == 2 else size * d
        times = [2 if a < group * size else 1 for a in range(members)] + [0] * (-members % GROUPED)
        for a, counted in enumerate(times):
            found.append(Block(a if counted else 0, group, first_row, rows, counted))
            first_row += rows
    return found


def blocks(d: int, order: int) -> int:
    """How many blocks there are."""
    return len(block_list(d, order))


def block_rows(d: int, order: int) -> int:
    """How many rows all blocks have."""
    last = block_list(d, order)[-1]
    return last.first_row + last.rows


@lru_cache(maxsize=64)
def table(d: int, order: int, device: torch.device) -> Tensor:
    """(a, group, first row) of every block, [blocks, 3]."""
    return torch.tensor([block[:3] for block in block_list(d, order)], dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def times_counted(d: int, order: int, device: torch.device) -> Tensor:
    """How often each row counts in a sum over all of x^{⊗n}."""
    times = [float(block.times) for block in block_list(d, order) for _ in range(block.rows)]
    return torch.tensor(times, device=device)


def entries(d: int, order: int) -> list[tuple[int, ...] | None]:
    """The indices (a, j) or (a, b, j) of every row of every block; None for rows that are never read."""
    found: list[tuple[int, ...] | None] = []
    p = together(d, order)
    for block in block_list(d, order):
        for row in range(block.rows):
            b, j = block.group * p + row // d, row % d
            known = (block.a, block.group * group_columns(d) + row) if order == 2 else (block.a, b, j)
            found.append(known if block.times and max(known) < d else None)
    return found


# ------------------------------------------------------------------------------------ in programs


@triton.jit
def row_of(c, group, D: tl.constexpr, BD: tl.constexpr, ORDER: tl.constexpr):
    """The row of a block for column c of a tile, and whether there is one; in order 3, a tile has BD ≥ D columns per b."""
    if ORDER == 2:
        row, there = c, group * _COLUMNS + c < D
    else:
        row, there = c // BD * D + c % BD, c % BD < D
    return row, there


@triton.jit
def products(at, t, m, group, T, D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, OPERAND: tl.constexpr):
    """x_b x_j of the rows m for a group of b's, [m, P·BD]."""
    j = tl.arange(0, BD)
    inside = (m < T)[:, None] & (j < D)[None, :]
    x = tl.load(at + m[:, None] * t + j[None, :], mask=inside, other=0.0).to(tl.float32)
    both = group_of(at, t, m, group, T, D, P)[:, :, None] * x[:, None, :]
    return tl.reshape(both, (m.shape[0], P * BD)).to(OPERAND)


@triton.jit
def group_of(at, t, m, group, T, D: tl.constexpr, P: tl.constexpr):
    """x_b of the rows m for a group of b's in fp32, [m, P]."""
    b = group * P + tl.arange(0, P)
    inside = (m < T)[:, None] & (b < D)[None, :]
    return tl.load(at + m[:, None] * t + b[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def contracted(total, x_b, BD: tl.constexpr, P: tl.constexpr):
    """Σ_b x_b total_{bj} [m, BD], for a total [m, P·BD]."""
    return tl.sum(tl.reshape(total, (total.shape[0], P, BD)) * x_b[:, :, None], 1)


@triton.jit
def members_of(group, D: tl.constexpr, P: tl.constexpr):
    """How many a's a group has, and how many blocks with padding."""
    members = tl.minimum(D, (group + 1) * P)
    return members, tl.cdiv(members, _GROUPED) * _GROUPED


@triton.jit
def entry(at, t, a, m, T):
    """x_a of the rows m in fp32."""
    return tl.load(at + m * t + a, mask=m < T, other=0.0).to(tl.float32)


@triton.jit
def block_of(S, i, c, e, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, P: tl.constexpr):
    """S_i [c, e] of order 3 for the columns c of a tile; with i = 0 and P = 1 any [d, e]."""
    row, there = row_of(c, 0, D, BD, 3)
    inside = there[:, None] & (e < E)[None, :]
    return tl.load(S + (i * P * D + row)[:, None] * E + e[None, :], mask=inside, other=0.0)


@triton.jit
def pairs_of(S, a, j, e, D: tl.constexpr, E: tl.constexpr):
    """Σ x_a x_j gᵀ [j, e] of order 2, for columns j that have a block with a: all of them for a < 64, else j ≥ 64.

    Of heads of 64 in two groups, all columns can be read for every a.
    """
    return _rows_of(S, row_of_pair(a, j, D), j, e, D, E)


@triton.jit
def row_of_pair(a, j, D: tl.constexpr):
    """The row of x_a x_j among those of all blocks of order 2."""
    C: tl.constexpr = _COLUMNS_OF_64 if D == _COLUMNS else _COLUMNS
    if D > C:
        BEFORE: tl.constexpr = C * C - C  # rows of group 0, less the columns before group 1
        row = tl.where(j < C, a * C + j, a * (D - C) + j + BEFORE)
        if D == _COLUMNS:  # the pair (j, a) for a ≥ 32 > j
            row = tl.where((a + j * 0 >= C) & (j < C), j * (D - C) + a + BEFORE, row)
    else:
        row = a * D + j
    return row


@triton.jit
def _rows_of(S, row, j, e, D: tl.constexpr, E: tl.constexpr):
    inside = (j < D)[:, None] & (e < E)[None, :]
    return tl.load(S + row[:, None] * E + e[None, :], mask=inside, other=0.0)
