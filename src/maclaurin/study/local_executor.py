"""Runs in processes of this machine, each fresh, forked from a server that has torch loaded already."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import final

from maclaurin.study.executor import Result
from maclaurin.study.exits import result_of_exit
from maclaurin.study.job import Job
from maclaurin.study.pool import Pool, PoolEntry
from maclaurin.study.progress import RunProgress, read_progress

WORKER = "maclaurin.study.worker"


def warm_up(*more: str) -> None:
    """Start the server, which loads torch and the trainer while this process does something else.

    `more` names modules the main program has loaded: each process loads them again.
    """
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WORKER, *more])
    forkserver.ensure_running()


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(workers: int) -> int:
    """A fair share of the cores, and no more than $OMP_NUM_THREADS where that is set."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, available_cores() // workers)
    return min(share, int(limit)) if limit.isdecimal() and int(limit) > 0 else share


@final
@dataclass
class _Running:
    process: BaseProcess
    entry: PoolEntry
    slot: int


@final
class LocalExecutor:
    """So many processes at once; with several GPUs, each process has one of them."""

    def __init__(self, workers: int, gpus: Sequence[str] = ()) -> None:
        self._workers, self._gpus = workers, tuple(gpus)
        self.threads: int | None = threads_for(workers)
        self._running: dict[str, _Running] = {}

    @property
    def workers(self) -> int:
        """Processes at once."""
        return self._workers

    def free(self) -> int:
        """Slots without a process."""
        return self._workers - len(self._running)

    def submit(self, job: Job) -> None:
        """Fork one more."""
        assert job.key is not None
        taken = {running.slot for running in self._running.values()}
        slot = next(i for i in range(self._workers) if i not in taken)
        gpu = self._gpus[slot % len(self._gpus)] if self._gpus else None
        entry = Pool(Path(job.pool)).entry(job.key)
        context = multiprocessing.get_context("forkserver")
        process = context.Process(
            target=_child, args=(replace(job, gpu=gpu).to_json(),), name=f"run-{job.key[:8]}"
        )
        process.start()
        self._running[job.key] = _Running(process, entry, slot)

    def poll(self, seconds: float) -> list[Result]:
        """Those whose process has ended."""
        if not self._running:
            time.sleep(seconds)
            return []
        wait([running.process.sentinel for running in self._running.values()], seconds)
        ended = [key for key, running in self._running.items() if not running.process.is_alive()]
        results = []
        for key in ended:
            running = self._running.pop(key)
            running.process.join()
            results.append(result_of_exit(key, running.entry, running.process.exitcode))
        return results

    def progress(self) -> dict[str, RunProgress]:
        """As the files in the pool say."""
        found = {key: read_progress(running.entry.progress) for key, running in self._running.items()}
        return {key: news for key, news in found.items() if news is not None}

    def stop(self, seconds: float) -> None:
        """SIGTERM, then SIGKILL."""
        for running in self._running.values():
            running.process.terminate()
        end = time.monotonic() + seconds
        for running in self._running.values():
            running.process.join(max(0.0, end - time.monotonic()))
            if running.process.is_alive():
                running.process.kill()
                running.process.join()

    def close(self) -> None:
        """No process is left behind."""
        self.stop(0.0)


def _child(values: dict[str, object]) -> None:
    from maclaurin.study.worker import work_in_child

    work_in_child(values)
