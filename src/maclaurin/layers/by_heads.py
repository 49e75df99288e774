"""One call of attention per group of heads, and its outputs back in the order of the heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from maclaurin.spec.head_groups import HeadGroup

#: (number of the group, q, k, v, gates) → y, all of the group's own heads
GroupCall = Callable[[int, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]


def attend_by_heads(
    groups: Sequence[HeadGroup], q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], call: GroupCall
) -> Tensor:
    """y [B, T, H, e] for q [B, T, H, d], k and v [B, T, Hkv, …] and gates of all heads."""
    if len(groups) == 1:
        return call(0, q, k, v, dict(gates))
    size = q.shape[2] // k.shape[2]
    outputs, order = [], []
    for number, group in enumerate(groups):
        of_queries = [head * size + i for head in group.heads for i in range(size)]
        own = {
            a.name: of_heads(gates[a.name], of_queries if a.heads == "query" else group.heads)
            for a in group.spec.arguments
        }
        q_own, k_own, v_own = of_heads(q, of_queries), of_heads(k, group.heads), of_heads(v, group.heads)
        outputs.append(call(number, q_own, k_own, v_own, own))
        order += of_queries
    y = torch.cat(outputs, dim=2)
    place = sorted(range(len(order)), key=order.__getitem__)
    return y if order == place else of_heads(y, place)


def of_heads(u: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of [B, T, heads, …]: a view where they stand side by side."""
    first, last = heads[0], heads[-1]
    if list(heads) == list(range(first, last + 1)):
        return u[:, :, first : last + 1]
    return torch.cat([u[:, :, head : head + 1] for head in heads], dim=2)
