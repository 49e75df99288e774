"""Peak memory of a call beyond its inputs and outputs, as the CUDA allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def peak_bytes_beyond(call: Callable[[], Sequence[Tensor]], device: torch.device) -> int | None:
    """By how much the allocator's peak exceeds what lies there before and the outputs; None on a CPU.

    The outputs are held until the peak is read, so it is never below what they take.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return peak - before - sum(t.numel() * t.element_size() for t in outputs)


def free_memory(device: torch.device) -> None:
    """Hand back what nobody uses any more, so that one case does not stand in the way of the next."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
