"""Heads of a layer that differ: which heads each call takes, and where its outputs go.

    split = split_heads(groups, ((0, 2), (1,)), group_size)     groups 0 and 2 in one call, group 1 in another
    y = split.joined([… part.queries.of(q), part.keys.of(k), part.keys.of(v) … for part in split.parts])

All of it follows from the groups, so it is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.tracing import is_tracing
from maclaurin.spec.catalogue import LayerExtras
from maclaurin.spec.head_groups import HeadGroup, LayerAttention


class Selection(NamedTuple):
    """Some heads of a tensor [B, T, heads, …], in this order."""

    heads: tuple[int, ...]
    are_adjacent: bool

    @staticmethod
    def to(heads: Sequence[int]) -> Selection:
        """A selection of these heads."""
        return Selection(tuple(heads), list(heads) == list(range(heads[0], heads[-1] + 1)))

    def of(self, u: Tensor) -> Tensor:
        """These heads of a tensor: a view if they are adjacent, else a copy."""
        heads = self.heads
        if self.are_adjacent:
            return u if len(heads) == u.shape[2] else u.narrow(2, heads[0], len(heads))
        if type(u) is not Tensor or is_tracing():  # a graph must not hold our tensor of indices
            return torch.cat([u.narrow(2, head, 1) for head in heads], dim=2)
        return u.index_select(2, _indices(heads, u.device))


@lru_cache(maxsize=1024)
def _indices(heads: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(heads, device=device)


class HeadsOfPart(NamedTuple):
    """The groups that one call takes, by number, and their heads, one group after the other."""

    numbers: tuple[int, ...]
    groups: tuple[HeadGroup, ...]
    keys: Selection
    queries: Selection

    def gates(self, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gates that these groups take, of their heads."""
        if not gates:
            return {}
        arguments = {a.name: a for group in self.groups for a in group.spec.arguments if a.name in gates}
        return {
            name: (self.queries if argument.heads == "query" else self.keys).of(gates[name])
            for name, argument in arguments.items()
        }

    @property
    def layer(self) -> LayerAttention:
        """These groups as a layer of their own, with heads numbered as they lie in the part's tensors."""
        return _layer_of(self.groups)

    def each_group(self) -> tuple[HeadsOfPart, ...]:
        """The heads of each group in the part's tensors."""
        size = len(self.queries.heads) // len(self.keys.heads)
        return split_heads(self.layer.groups, tuple((n,) for n in range(len(self.groups))), size).parts


#: a global object, since torch.compile cannot make one inside a graph
_NO_EXTRAS = LayerExtras()


@lru_cache(maxsize=1024)
def _layer_of(groups: tuple[HeadGroup, ...]) -> LayerAttention:
    found, first = [], 0
    for group in groups:
        found.append(HeadGroup(tuple(range(first, first + len(group.heads))), group.spec))
        first += len(group.heads)
    return LayerAttention(tuple(found), _NO_EXTRAS)


class HeadSplit(NamedTuple):
    """All heads of a layer, in parts."""

    parts: tuple[HeadsOfPart, ...]
    #: for each query head of the layer, its place in the outputs of the parts, one after the other
    places: Selection

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The outputs [B, T, heads, e] of all parts, in the order of the layer's heads."""
        return self.places.of(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2))


@lru_cache(maxsize=1024)
def split_heads(
    groups: tuple[HeadGroup, ...], parts: tuple[tuple[int, ...], ...], group_size: int
) -> HeadSplit:
    """The heads of each part, which is given by the numbers of its groups.

    `group_size`: query heads per key-value head.
    """
    found, order = [], []
    for numbers in parts:
        of_part = tuple(groups[number] for number in numbers)
        heads = [head for group in of_part for head in group.heads]
        queries = [head * group_size + i for head in heads for i in range(group_size)]
        found.append(HeadsOfPart(numbers, of_part, Selection.to(heads), Selection.to(queries)))
        order += queries
    places = sorted(range(len(order)), key=order.__getitem__)
    return HeadSplit(tuple(found), Selection.to(places))
