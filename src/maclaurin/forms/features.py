"""Symmetric powers: φₙ(k) has one entry per multiset of n indices, weighted so that

    φₙ(q)·φₙ(k) = (q·k)ⁿ,        C(d+n−1, n) entries instead of the dⁿ of k^⊗n.

The entry of the multiset with counts c₁ … c_d is √(n!/Πcᵢ!) Π kᵢ^cᵢ. Multisets are listed in
lexicographic order, so those of size n that start with index i are kᵢ times a suffix of those of
size n−1: the list is built by slices alone, without a gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from maclaurin.forms.tracing import untraced
from maclaurin.spec.polynomials import number_of_multisets


def symmetric_powers(u: Tensor, orders: Sequence[int]) -> Tensor:
    """φ(u) [..., F] for u [..., d]: the orders one after the other, F = Σ C(d+n−1, n)."""
    d = u.shape[-1]
    wanted = [
        _weighted(monomials, d, n) for n, monomials in _monomials(u, max(orders, default=-1)) if n in orders
    ]
    return torch.cat(wanted, dim=-1) if wanted else u[..., :0]


def feature_slices(d: int, orders: Sequence[int]) -> list[slice]:
    """Where each order lies on the feature axis."""
    ends = list(itertools.accumulate((number_of_multisets(d, n) for n in orders), initial=0))
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _monomials(u: Tensor, highest: int) -> Iterator[tuple[int, Tensor]]:
    """Π kᵢ^cᵢ for every multiset of size 0, 1, …, highest."""
    d = u.shape[-1]
    if highest >= 0:
        yield 0, torch.ones_like(u[..., :1])
    current = u
    for n in range(1, highest + 1):
        if n > 1:
            starts = _suffix_starts(d, n - 1)
            pieces = [u[..., i : i + 1] * current[..., starts[i] :] for i in range(d)]
            current = torch.cat(pieces, dim=-1)
        yield n, current


def _suffix_starts(d: int, n: int) -> list[int]:
    """For each i, where the multisets of size n over indices ≥ i begin in the list."""
    total = number_of_multisets(d, n)
    return [total - number_of_multisets(d - i, n) for i in range(d)]


def _weighted(monomials: Tensor, d: int, n: int) -> Tensor:
    if n < 2:
        return monomials
    name = f"d{d}n{n}"
    _tabulate(name, d, n)
    roots = getattr(_root_multinomials, name)
    return monomials * torch.as_tensor(roots, dtype=monomials.dtype, device=monomials.device)


class _RootMultinomials:
    """√(n!/Πcᵢ!) for the multisets of size n over d indices, in the order of _monomials.

    An attribute d3n2 holds them for d = 3, n = 2: torch.compile takes an attribute of a global object
    as an input of its graph, while the multisets themselves cannot be traced.
    """


_root_multinomials = _RootMultinomials()


@untraced
def _tabulate(name: str, d: int, n: int) -> bool:
    if not hasattr(_root_multinomials, name):
        multisets = itertools.combinations_with_replacement(range(d), n)
        roots = np.array([math.sqrt(math.factorial(n) / _repetitions(m)) for m in multisets])
        setattr(_root_multinomials, name, roots)
    return True


def _repetitions(multiset: tuple[int, ...]) -> int:
    """Πcᵢ! for a sorted multiset."""
    return math.prod(math.factorial(len(list(run))) for _, run in itertools.groupby(multiset))


#: the highest order that `moments_about` can shift
HIGHEST_MOVED = 2


def moments_about(moments: Tensor, c: Tensor) -> Tensor:
    """Moments [B, K, F, E] of orders 0, 1 and perhaps 2, shifted to the points c [B, K, d] from zero.

    Σ (k − c)_a v            = S₁[a] − c_a S₀
    Σ (k − c)_a (k − c)_b v  = S₂[ab] − c_a S₁[b] − c_b S₁[a] + c_a c_b S₀

    Packed, S₂[ab] for a ≤ b carries the weight of its multiset: 1 where a = b, else √2.
    """
    d = c.shape[-1]
    zeroth, first, second = moments[..., :1, :], moments[..., 1 : 1 + d, :], moments[..., 1 + d :, :]
    point = c.to(moments.dtype)[..., None]
    moved = [zeroth, first - point * zeroth]
    if second.shape[-2]:
        a, b = torch.triu_indices(d, d, device=moments.device)
        roots = (a != b).to(moments.dtype)[:, None] * (math.sqrt(2) - 1) + 1
        crossed = point[..., a, :] * (first[..., b, :] - point[..., b, :] * zeroth)
        moved.append(second - roots * (crossed + point[..., b, :] * first[..., a, :]))
    return torch.cat(moved, dim=-2)
