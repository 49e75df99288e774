"""The setting of a benchmark: the machine, its speed at copies and matrix products, device, tensors."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from maclaurin.bench.bench_record import Roofs, Size
from maclaurin.bench.clock import timings
from maclaurin.code_version import code_version, commit
from maclaurin.errors import InputError
from maclaurin.spec import AttentionSpec
from maclaurin.testing.cases import TensorCase
from maclaurin.testing.tolerances import TOLERANCE_BEFORE_TIMING

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
    """The same with a digest of the code, as the checkout may be dirty, and versions of the peers."""
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


#: bytes of the copied tensor, and the size of the square matrices
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
MATMUL_SIDE = {"cuda": 8192, "cpu": 512}


def measure_roofs(device: torch.device, dtype: torch.dtype, budget_ms: float) -> Roofs:
    """Bytes read and written per second by a copy, and operations per second of a matrix product."""
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
        """bfloat16"""
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
        raise InputError(f"--device is cpu, cuda, cuda:1 …, not {device!r}.")
    is_gpu = chosen.type == "cuda"
    return Setting(
        device=chosen,
        dtype=torch.bfloat16 if is_gpu else torch.float32,
        full_shapes=is_gpu and not quick,
        budget_ms=QUICK_BUDGET_MS if quick else BUDGET_MS,
    )


SEED = 0
#: a log forget gate is between −this and 0, so that tokens a hundred steps ago still count
STRONGEST_FORGET = 0.02


def draw_inputs(spec: AttentionSpec, size: Size, dtype: torch.dtype, device: torch.device) -> TensorCase:
    """Normal q, k, v, so that scores have deviation 1; gates in (0.1, 0.9)."""
    generator = torch.Generator(device).manual_seed(SEED)
    rows = (size.batch, size.tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def uniform(heads: int, low: float, high: float) -> Tensor:
        numbers = torch.rand((*rows, heads), generator=generator, device=device, dtype=torch.float32)
        return (low + (high - low) * numbers).to(dtype)

    tensors = {
        "q": normal(*rows, size.heads, size.d),
        "k": normal(*rows, size.kv_heads, size.d),
        "v": normal(*rows, size.kv_heads, size.e),
    }
    decays = {gate.argument for gate in spec.decay_gates}
    for argument in spec.arguments:
        limits = (-STRONGEST_FORGET, 0.0) if argument in decays else (0.1, 0.9)
        heads = size.heads if argument.heads == "query" else size.kv_heads
        tensors[argument.name] = uniform(heads, *limits)
    return TensorCase(spec, tensors)


def draw_direction(size: Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random gradient of the output, [B, T, H, e]."""
    generator = torch.Generator(device).manual_seed(SEED + 1)
    shape = (size.batch, size.tokens, size.heads, size.e)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
