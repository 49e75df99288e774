"""Where and how a benchmark runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from maclaurin.errors import InputError
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
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_setting(device: str, *, quick: bool) -> Setting:
    """On a device that is there: full shapes in bf16 on a GPU, small ones in fp32 on a CPU."""
    chosen = torch.empty(0, device=device).device  # cuda is the GPU with the number it has now
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"--device is cpu, cuda, cuda:1 …, not {device!r}.")
    is_gpu = chosen.type == "cuda"
    return Setting(
        device=chosen,
        dtype=torch.bfloat16 if is_gpu else torch.float32,
        full_shapes=is_gpu and not quick,
        budget_ms=QUICK_BUDGET_MS if quick else BUDGET_MS,
    )
