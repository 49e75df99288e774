"""One process or many: rank, device, and the collective calls of a run under torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from maclaurin.device import resolve_device
from maclaurin.errors import InputError

#: how long processes wait for the first one to prepare data; collective calls keep torch's own timeout
PREPARATION_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class Processes:
    """The place of this process among those of the run."""

    rank: int
    world: int
    device: torch.device
    #: a separate group for waits that may take hours; None in a single process
    patient_group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, here: bool) -> bool:
        """Whether it is true in any process."""
        if self.world == 1:
            return here
        return bool(self.total(torch.tensor(float(here), device=self.device)) > 0)

    def wait(self) -> None:
        """Wait until all processes are here; torch times out after some minutes."""
        if self.world > 1:
            dist.barrier()

    def wait_for_preparation(self) -> None:
        """Wait until all processes are here, for days if necessary."""
        if self.world > 1:
            dist.barrier(group=self.patient_group)


def join(device: str) -> Processes:
    """Join the processes that torchrun started, or run as a single process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    kind = resolve_device(device)
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but torch finds no CUDA device here: use device=cpu or auto.")
    here = torch.device(kind)
    if kind == "cuda":
        here = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(here)
    if world == 1:
        return Processes(rank, world, here)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    patient = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT))
    return Processes(rank, world, here, patient)


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
