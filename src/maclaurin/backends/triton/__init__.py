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
