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


#: bytes of shared memory that a thread block needs: tile sizes are chosen for data-centre GPUs
_LEAST_SHARED = 160 * 1024
#: compute capability from which the tiles are known to fit
_LEAST_CAPABILITY = 9
#: the largest second axis of a launch grid
_MOST_HEADS = 65535
#: smallest absolute value of a gate on rows: rows before the gate are computed from those after it
LEAST_GATE = 1e-30


def runs_on(device: torch.device) -> bool:
    """Whether these programs run on tensors of that device."""
    return why_not_on(device) is None


def why_not_on(device: torch.device) -> str | None:
    """Why these programs do not run on that device; None if they do."""
    if not INSTALLED:
        return "triton is not installed"
    if INTERPRETED:
        return None if device.type == "cpu" else "triton's interpreter runs only on the CPU"
    if device.type != "cuda":
        return "it runs only on a GPU"
    return _why_not_on_gpu(device)


@lru_cache(maxsize=16)
def _why_not_on_gpu(device: torch.device) -> str | None:
    """`why_not_on` for a CUDA device; cached, because asking the driver is slow compared with a call."""
    if not torch.cuda.is_available():  # a plan for a GPU of another machine
        return None
    if torch.version.hip is not None:
        return "its tile sizes are chosen for NVIDIA GPUs"
    found = torch.cuda.get_device_properties(device)
    if found.major < _LEAST_CAPABILITY or found.shared_memory_per_block_optin < _LEAST_SHARED:
        return f"its tile sizes are chosen for NVIDIA Hopper and later data-centre GPUs, and this GPU is {found.name}"
    return None


def why_addresses_do_not_fit(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why 32-bit addresses or the launch grid are too small for this call; None if they suffice."""
    batch, tokens, heads, d = q.shape
    made = tokens * heads * max(d, v.shape[3])
    given = max(u.shape[1] * u.stride(1) for u in (q, k, v))
    if max(made, given) >= 1 << 31:
        return "a sequence is too long for 32-bit addresses"
    return (
        None if batch * heads <= _MOST_HEADS else f"it takes at most {_MOST_HEADS} heads over all sequences"
    )


def dense(u: Tensor) -> Tensor:
    """The tensor, copied unless the stride of its last axis is 1, as programs require."""
    return u if u.stride(-1) == 1 else u.contiguous()


def empty_rows_of_heads(like: Tensor, heads: int, *, packed: bool) -> Tensor:
    """A new tensor [B, heads, T, size] for `like` [B, ·, T, size]; tokens are outermost in memory if `packed`.

    Packed sequences are one row. The projections around attention read it token by token.
    """
    batch, _, tokens, size = like.shape
    if packed:
        return like.new_empty(batch, tokens, heads, size).transpose(1, 2)
    return like.new_empty(batch, heads, tokens, size)


def current_gpu() -> int:
    """Index of the current CUDA device. torch.cuda.current_device() first asks whether CUDA is initialised, at every call."""
    return torch._C._cuda_getDevice()  # type: ignore[attr-defined]


def on_its_device(launch: Callable[P, R]) -> Callable[P, R]:
    """Make the GPU of the first tensor the current one during the launch."""

    @functools.wraps(launch)
    def guarded(*arguments: P.args, **options: P.kwargs) -> R:
        first = arguments[0]
        assert isinstance(first, Tensor)
        if first.is_cuda and first.get_device() != current_gpu():
            with torch.cuda.device(first.device):
                return launch(*arguments, **options)
        return launch(*arguments, **options)

    return guarded
