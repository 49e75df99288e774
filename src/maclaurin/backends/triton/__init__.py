"""Fused GPU programs, one file per primitive. Only this folder imports triton.

On a CPU they run in triton's interpreter (TRITON_INTERPRET=1), which is how they are tested without a GPU.
"""

from __future__ import annotations

import importlib.util
import os

import torch

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(device: torch.device) -> bool:
    """Whether these programs run on tensors of that device."""
    return INSTALLED and device.type == ("cpu" if INTERPRETED else "cuda")


def addresses_fit(*tensors: torch.Tensor) -> bool:
    """Whether a sequence of each [B, T, heads, size] can be addressed from its start in 32 bits, as programs do."""
    return all(u.shape[1] * u.stride(1) < 1 << 31 for u in tensors)
