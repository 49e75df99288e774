"""The machine and the versions that a number was made with, and the speed of its matrix products."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from maclaurin.code_version import code_version, commit

#: packages whose version may change the result of a run
PACKAGES = ("maclaurin", "torch", "numpy", "transformers", "tokenizers")
#: packages whose version may change a figure of a benchmark
BENCHMARKED_PACKAGES = (
    "maclaurin", "torch", "triton", "flash-linear-attention", "retention", "cuda", "cudnn",
)  # fmt: skip
#: size of the square matrices, and seconds of warm-up and measurement
MATMUL_SIDE = {"cuda": 8192, "cpu": 512}
WARM_UP_SECONDS, MEASURED_SECONDS = 0.05, 0.2


def provenance(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Where and when a number is made: date, commit, machine, and what else its value may depend on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "code": code_version(),  # the checkout may be dirty
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions_of(packages),
    }


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    """Package → its version; None if it is not installed. "cuda" and "cudnn" are those of torch."""
    return {package: _version(package) for package in packages}


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product, by the median time of many."""
    side = MATMUL_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    _seconds_of_products(a, b, WARM_UP_SECONDS)
    return 2.0 * side**3 / statistics.median(_seconds_of_products(a, b, MEASURED_SECONDS))


def _seconds_of_products(a: torch.Tensor, b: torch.Tensor, budget: float) -> list[float]:
    """Seconds of each product, as many as fit into the budget and at least one."""
    found: list[float] = []
    while not found or sum(found) < budget:
        begun = time.perf_counter()
        torch.mm(a, b)
        if a.device.type == "cuda":
            torch.cuda.synchronize(a.device)
        found.append(time.perf_counter() - begun)
    return found


def _version(package: str) -> str | None:
    if package == "maclaurin":
        import maclaurin

        return maclaurin.__version__
    if package == "cuda":
        return torch.version.cuda
    if package == "cudnn":
        number = torch.backends.cudnn.version()
        return None if number is None else str(number)
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
