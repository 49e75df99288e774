"""Where a benchmark runs, and the random tensors it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from maclaurin.bench.bench_record import Size
from maclaurin.errors import InputError
from maclaurin.spec import AttentionSpec
from maclaurin.testing.cases import TensorCase
from maclaurin.testing.tolerances import TOLERANCE_BEFORE_TIMING

#: milliseconds each number is measured for
BUDGET_MS = 150.0
QUICK_BUDGET_MS = 20.0


@final
@dataclass(frozen=True)
class Setting:
    """bf16 on a GPU, fp32 on a CPU; full shapes on a GPU unless it is to be quick."""

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
