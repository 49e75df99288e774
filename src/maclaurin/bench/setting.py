"""The setting of a benchmark: device, dtype and sizes, and the speed of copies and matrix products there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from maclaurin.bench.bench_record import Roofs, Size
from maclaurin.bench.clock import timings
from maclaurin.errors import InputError
from maclaurin.machine import matmul_flops_per_second
from maclaurin.testing.cases import Shape
from maclaurin.testing.tolerances import TOLERANCE_BEFORE_TIMING

#: bytes of the copied tensor
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}


def measure_roofs(device: torch.device, dtype: torch.dtype, budget_ms: float) -> Roofs:
    """Bytes read and written per second by a copy, and operations per second of a matrix product."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    goal = torch.empty_like(source)
    copy = timings({"copy": lambda: goal.copy_(source)}, device, budget_ms)["copy"]
    return Roofs(
        copy_bytes_per_s=2 * source.numel() * source.element_size() / (1e-3 * copy.median),
        matmul_flops_per_s=matmul_flops_per_second(device, dtype),
        matmul_dtype=str(dtype).removeprefix("torch."),
    )


#: milliseconds to measure each number
BUDGET_MS = 150.0
QUICK_BUDGET_MS = 20.0


@final
@dataclass(frozen=True)
class Setting:
    """bf16 on a GPU, fp32 on a CPU; full shapes on a GPU unless the run is quick."""

    device: torch.device
    dtype: torch.dtype
    full_shapes: bool
    budget_ms: float

    @property
    def gpu(self) -> str | None:
        """The name of the GPU, if there is one."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def allowed_error(self) -> float:
        """The largest relative error of a result that is timed."""
        return TOLERANCE_BEFORE_TIMING[self.dtype]

    def wait(self) -> None:
        """Synchronise with the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_setting(device: str, *, quick: bool) -> Setting:
    """Full shapes in bf16 on a GPU, small ones in fp32 on a CPU."""
    chosen = torch.empty(0, device=device).device  # with the index of the GPU
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"a benchmark runs on cpu, cuda, cuda:1 …, not on {device!r}.")
    is_gpu = chosen.type == "cuda"
    return Setting(
        device=chosen,
        dtype=torch.bfloat16 if is_gpu else torch.float32,
        full_shapes=is_gpu and not quick,
        budget_ms=QUICK_BUDGET_MS if quick else BUDGET_MS,
    )


def shape_of(size: Size) -> Shape:
    """The size of a case, for `maclaurin.testing`."""
    return Shape(
        size.batch, size.tokens, size.kv_heads, group=size.heads // size.kv_heads, d=size.d, e=size.e
    )
