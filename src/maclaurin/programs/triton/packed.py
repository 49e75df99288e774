"""Packed sequences read in place: which sequence a tile belongs to.

n sequences follow each other in one row of T tokens, cut at 0 = c₀ ≤ c₁ ≤ … ≤ c_n = T. Each sequence starts a new tile
of B tokens. Tile i of sequence s has the number

    j = c_s // B + s + i          for i B < c_{s+1} − c_s,          j < T // B + n

No two tiles have the same number, because c_{s+1} // B + 1 ≥ c_s // B + ⌈(c_{s+1} − c_s)/B⌉. A number depends only on
the cut of its own sequence, and the number of tiles to launch only on T and n: the host never waits for the GPU. At
most n numbers have no tile.

Programs read the places of their tiles from `PLACES` [4, tiles]: where the sequence begins, how many tokens it has, i
and s. For a number without a tile the sequence has 0 tokens: everything is masked and loops do not run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton.launch import Launch, New, by_shapes, launched, new_tensors, prepared
from maclaurin.programs.triton.tiles import cdiv

#: tiles, and cuts, that one program compares at a time
_TILES, _CUTS = 64, 128


@launched
@triton.jit(debug=True, do_not_specialize=["n", "T", "tiles"])
def _places(CUTS, PLACES, n, T, tiles, BLOCK: tl.constexpr, BJ: tl.constexpr, BS: tl.constexpr):
    """The place of tile j: in the last sequence whose first number is ≤ j. Asserts that cuts rise from 0 to T."""
    j, s = tl.program_id(0) * BJ + tl.arange(0, BJ), tl.arange(0, BS)
    found = tl.zeros((BJ,), tl.int32)
    for start in range(0, n, BS):
        cut = tl.load(CUTS + start + s, mask=start + s < n, other=0).to(tl.int32)
        next_cut = tl.load(CUTS + start + s + 1, mask=start + s < n, other=0).to(tl.int32)
        last = tl.where(start + s == n - 1, T, next_cut)
        rises = (cut <= next_cut) & (next_cut == last) & ((start + s > 0) | (cut == 0))
        tl.device_assert(rises | (start + s >= n), "cu_seqlens must rise from 0 to the number of tokens")
        number = tl.where(start + s < n, cut // BLOCK + start + s, 2147483647)
        found += tl.sum((number[None, :] <= j[:, None]).to(tl.int32), 1)
    sequence = tl.maximum(found - 1, 0)
    # no program may read or write outside the row, even for wrong cuts
    begin = tl.minimum(tl.maximum(tl.load(CUTS + sequence).to(tl.int32), 0), T)
    end = tl.minimum(tl.load(CUTS + sequence + 1).to(tl.int32), T)
    index = j - (begin // BLOCK + sequence)
    there = (index >= 0) & (index * BLOCK < end - begin)
    tl.store(PLACES + j, begin, mask=j < tiles)
    tl.store(PLACES + tiles + j, tl.where(there, end - begin, 0), mask=j < tiles)
    tl.store(PLACES + 2 * tiles + j, tl.where(there, index, 0), mask=j < tiles)
    tl.store(PLACES + 3 * tiles + j, sequence, mask=j < tiles)


@triton.jit
def place_of(PLACES, tile, tiles):
    """The place of a tile: where its sequence begins (in 64 bits), the sequence's length, the tile's i, and s."""
    begin, length = tl.load(PLACES + tile).to(tl.int64), tl.load(PLACES + tiles + tile)
    return begin, length, tl.load(PLACES + 2 * tiles + tile), tl.load(PLACES + 3 * tiles + tile)


def tiles_of_packed(tokens: int, sequences: int, tile: int) -> int:
    """How many tile numbers there are, with or without a tile."""
    return tokens // tile + sequences


def places(cuts: Tensor, tokens: int, tile: int) -> Tensor:
    """PLACES [4, tiles] for cuts [n + 1] of a row of `tokens` tokens, in one launch."""
    start, made = _places_launch(cuts.numel() - 1, tokens, tile)
    (found,) = new_tensors(cuts, made)
    start(cuts, found)
    return found


@by_shapes
def _places_launch(sequences: int, tokens: int, tile: int) -> tuple[Launch, New]:
    tiles = tiles_of_packed(tokens, sequences, tile)
    options = {"BLOCK": tile, "BJ": _TILES, "BS": _CUTS, "num_warps": 4}
    start = prepared(_places, (cdiv(tiles, _TILES),), (sequences, tokens, tiles), options)
    return start, New((4, tiles), torch.int32)
