"""Rotary position embedding: pairs (uᵢ, uᵢ₊d/₂) turned by the angle position·ωᵢ, usually ωᵢ = θ^(−2i/d)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from maclaurin.forms.tracing import is_tracing


@final
@dataclass(frozen=True)
class Rotary:
    """Rotary angles, from θ or from the frequencies of a pretrained model, which may also scale q and k."""

    theta: float = 10000.0
    frequencies: Sequence[float] | None = None
    scale: float = 1.0

    def angles(self, positions: Tensor, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and (−sin, sin), each [B, T, 1, d], for positions [B, T], computed in fp32."""
        make = _frequencies if is_tracing() else _kept_frequencies
        given = None if self.frequencies is None else tuple(self.frequencies)
        frequencies = make(self.theta, given, d, positions.device)
        angles = (positions[..., None].float() * frequencies)[:, :, None]
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def _frequencies(theta: float, given: tuple[float, ...] | None, d: int, device: torch.device) -> Tensor:
    """ω [d/2] in fp32."""
    if given is not None:
        return torch.tensor(given, device=device, dtype=torch.float32)
    return theta ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)


@cache  # recorded steps hold its address
def _kept_frequencies(theta: float, given: tuple[float, ...] | None, d: int, device: torch.device) -> Tensor:
    """The same, made once per device: copying them to a GPU each time would synchronise with it."""
    with torch.inference_mode(False):
        return _frequencies(theta, given, d, device)


def rotated(u: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """(u₁, u₂) → (u₁ cos − u₂ sin, u₂ cos + u₁ sin) for u [B, T, H, d], in three operations."""
    first, second = u.chunk(2, dim=-1)
    return torch.addcmul(u * cos, torch.cat([second, first], dim=-1), signed_sin)
