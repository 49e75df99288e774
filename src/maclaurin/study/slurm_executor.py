"""Runs as jobs of a Slurm cluster, through submitit. The nodes and the study share the pool's disk.

A job that is preempted or runs out of time is queued again and resumes from its last checkpoint. Jobs
outlive the study's own process: a restarted study waits for them and collects their results.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError, MaclaurinError, load_extra
from maclaurin.plain_data import from_plain, to_plain
from maclaurin.study.executors import Result
from maclaurin.study.pool import Pool, PoolEntry, RunPlace
from maclaurin.study.run_progress import RunProgress, read_progress
from maclaurin.study.run_record import RunRecord
from maclaurin.study.worker import Job, work

#: parameters of submitit for every cluster; others belong to Slurm, such as partition
COMMON = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "name", "stderr_to_stdout")
DEFAULT_MINUTES = 24 * 60


def require_submitit() -> Any:
    """The submitit module; raises with the install command if it is missing."""
    return load_extra("submitit", "slurm", "executor slurm")


def read_options(text: str) -> tuple[str | None, dict[str, Any]]:
    """'partition=gpu,timeout_min=600' as (cluster, parameters of submitit)."""
    cluster, found = None, {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, equals, value = word.partition("=")
        if not equals:
            raise InputError(
                f"--slurm takes name=value separated by commas, such as partition=gpu; got {word!r}."
            )
        if name == "cluster":
            cluster = value
        else:
            number = int(value) if value.isdecimal() else value
            found[name if name in COMMON else f"slurm_{name.removeprefix('slurm_')}"] = number
    return cluster, found


@final
class SlurmExecutor:
    """Submits every run as a job; `cluster=local` runs the jobs as processes on this machine."""

    def __init__(self, folder: Path, workers: int, options: str, *, on_gpu: bool) -> None:
        submitit = require_submitit()
        cluster, parameters = read_options(options)
        self._workers, self._folder = workers, folder
        self._cores = int(parameters.setdefault("cpus_per_task", 1))
        parameters.setdefault("timeout_min", DEFAULT_MINUTES)
        parameters.setdefault("name", "maclaurin")
        if on_gpu:
            parameters.setdefault("gpus_per_node", 1)
        try:
            self._executor = submitit.AutoExecutor(folder=str(folder / "%j"), cluster=cluster)
            self._executor.update_parameters(**parameters)
        except (RuntimeError, NameError, TypeError, ValueError) as problem:
            raise MaclaurinError(f"submitit cannot use this cluster: {problem}") from None
        self._running: dict[str, tuple[Any, PoolEntry]] = {}

    @property
    def workers(self) -> int:
        """Jobs in the queue at once."""
        return self._workers

    @property
    def threads(self) -> int | None:
        """The number of cores requested for a job."""
        return self._cores

    def free(self) -> int:
        """How many more jobs can be queued."""
        return self._workers - len(self._running)

    def submit(self, record: RunRecord, place: RunPlace) -> None:
        """Queue a job for this run."""
        entry = Pool(Path(place.pool)).entry(record.key)
        entry.path.mkdir(parents=True, exist_ok=True)
        on_node = dataclasses.replace(place, study_lock=None, runs_at_once=None)  # a node may have other jobs
        job = self._executor.submit(TrainJob(), to_plain(Job(record=record, place=on_node)))
        self._running[record.key] = (job, entry)

    def poll(self, seconds: float) -> list[Result]:
        """The runs whose job has ended."""
        end = time.monotonic() + seconds
        while True:
            ended = [key for key, (job, _) in self._running.items() if job.done()]
            if ended or time.monotonic() >= end:
                return [self._result(key) for key in ended]
            time.sleep(min(0.2, seconds))

    def progress(self) -> dict[str, RunProgress]:
        """Read the last reports from the files in the pool."""
        found = {key: read_progress(entry.progress) for key, (_, entry) in self._running.items()}
        return {key: progress for key, progress in found.items() if progress is not None}

    def stop(self, seconds: float) -> None:
        """Cancel the jobs; the trainer saves when it is asked to end."""
        for job, _ in self._running.values():
            job.cancel(check=False)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(job.done() for job, _ in self._running.values()):
            time.sleep(0.2)

    def close(self) -> None:
        """Jobs that are still queued stay in the queue."""

    def _result(self, key: str) -> Result:
        job, entry = self._running.pop(key)
        record = entry.record()
        if record is not None:
            return Result(key, record)
        problem = job.exception()
        if problem is None:  # wrong input, or it was stopped and saved
            wrong = job.result()
            return Result(key) if wrong is None else Result(key, problem=wrong, is_input_error=True)
        lines = str(problem).strip().splitlines()
        return Result(key, problem="\n".join(["the job failed", *lines[-12:]]))


class TrainJob:
    """The job that a node runs."""

    def __call__(self, values: dict[str, Any]) -> str | None:
        """Train, and write the record to the pool; returns the error if the input was wrong."""
        try:
            work(from_plain(Job, values))
        except InputError as problem:
            return f"error: {problem}"
        return None

    def checkpoint(self, values: dict[str, Any]) -> Any:
        """Queue again after a time limit or preemption."""
        return require_submitit().helpers.DelayedSubmission(self, values)
