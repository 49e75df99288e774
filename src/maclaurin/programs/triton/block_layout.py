"""Blocks of moments: how x^{⊗n} of orders 2 and 3 is split, on the host and in programs.

    S_i = Σ_s x_a X gᵀ  [rows, e],      order 2: X = x (d rows)
                                        order 3: X = the products x_b x_j of P neighbouring b (P·d rows)

In both orders a block belongs to one entry a. P is chosen so that the products fill a tile of 64 columns. In order 3
a group of P neighbouring b's has one block for each a up to the last b. If a is smaller than every b of the group, the
block counts twice, once for x_a x_b and once for x_b x_a. One program computes GROUPED blocks, so groups are padded to
a multiple of that; padding is never read.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton.tiles import width

#: blocks that one program computes in one pass over the text
GROUPED = 4
_GROUPED = tl.constexpr(GROUPED)
#: columns of a tile of products
_COLUMNS = 64


def together(d: int, order: int) -> int:
    """P: how many neighbouring b's a block has; 1 in order 2, which has no b."""
    return 1 if order == 2 else max(1, _COLUMNS // width(d))


def block_rows(d: int, order: int) -> int:
    """Rows of a block."""
    return together(d, order) * d


@lru_cache(maxsize=64)
def block_list(d: int, order: int) -> list[tuple[int, int, int]]:
    """(a, group of b's, how often the block counts) for every block; padding counts 0 times."""
    if order == 2:
        found = [(a, 0, 1) for a in range(d)]
        return found + [(0, 0, 0)] * (-d % GROUPED)
    found, p = [], together(d, order)
    for group in range(-(-d // p)):
        members = min(d, (group + 1) * p)
        found += [(a, group, 2 if a < group * p else 1) for a in range(members)]
        found += [(0, group, 0)] * (-members % GROUPED)
    return found


def blocks(d: int, order: int) -> int:
    """How many blocks there are."""
    return len(block_list(d, order))


@lru_cache(maxsize=64)
def table(d: int, order: int, device: torch.device) -> Tensor:
    """(a, group of b's) of every block, [blocks, 2]."""
    found = [(a, group) for a, group, _ in block_list(d, order)]
    return torch.tensor(found, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def times_counted(d: int, order: int, device: torch.device) -> Tensor:
    """How often each block counts in a sum over all of x^{⊗n}."""
    return torch.tensor([float(times) for _, _, times in block_list(d, order)], device=device)


def entries(d: int, order: int) -> list[tuple[int, ...] | None]:
    """The indices (a, j) or (a, b, j) of every row of every block; None for rows that are never read."""
    found: list[tuple[int, ...] | None] = []
    p = together(d, order)
    for a, group, times in block_list(d, order):
        for row in range(block_rows(d, order)):
            b, j = group * p + row // d, row % d
            known = (a, row) if order == 2 else (a, b, j)
            found.append(known if times and b < d else None)
    return found


# ------------------------------------------------------------------------------------ in programs


@triton.jit
def row_of(c, D: tl.constexpr, BD: tl.constexpr):
    """The row of a block for column c of a tile, and whether there is one; a tile has BD ≥ D columns per b."""
    return c // BD * D + c % BD, c % BD < D


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
    """S_i [c, e] for the columns c of a tile."""
    row, there = row_of(c, D, BD)
    inside = there[:, None] & (e < E)[None, :]
    return tl.load(S + (i * P * D + row)[:, None] * E + e[None, :], mask=inside, other=0.0)
