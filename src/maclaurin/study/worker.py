"""One run of a study in a process of its own, wherever that is.

    python -m maclaurin.study.worker JOB.json
    python -m torch.distributed.run --nproc-per-node 8 -m maclaurin.study.worker JOB.json

It ends with 0 and a record if the run has a result (finished or diverged), with 0 and no record if it was
asked to stop and saved a checkpoint, and with another number if it crashed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from maclaurin.code_version import code_version
from maclaurin.data.source import Source
from maclaurin.errors import InputError, MaclaurinError
from maclaurin.study.job import Job
from maclaurin.study.key import run_key
from maclaurin.study.lifeline import end_with_study
from maclaurin.study.pool import Pool, PoolEntry
from maclaurin.study.progress import RunProgress, RunTeller, read_progress, write_progress
from maclaurin.study.record import RunRecord
from maclaurin.study.run_record import make_record, provenance_of, read_summary
from maclaurin.training.batches import open_data
from maclaurin.training.config import TrainConfig, config_from
from maclaurin.training.processes import Processes, join, leave
from maclaurin.training.run_folder import RunFolder
from maclaurin.training.step import Diverged
from maclaurin.training.trainer import Trainer

Tell = Callable[[RunProgress], None]

#: of the code as it was loaded; files may be edited while a study runs
CODE = code_version()


def work(job: Job, tell: Tell | None = None) -> RunRecord | None:
    """Train the run in its pool; its record, or None if it was asked to stop.

    Whoever else is at the same run is waited for, and their result is taken.
    """
    _refuse_other_code(job)
    config = config_from(job.config)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    processes = join(config.device)
    try:
        source = open_data(config, processes)
        key = _checked_key(job, config, source)
        entry = Pool(Path(job.pool)).entry(key)
        with entry.locked() if processes.is_first else contextlib.nullcontext():
            found = entry.record()
            if _first_says(processes, found is not None):
                return found
            return _train(job, key, config, source, entry, processes, tell)
    finally:
        leave()


def _train(
    job: Job,
    key: str,
    config: TrainConfig,
    source: Source,
    entry: PoolEntry,
    processes: Processes,
    tell: Tell | None,
) -> RunRecord | None:
    before = read_progress(entry.progress)
    seconds = before.seconds if before else 0.0
    teller = RunTeller(config.steps, seconds, _telling(entry, processes, tell), says=processes.is_first)
    facts = provenance_of(job.code, source.name, source.fingerprint)

    def record(status: Any, **more: Any) -> RunRecord | None:
        if not processes.is_first:
            return None
        made = make_record(
            job, key, status, folder=entry.path, provenance=facts, seconds=teller.seconds, **more
        )
        if not job.keep_models:
            entry.drop_models()
        entry.write(made)
        return made

    if _first_says(processes, read_summary(entry.path).get("step") == config.steps):
        return record("finished", step=config.steps)  # killed between the end and the record
    resume = _first_says(processes, RunFolder(entry.path).config.exists())
    trainer = Trainer(config, source, entry.path, processes)
    size = sum(p.numel() for p in trainer.plain_model.parameters())
    try:
        outcome = trainer.run(resume=resume, display=teller)
    except Diverged as problem:
        return record("diverged", step=problem.step, parameters=size, message=str(problem))
    return record("finished", step=outcome.step, parameters=size) if outcome.finished else None


def _telling(entry: PoolEntry, processes: Processes, tell: Tell | None) -> Tell:
    """To the file in the pool, and to whom it is asked for, from the first process."""

    def pass_on(news: RunProgress) -> None:
        if processes.is_first:
            write_progress(entry.progress, news)
            if tell is not None:
                tell(news)

    return pass_on


def _first_says(processes: Processes, fact: bool) -> bool:
    """What the first process sees: another may look a moment later, when the files are there already."""
    return processes.any(fact and processes.is_first)


def _refuse_other_code(job: Job) -> None:
    if job.code != CODE:
        raise InputError(
            f"the study was begun with version {job.code[:12]} of the code, and here is {CODE[:12]}: "
            "install the same maclaurin everywhere, or start the study again."
        )


def _checked_key(job: Job, config: TrainConfig, source: Source) -> str:
    if job.data is not None and job.data != source.fingerprint:
        raise InputError(
            f"{source.name} is not the same here (fingerprint {source.fingerprint[:12]}) as where the study "
            f"was started ({job.data[:12]}): give this machine the same files."
        )
    return job.key or run_key(config, job.code, source.fingerprint)


# ------------------------------------------------------------------------------------ as a process


def work_in_child(values: dict[str, Any]) -> None:
    """A process of the local executor: alone in its session, speaking to its log, ending with its study."""
    job = Job(**values)
    os.setsid()  # Ctrl-C is for the study, which asks its runs to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _speak_to(Pool(Path(job.pool)).entry(job.key or "").log)
    sys.exit(_main(job))


def _main(job: Job) -> int:
    if job.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.gpu
    if job.study_lock is not None:
        end_with_study(Path(job.study_lock))
    try:
        work(job)
    except MaclaurinError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2
    return 0


def _speak_to(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(_main(Job.read(Path(sys.argv[1]))))
