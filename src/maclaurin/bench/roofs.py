"""What the machine does at most, measured in the same run: a copy of memory, a large matrix product."""

from __future__ import annotations

import torch

from maclaurin.bench.clock import timings
from maclaurin.bench.record import Roofs

#: bytes of the tensor that is copied, and the side of the matrices
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
MATMUL_SIDE = {"cuda": 8192, "cpu": 512}


def measure_roofs(device: torch.device, dtype: torch.dtype, budget_ms: float) -> Roofs:
    """Bytes read and written per second, and operations per second on random numbers."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    goal = torch.empty_like(source)
    side = MATMUL_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    found = timings({"copy": lambda: goal.copy_(source), "matmul": lambda: a @ b}, device, budget_ms)
    return Roofs(
        copy_bytes_per_s=2 * source.numel() * source.element_size() / (1e-3 * found["copy"].median),
        matmul_flops_per_s=2 * side**3 / (1e-3 * found["matmul"].median),
        matmul_dtype=str(dtype).removeprefix("torch."),
    )
