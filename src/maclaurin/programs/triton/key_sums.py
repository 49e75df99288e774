"""Sums of all keys before every tile of a text, from which the mean score of a row is computed.

    P_j = P_0 + Σ_{s < 64 j} k_s          [B·K, tiles + 1, d] in fp32

Two launches: the sum of each tile, then a scan over tiles. A row adds the keys of its own tile itself.

For packed sequences P is [K, slots, d], with one slot for every possible tile number (packed.py). The sums start at
zero in each sequence: none contains keys of another sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton.launch import Launch, Layout, New, by_shapes, launched, new_tensors, prepared
from maclaurin.programs.triton.packed import place_of, tiles_of_packed
from maclaurin.programs.triton.tiles import cdiv, width

#: keys in a tile
TILE = 64


@launched
@triton.jit(do_not_specialize=["T", "tiles"])
def _tile_sums(
    K, SUMS, PLACES, k_strides, T, heads, tiles, D: tl.constexpr, BD: tl.constexpr, TILE: tl.constexpr
):
    k_b, k_t, k_h = k_strides
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, g = row // heads, row % heads
    i, d = tl.arange(0, TILE), tl.arange(0, BD)
    slot = tile
    if PLACES is not None:
        begin, T, tile, _ = place_of(PLACES, tile, tiles)
        K += begin * k_t
    first = tl.zeros((), tl.int64) + tile * TILE
    inside = (i < T - tile * TILE)[:, None] & (d < D)[None, :]
    at = K + b * k_b + g * k_h + first * k_t + i[:, None] * k_t + d[None, :]
    total = tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    tl.store(SUMS + (row * tiles + slot) * D + d, total, mask=d < D)


@launched
@triton.jit(do_not_specialize=["tiles"])
def _scan(
    SUMS, INITIAL, OUT, tiles, D: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, STARTED: tl.constexpr
):
    """Running sums, each stored for the tile after it. No row may depend on later keys, not even through rounding."""
    row = tl.program_id(0).to(tl.int64)
    d, j = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BT)
    total = tl.zeros((BC,), tl.float32)
    if STARTED:
        total = tl.load(INITIAL + row * D + d, mask=d < D, other=0.0)
    tl.store(OUT + row * (tiles + 1) * D + d, total, mask=d < D)
    for start in range(0, tiles, BT):
        inside = (start + j < tiles)[:, None] & (d < D)[None, :]
        found = tl.load(SUMS + (row * tiles + start + j)[:, None] * D + d[None, :], mask=inside, other=0.0)
        at = OUT + (row * (tiles + 1) + start + j + 1)[:, None] * D + d[None, :]
        tl.store(at, tl.cumsum(found, 0) + total[None, :], mask=inside)
        total += tl.sum(found, 0)


@launched
@triton.jit(do_not_specialize=["T", "slots"])
def _scan_sequence(
    SUMS, CUTS, OUT, T, slots, D: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr
):
    """`_scan` within one of the packed sequences."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(2)
    d, j = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BT)
    begin = tl.minimum(tl.maximum(tl.load(CUTS + s).to(tl.int32), 0), T)
    end = tl.minimum(tl.load(CUTS + s + 1).to(tl.int32), T)
    first, tiles = row * slots + begin // TILE + s, (end - begin + TILE - 1) // TILE
    total = tl.zeros((BC,), tl.float32)
    tl.store(OUT + first * D + d, total, mask=d < D)
    for start in range(0, tiles, BT):
        inside = (start + j < tiles)[:, None] & (d < D)[None, :]
        found = tl.load(SUMS + (first + start + j)[:, None] * D + d[None, :], mask=inside, other=0.0)
        has_next = (start + j + 1 < tiles)[:, None] & (d < D)[None, :]
        at = OUT + (first + start + j + 1)[:, None] * D + d[None, :]
        tl.store(at, tl.cumsum(found, 0) + total[None, :], mask=has_next)
        total += tl.sum(found, 0)


def sums_in_sequences(k: Tensor, cuts: Tensor, of_tiles: Tensor) -> Tensor:
    """P [K, slots, d] for the keys [1, T, K, d] of packed sequences; `of_tiles` are the places of tiles of TILE keys."""
    launches = _launches(Layout.of(k), False, cuts.numel() - 1)
    sums, out = new_tensors(k, *launches.made)
    launches.tiles(k, sums, of_tiles)
    launches.scan(sums, cuts, out)
    return out


def sums_before_tiles(k: Tensor, initial: Tensor | None) -> Tensor:
    """P [B·K, tiles + 1, d] for keys [B, T, K, d]; `initial` [B·K, d] is P_0, the sum of earlier keys."""
    launches = _launches(Layout.of(k), initial is not None, 0)
    sums, out = new_tensors(k, *launches.made)
    if k.shape[1]:
        launches.tiles(k, sums, None)
    launches.scan(sums, initial, out)
    return out


class _Launches(NamedTuple):
    tiles: Launch
    scan: Launch
    #: sums of tiles, and P
    made: tuple[New, New]


@by_shapes
def _launches(k: Layout, started: bool, sequences: int) -> _Launches:
    """The launches for keys [B, T, K, d]; for packed ones (B = 1), if `sequences` is not 0."""
    batch, tokens, heads, d = k.shape
    rows, columns = batch * heads, min(32, width(d))
    tiles = tiles_of_packed(tokens, sequences, TILE) if sequences else cdiv(tokens, TILE)
    of_tiles = {"D": d, "BD": width(d), "TILE": TILE, "num_warps": 2}
    of_scan = {"D": d, "BC": columns, "BT": 64, "num_warps": 4}
    if sequences:
        grid = rows, cdiv(d, columns), sequences
        scan = prepared(_scan_sequence, grid, (tokens, tiles), of_scan | {"TILE": TILE})
    else:
        scan = prepared(_scan, (rows, cdiv(d, columns)), (tiles,), of_scan | {"STARTED": started})
    return _Launches(
        prepared(_tile_sums, (rows * tiles,), (k.strides[:3], tokens, heads, tiles), of_tiles),
        scan,
        (
            New((rows, tiles, d), torch.float32),
            New((rows, tiles if sequences else tiles + 1, d), torch.float32),
        ),
    )
