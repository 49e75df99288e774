"""Which executor a study gets, and how many runs at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from maclaurin.errors import InputError
from maclaurin.study.executor import Executor
from maclaurin.study.local_executor import LocalExecutor, available_cores
from maclaurin.study.plan import PlannedRun
from maclaurin.study.ray_executor import RayExecutor
from maclaurin.study.torchrun_executor import TorchrunExecutor


def choose_executor(
    kind: str,
    runs: Sequence[PlannedRun],
    *,
    workers: int | None,
    ray_address: str | None,
    torchrun: str | None,
    out: Path,
) -> Executor:
    """Torchrun where its arguments are given, else what was asked for."""
    on_gpu = any(run.config.device == "cuda" for run in runs)
    if kind == "ray":
        return RayExecutor(ray_address, workers, on_gpu)
    if on_gpu and not torch.cuda.is_available():
        raise InputError(
            "the study runs on cuda, but torch finds no CUDA device here: --device cpu, or --dry-run to see "
            "what it would take."
        )
    if torchrun is not None:
        return TorchrunExecutor(torchrun, out)
    gpus = visible_gpus() if on_gpu else []
    most = len(gpus) if on_gpu else available_cores()
    return LocalExecutor(workers or max(1, min(most, len(runs))), gpus if len(gpus) > 1 else ())


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
