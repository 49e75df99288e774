"""Training speed of each cell, measured alone on this machine, because the runs of a study share it.

After the runs, one process trains a few steps of each distinct config, one after the other, with all threads.
The seed, the learning rate and the number of steps do not matter for the speed, so cells that differ only in
these are measured once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from maclaurin.code_version import FREE_KEYS
from maclaurin.errors import InputError
from maclaurin.extensions import Extension, load_entry_points, load_extension
from maclaurin.plain_data import digest
from maclaurin.study.executors import threads_for, without_main_module
from maclaurin.study.run_record import Plan, Run, RunRecord, Speed

#: steps of a measurement: the first is left out, the others are read in three laps
STEPS, STEPS_PER_LAP = 13, 4
#: estimate of what opening data and model takes
SECONDS_TO_OPEN = 1.0
#: without --time, speeds are measured if that takes less than this share of the study
SMALL_SHARE = 0.05
SECONDS_BETWEEN_CHECKS = 0.5

#: keys that do not change the time of a step
NOT_TIMED = (
    *FREE_KEYS, "seed", "lr", "output_lr", "steps", "warmup", "decay_steps", "schedule", "final_lr",
    "eval_every", "eval_rows", "final_rows", "test", "equal_start", "largest_loss",
)  # fmt: skip


def subject_of(run: Run) -> str:
    """Digest of what the speed of a run depends on."""
    config = {name: value for name, value in run.config.items() if name not in NOT_TIMED}
    return digest({"config": config, "torch": run.torch, "parts": run.parts})[:32]


def to_measure(plan: Plan, runs: Mapping[str, RunRecord], known: Iterable[str]) -> dict[str, RunRecord]:
    """Subject → a finished run of it, for the subjects without a known speed."""
    found: dict[str, RunRecord] = {}
    for planned in plan.values():
        record = runs.get(planned.key)
        if record is not None and record.status == "finished":
            found.setdefault(subject_of(record.run), record)
    return {subject: record for subject, record in found.items() if subject not in set(known)}


def is_cheap(wanted: Iterable[RunRecord], runs: Iterable[RunRecord], workers: int) -> bool:
    """Whether measuring takes a small share of the time that the study takes."""
    cost = sum(SECONDS_TO_OPEN + STEPS * (record.seconds or 0.0) / record.run.steps for record in wanted)
    return cost < SMALL_SHARE * sum(record.seconds or 0.0 for record in runs) / workers


def measure(
    wanted: Mapping[str, RunRecord], code: tuple[Extension, ...], is_stopped: Callable[[], bool]
) -> dict[str, Speed]:
    """Subject → its speed, measured in a separate process; fewer if it is stopped or fails."""
    context = multiprocessing.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    configs = {subject: dict(record.run.config) for subject, record in wanted.items()}
    process = context.Process(target=_measure_all, args=(configs, code, sending), daemon=True)
    with without_main_module():
        process.start()
    sending.close()
    found: dict[str, Speed] = {}
    try:
        while not is_stopped():
            if receiving.poll(SECONDS_BETWEEN_CHECKS):
                subject, speed = receiving.recv()
                found[subject] = speed
    except EOFError:  # all are measured, or the process failed
        pass
    finally:
        process.kill()
        process.join()
    return found


def _measure_all(
    configs: Mapping[str, Mapping[str, Any]], code: tuple[Extension, ...], sending: Connection
) -> None:
    import torch

    os.setsid()  # Ctrl-C reaches the study, which ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load_entry_points()
    for extension in code:
        load_extension(extension)
    torch.set_num_threads(threads_for(1))
    for subject, config in configs.items():
        sending.send((subject, measure_one(subject, config)))


def measure_one(subject: str, settings: Mapping[str, Any]) -> Speed:
    """Train a few steps in a temporary folder."""
    from maclaurin.progress_bar import Display
    from maclaurin.study.worker import where_made
    from maclaurin.training.batches import open_data
    from maclaurin.training.config import config_from
    from maclaurin.training.processes import join, leave
    from maclaurin.training.trainer import Trainer

    config = config_from(settings)
    short = config.replace(
        steps=STEPS, warmup=0, decay_steps=STEPS, lr=1e-6, log_every=STEPS_PER_LAP, eval_every=0, eval_rows=1,
        final_rows=1, checkpoint_every=0, test=False, equal_start=False, trackers=(),
    )  # fmt: skip
    processes = join(config.device)
    try:
        with tempfile.TemporaryDirectory(prefix="maclaurin-speed-") as folder:
            trainer = Trainer(short, open_data(short, processes), Path(folder) / "run", processes)
            outcome = trainer.run(display=Display())
    finally:
        leave()
    facts = where_made(runs_at_once=1)
    return Speed(
        tokens_per_second=outcome.tokens_per_second,
        subject=subject,
        machine=facts["machine"],
        commit=facts["commit"],
        date=facts["date"],
    )


def require_local(*, executor: str, torchrun: str | None, wanted: bool | None) -> None:
    """Raise if --time is given where the runs are not trained by single processes of this machine."""
    if wanted and (executor != "local" or torchrun is not None):
        raise InputError(
            "--time measures on this machine with one process, so it cannot be combined with --executor "
            f"{executor if executor != 'local' else 'local and --torchrun'}."
        )
