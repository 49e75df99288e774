"""Moments of keys about another point, from the moments about zero, for orders up to 2.

Σ (k − c)_a v            = S₁[a] − c_a S₀
Σ (k − c)_a (k − c)_b v  = S₂[ab] − c_a S₁[b] − c_b S₁[a] + c_a c_b S₀

Packed, S₂[ab] for a ≤ b bears the weight of its multiset (forms/features.py): 1 where a = b, else √2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HIGHEST = 2


def moments_about(moments: Tensor, c: Tensor) -> Tensor:
    """Symmetric-packed moments [B, K, F, E] of orders 0, 1 and perhaps 2, about the points c [B, K, d]."""
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
