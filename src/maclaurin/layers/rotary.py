"""Rotary position embedding: pairs (uᵢ, uᵢ₊d/₂) turned by the angle position·ωᵢ, usually ωᵢ = θ^(−2i/d)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Rotary:
    """Which angles: by θ, or by frequencies of a pretrained model, which may also scale q and k."""

    theta: float = 10000.0
    frequencies: Sequence[float] | None = None
    scale: float = 1.0

    def angles(self, positions: Tensor, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, 1, d] for positions [B, T], computed in fp32."""
        if self.frequencies is None:
            frequencies = self.theta ** (
                -torch.arange(0, d, 2, device=positions.device, dtype=torch.float32) / d
            )
        else:
            frequencies = torch.tensor(self.frequencies, device=positions.device, dtype=torch.float32)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotated(u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """u [B, T, H, d] turned."""
    first, second = u.chunk(2, dim=-1)
    return u * cos + torch.cat([-second, first], dim=-1) * sin
