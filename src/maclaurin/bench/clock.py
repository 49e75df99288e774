"""Time and memory of a call: CUDA events and the CUDA allocator on a GPU, the processor's clock elsewhere."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Call = Callable[[], object]

ROUNDS = 3
MOST_SAMPLES_IN_A_ROUND = 60
#: a call slower than this is timed only once more
SLOW_MS = 1000.0
#: calls whose CPU time is measured
ISSUED_CALLS = 30
#: loops of calls after a pause, calls in each, seconds of the pause, and bytes that evict the CPU's caches
COLD_LOOPS, CALLS_IN_A_LOOP, PAUSE_S, EVICTING_BYTES = 5, 10, 0.02, 64 << 20


@final
@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    median: float
    #: half the distance between the quartiles over the median; None with fewer than four samples
    spread: float | None
    samples: int


def timings(calls: Mapping[str, Call], device: torch.device, budget_ms: float) -> dict[str, Timing]:
    """Time each call for about the budget, in turns, so that changes of the machine affect all equally.

    Samples before the first round warm up and determine how many fit the budget.
    """
    with _no_garbage_collection():
        repeats = {name: _repeats(_estimate(call, device), budget_ms) for name, call in calls.items()}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(ROUNDS):
            for name, call in calls.items():
                if turn == 0 or repeats[name] > 0:
                    found[name] += samples(call, device, max(repeats[name], 1))
    return {name: _timing(values) for name, values in found.items()}


def samples(call: Call, device: torch.device, count: int) -> list[float]:
    """Milliseconds of `count` calls one after the other."""
    return _on_cuda(call, device, count) if device.type == "cuda" else _on_processor(call, count)


def _estimate(call: Call, device: torch.device) -> float:
    """Milliseconds of the second call, since the first may compile; of the first call if it is slow."""
    first = samples(call, device, 1)[0]
    return first if first > SLOW_MS else samples(call, device, 1)[0]


def _repeats(estimate_ms: float, budget_ms: float) -> int:
    """Samples in each round; 0 for a call so slow that one sample is enough."""
    if estimate_ms > SLOW_MS:
        return 0
    return min(MOST_SAMPLES_IN_A_ROUND, max(1, math.ceil(budget_ms / ROUNDS / max(estimate_ms, 1e-6))))


def _on_cuda(call: Call, device: torch.device, count: int) -> list[float]:
    """Times by CUDA events, recorded without waiting: launches run ahead of the work and do not count."""
    with torch.cuda.device(device):
        begun = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        ended = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        torch.cuda.synchronize()
        for begin, end in zip(begun, ended, strict=True):
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(begun, ended, strict=True)]


def _on_processor(call: Call, count: int) -> list[float]:
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - begun))
    return found


def _timing(values: list[float]) -> Timing:
    median = statistics.median(values)
    if len(values) < 4:
        return Timing(median, None, len(values))
    low, _, high = statistics.quantiles(values, n=4)
    return Timing(median, (high - low) / 2 / median, len(values))


def issue_microseconds(call: Call, device: torch.device, count: int = ISSUED_CALLS) -> float | None:
    """CPU time of a call on a GPU, from the call until it returns: the median in microseconds; None on a CPU.

    The GPU is idle before each call, so that a full launch queue does not make the call wait.
    """
    if device.type != "cuda":
        return None
    with _no_garbage_collection(), torch.cuda.device(device):
        found = []
        for _ in range(count):
            torch.cuda.synchronize()
            found += _on_processor(call, 1)
    return 1e3 * statistics.median(found)


def cold_issue_microseconds(call: Call, device: torch.device) -> float | None:
    """CPU time per call of a loop of ten calls, after a pause and with cold CPU caches; None on a CPU.

    This is the cost for a program that does other work between its calls.
    """
    if device.type != "cuda":
        return None
    others = torch.zeros(EVICTING_BYTES, dtype=torch.uint8)
    with _no_garbage_collection(), torch.cuda.device(device):
        found = []
        for _ in range(COLD_LOOPS):
            torch.cuda.synchronize()
            others.add_(1)
            time.sleep(PAUSE_S)
            found.append(sum(_on_processor(call, CALLS_IN_A_LOOP)) / CALLS_IN_A_LOOP)
    return 1e3 * statistics.median(found)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switch off garbage collection during a sample."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def peak_bytes_beyond(call: Callable[[], Sequence[Tensor]], device: torch.device) -> int | None:
    """The allocator's peak, minus what was allocated before and minus the outputs; None on a CPU.

    The outputs are kept until the peak is read, so the peak is never below their size.
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
    """Release unused memory, so that the next case has it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
