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
        if torch.compiler.is_compiling():
            return _angles_once(positions, frequencies, self.scale, dtype)
        return _angles(positions, frequencies, self.scale, dtype)


def _angles(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """scale·cos and scale·(−sin, sin) of position·ω."""
    angles = (positions[..., None].float() * frequencies)[:, :, None]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


@torch.library.custom_op("maclaurin::rotary_angles", mutates_args=())
def _angles_once(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same as one operator, so that a compiler computes it once per forward pass.

    A compiler would otherwise compute the powers, cosines and sines again in every layer for every entry of q
    and k, which takes four times as long as reading them.
    """
    return _angles(positions, frequencies, scale, dtype)


@_angles_once.register_fake
def _(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, 1, 2 * frequencies.shape[0])
    return tuple(torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))  # type: ignore[return-value]


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
