"""Moments as a state keeps them between calls: every multiset of indices once, not every entry.

    state   [rows, F, e (+ 1)], orders one after the other, multisets times √(their permutations), sums last
    totals  small moments and blocks, as programs read and write them (moments.py, block_layout.py)

A gradient with respect to a state has the same two layouts: features are weighed alike on both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from maclaurin.programs.triton.block_layout import block_rows, blocks, entries
from maclaurin.programs.triton.moments import Moments, small_size


def packed(totals: Moments, orders: Sequence[int], d: int, e: int, *, sums: bool) -> Tensor:
    """[B·K, F, e (+ 1)]: every multiset of indices once, times √(its permutations), orders one after the other."""
    small = _split_small(totals.small, d, e)
    parts = []
    for n in orders:
        values, weights = _moment(totals, small, n, d)
        index = _packing(d, n, values.device)
        entry = torch.cat([values, weights[..., None]], -1) if sums and weights is not None else values
        parts.append(entry[:, index.places] * index.roots[:, None])
    return torch.cat(parts, 1)


def unpacked(state: Tensor, orders: Sequence[int], d: int, e: int, highest: int) -> Moments:
    """The inverse: moments of every order up to the highest, zeros for those the state does not hold."""
    rows = state.shape[0]
    small = state.new_zeros(rows, small_size(d, e))
    first, zeroth, z_second, z_first, z_zeroth = _split_small(small, d, e)
    high = {n: state.new_zeros(rows, blocks(d, n), block_rows(d, n), e) for n in range(2, highest + 1)}
    start = 0
    for n in orders:
        index = _packing(d, n, state.device)
        held = state[:, start : start + index.places.numel()] / index.roots[:, None]
        start += index.places.numel()
        entry = held[:, index.of_entry]
        values, weights = entry[..., :e], entry[..., e] if entry.shape[-1] > e else None
        if n == 0:
            zeroth.copy_(values[:, 0])
        elif n == 1:
            first.copy_(values)
        else:
            high[n].view(rows, -1, e)[:, index.held] = values
        if weights is not None:
            {0: z_zeroth, 1: z_first}.get(n, z_second).copy_(weights.view(rows, *(d,) * n) if n else weights)
    return Moments(small, high)


class _Packing(NamedTuple):
    """places: where each multiset stands among the entries; of_entry: the multiset of each entry; held: where each
    entry stands among the rows of blocks."""

    places: Tensor
    of_entry: Tensor
    held: Tensor
    roots: Tensor


@lru_cache(maxsize=64)
def _packing(d: int, n: int, device: torch.device) -> _Packing:
    """Entries of order n are () and (a), or what the blocks of the moments hold."""
    found = list(itertools.combinations_with_replacement(range(d), n))
    number = {multiset: i for i, multiset in enumerate(found)}
    rows = list(itertools.product(range(d), repeat=n)) if n < 2 else entries(d, n)
    held = [i for i, indices in enumerate(rows) if indices is not None]
    known = [tuple(sorted(indices)) for indices in rows if indices is not None]
    place = {multiset: i for i, multiset in enumerate(known)}
    with torch.inference_mode(False):
        places = torch.tensor([place[multiset] for multiset in found], device=device)
        of_entry = torch.tensor([number[multiset] for multiset in known], device=device)
        permutations = [len(set(itertools.permutations(multiset))) for multiset in found]
        roots = torch.tensor(permutations, device=device).sqrt()
        return _Packing(places, of_entry, torch.tensor(held, device=device), roots)


def _split_small(small: Tensor, d: int, e: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Views of Σ x gᵀ, Σ g, Σ ω x xᵀ, Σ ω x and Σ ω."""
    first, zeroth, second, z_first, z_zeroth = small.split([d * e, e, d * d, d, 1], dim=-1)
    return first.unflatten(-1, (d, e)), zeroth, second.unflatten(-1, (d, d)), z_first, z_zeroth


def _moment(totals: Moments, small: tuple[Tensor, ...], n: int, d: int) -> tuple[Tensor, Tensor | None]:
    """Entries of order n [rows, entries, e], and those of the row sum [rows, entries]."""
    first, zeroth, z_second, z_first, z_zeroth = small
    if n == 0:
        return zeroth[:, None], z_zeroth
    if n == 1:
        return first, z_first
    values = totals.high[n]
    held = _packing(d, n, values.device).held
    return values.flatten(1, 2)[:, held], z_second.flatten(1) if n == 2 else None
