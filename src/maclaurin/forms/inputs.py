"""Tensors as a caller hands them over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Tensors as the user gives them, [B, T, heads, …], padding on the right."""

    q: Tensor
    k: Tensor
    v: Tensor
    input_gate: Tensor | None = None
    log_forget: Tensor | None = None
    output_gate: Tensor | None = None
    denominator_gate: Tensor | None = None
    present: Tensor | None = None  # [B, S], False for padding

    def with_values(self, v: Tensor) -> Inputs:
        """The same call on other values."""
        return dataclasses.replace(self, v=v)

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same change to every tensor but the mask."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "present"]
        changed: dict[str, Any] = {
            n: None if getattr(self, n) is None else change(getattr(self, n)) for n in names
        }
        return Inputs(**changed, present=self.present)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays, everything else is computed and kept in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


#: a log forget gate below this forgets everything; −inf would make NaN of differences
_LOWEST_LOG_FORGET = -200.0


def clamped_log_forget(inputs: Inputs) -> Tensor | None:
    """ln f [B, K, T] in the working dtype, 0 where a token is absent."""
    if inputs.log_forget is None:
        return None
    dtype = working_dtype(inputs.q.dtype)
    log_forget = inputs.log_forget.to(dtype).transpose(1, 2).clamp(min=_LOWEST_LOG_FORGET)
    return log_forget if inputs.present is None else torch.where(inputs.present[:, None], log_forget, 0.0)


def mean_key(k: Tensor, present: Tensor | None) -> Tensor:
    """The mean of all real keys, [B, 1, K, d] in the working dtype, without a gradient.

    Kernels that look at their row do not see it taken off, and smaller scores cancel less.
    """
    wide = k.detach().to(working_dtype(k.dtype))
    if present is None:
        return wide.mean(1, keepdim=True)
    real = present[:, :, None, None]
    return torch.where(real, wide, 0.0).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
