"""The machine a figure was measured on: its description, and how fast it copies and multiplies."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from maclaurin.bench.bench_record import Roofs
from maclaurin.bench.clock import timings
from maclaurin.code_version import code_version, commit

#: packages whose version may change a figure
PACKAGES = ("maclaurin", "triton", "flash-linear-attention", "retention")


def stamp() -> dict[str, Any]:
    """Date, commit, versions and processor."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def full_stamp() -> dict[str, Any]:
    """The same with a digest of the code, as a commit may be dirty, and versions of the peers."""
    versions = {name: _version(name) for name in PACKAGES}
    cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {**stamp(), "code": code_version(), "versions": {**versions, **cuda}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
