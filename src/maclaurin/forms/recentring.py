"""Moments of keys about another point, from the moments about zero, for orders up to 2.

Σ (k − c)_a v            = S₁[a] − c_a S₀
Σ (k − c)_a (k − c)_b v  = S₂[ab] − c_a S₁[b] − c_b S₁[a] + c_a c_b S₀
"""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.forms.features import symmetric_powers

HIGHEST = 2


def moments_about(moments: Tensor, c: Tensor) -> Tensor:
    """Symmetric-packed moments [B, K, F, E] of orders 0, 1 and perhaps 2, about the points c [B, K, d]."""
    d = c.shape[-1]
    zeroth, first, second = moments[..., :1, :], moments[..., 1 : 1 + d, :], moments[..., 1 + d :, :]
    point = c.to(moments.dtype)[..., None]
    moved = [zeroth, first - point * zeroth]
    if second.shape[-2]:
        a, b = torch.triu_indices(d, d, device=moments.device)
        roots = symmetric_powers(torch.ones_like(c[0, 0], dtype=moments.dtype), (2,))[:, None]
        crossed = point[..., a, :] * (first[..., b, :] - point[..., b, :] * zeroth)
        moved.append(second - roots * (crossed + point[..., b, :] * first[..., a, :]))
    return torch.cat(moved, dim=-2)
