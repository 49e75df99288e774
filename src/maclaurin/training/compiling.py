"""torch.compile for the training step: when it is used, what happens if it fails, how its workers stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._dynamo.exc import TorchDynamoException

from maclaurin.errors import MaclaurinError
from maclaurin.progress_bar import still_working
from maclaurin.training.batches import StepBatch
from maclaurin.training.config import TrainConfig
from maclaurin.training.losses import MatchAttention, Objective
from maclaurin.training.optimizer_step import OptimizerStep, StepResult
from maclaurin.training.processes import Processes
from maclaurin.wording import first_line


class CompileError(MaclaurinError):
    """torch.compile was required and failed."""


def is_compiled(config: TrainConfig, objective: Objective, processes: Processes) -> bool:
    """The config's setting; by default on a GPU, unless layers are called one by one or split by FSDP.

    Layers are called one by one by match-attention, which gives each the input of the teacher's.
    """
    if config.compile is not None:
        return config.compile
    whole = processes.world == 1 or config.parallel != "fsdp"
    return processes.device.type == "cuda" and not isinstance(objective, MatchAttention) and whole


def first_compiled_step(
    step: OptimizerStep, batch: StepBatch, rate: float, *, required: bool, say: Callable[[str], None]
) -> StepResult:
    """Compile and do the first step, reporting how long that takes.

    If compilation fails, the run continues without it unless it is required.
    """
    began = time.perf_counter()
    say("compiling the training step, which can take a minute or two; without compilation it starts at once")
    step.compile()
    try:
        with still_working(say, "compiling the training step"):
            result = step(batch, rate)
            result.loss.item()  # wait for the device
    except TorchDynamoException as problem:
        reason = first_line(problem)
        if required:
            raise CompileError(f"torch.compile failed: {reason}. Train with `compile=False`.") from problem
        say(f"torch.compile failed ({reason}); training without it")
        step.run_eagerly()
        return step(batch, rate)
    say(f"first step done after {time.perf_counter() - began:.0f} s")
    return result


def end_compile_workers() -> None:
    """End the processes that torch.compile started for compiling; the next compilation starts new ones.

    torch ends them itself at exit, but before 2.13 it can wait five minutes for them there
    (pytorch/pytorch#162199): the helper process that owns them waits for workers that do not end. So the
    workers are killed first, as torch does from 2.13 on; they have nothing to save.
    """
    async_compile: Any = sys.modules.get("torch._inductor.async_compile")
    if async_compile is None:
        return
    for pool in tuple(getattr(async_compile, "_pool_set", ())):
        helper = getattr(pool, "process", None)  # other kinds of pools own their workers directly
        if helper is not None:
            for worker in _children(helper.pid):
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
    async_compile.shutdown_compile_workers()


def _children(pid: int) -> list[int]:
    """Child processes of a process; empty if the system has no /proc."""
    with suppress(OSError):
        lists = [
            (thread / "children").read_text(encoding="utf-8")
            for thread in Path(f"/proc/{pid}/task").iterdir()
        ]
        return [int(child) for text in lists for child in text.split()]
    return []
