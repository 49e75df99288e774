"""One process or many: what torchrun says, and how to speak together."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from maclaurin.errors import InputError


@dataclass(frozen=True)
class Processes:
    """This process's place among those of the run."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, here: bool) -> bool:
        """Whether it is so in any process."""
        return bool(self.total(torch.tensor(float(here), device=self.device)) > 0)

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()


def join(device: str) -> Processes:
    """Join the run torchrun started, or be the only process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but torch finds no CUDA device here: use device=cpu or auto.")
    here = (
        torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    )
    if kind == "cuda":
        torch.cuda.set_device(here)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return Processes(rank, world, here)


def leave() -> None:
    """End the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
