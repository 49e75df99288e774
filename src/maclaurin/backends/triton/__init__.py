"""Fused GPU programs, one file per primitive. Only this folder imports triton.

On a CPU they run in triton's interpreter (TRITON_INTERPRET=1), which is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


#: bytes of shared memory a block must be able to have: tiles are made for data-centre GPUs
_LEAST_SHARED = 160 * 1024
#: what a launch takes on its second axis
_MOST_HEADS = 65535


def runs_on(device: torch.device) -> bool:
    """Whether these programs run on tensors of that device."""
    if INTERPRETED or not INSTALLED:
        return INSTALLED and device.type == "cpu"
    return device.type == "cuda" and _is_large_enough(device)


@lru_cache(maxsize=16)
def _is_large_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _LEAST_SHARED


def addresses_fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k, v and outputs of one sequence can be addressed in 32 bits, and all heads launched."""
    batch, tokens, heads, d = q.shape
    made = tokens * heads * max(d, v.shape[3])
    given = max(u.shape[1] * u.stride(1) for u in (q, k, v))
    return max(made, given) < 1 << 31 and batch * heads <= _MOST_HEADS


def dense(u: Tensor) -> Tensor:
    """With entries of its last axis side by side, as programs read them."""
    return u if u.stride(-1) == 1 else u.contiguous()


def on_its_device(launch: Callable[P, R]) -> Callable[P, R]:
    """Launches go to the GPU of the first tensor, whichever is current."""

    @functools.wraps(launch)
    def guarded(*arguments: P.args, **options: P.kwargs) -> R:
        first = arguments[0]
        assert isinstance(first, Tensor)
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return launch(*arguments, **options)
        return launch(*arguments, **options)

    return guarded
