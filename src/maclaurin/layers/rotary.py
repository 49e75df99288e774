"""Rotary position embedding: pairs (uᵢ, uᵢ₊d/₂) turned by the angle position·θ^(−2i/d)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, d: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, d] for positions [B, T], computed in fp32."""
    frequencies = theta ** (-torch.arange(0, d, 2, device=positions.device, dtype=torch.float32) / d)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """u [B, T, H, d] turned."""
    first, second = u.chunk(2, dim=-1)
    return u * cos + torch.cat([-second, first], dim=-1) * sin
