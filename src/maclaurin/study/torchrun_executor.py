"""Runs through torchrun: each over several processes, one run after the other."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import final

import torch

from maclaurin.errors import InputError
from maclaurin.study.executor import Result
from maclaurin.study.exits import result_of_exit
from maclaurin.study.job import Job
from maclaurin.study.job_file import job_file
from maclaurin.study.local_executor import WORKER
from maclaurin.study.pool import Pool, PoolEntry
from maclaurin.study.progress import RunProgress, read_progress


def torchrun_command(arguments: str, job_file: Path) -> list[str]:
    """The line that trains a job over several processes."""
    try:
        given = shlex.split(arguments)
    except ValueError as problem:
        raise InputError(f"--torchrun {arguments!r} cannot be read as arguments: {problem}.") from None
    return [sys.executable, "-m", "torch.distributed.run", *given, "-m", WORKER, str(job_file)]


def processes_of(arguments: str) -> int:
    """How many processes torchrun would start in all."""
    given = torchrun_command(arguments, Path())[3:]
    counts = {"nproc-per-node": 1, "nnodes": 1}
    for place, word in enumerate(given):
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        if name in counts and word.startswith("--"):
            value = value if equals else given[place + 1]
            counts[name] = int(value) if value.isdecimal() else max(1, torch.cuda.device_count())
    return counts["nproc-per-node"] * counts["nnodes"]


@final
class TorchrunExecutor:
    """One torchrun at a time; job files are written under the study's folder."""

    def __init__(self, arguments: str, out: Path) -> None:
        self._arguments, self._out = arguments, out
        self.threads: int | None = None  # torchrun decides
        self._running: tuple[str, subprocess.Popen[bytes], PoolEntry] | None = None

    @property
    def workers(self) -> int:
        """One run has the machine."""
        return 1

    def free(self) -> int:
        """Whether it is idle."""
        return 0 if self._running else 1

    def submit(self, job: Job) -> None:
        """Start torchrun in a session of its own, speaking to the run's log."""
        assert job.key is not None
        entry = Pool(Path(job.pool)).entry(job.key)
        entry.path.mkdir(parents=True, exist_ok=True)
        file = job_file(self._out, job)
        job.write(file)
        with entry.log.open("ab") as log:
            process = subprocess.Popen(
                torchrun_command(self._arguments, file),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._running = (job.key, process, entry)

    def poll(self, seconds: float) -> list[Result]:
        """The run, if it has ended."""
        if self._running is None:
            time.sleep(seconds)
            return []
        key, process, entry = self._running
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return []
        self._running = None
        return [result_of_exit(key, entry, code)]

    def progress(self) -> dict[str, RunProgress]:
        """As the file in the pool says."""
        if self._running is None:
            return {}
        key, _, entry = self._running
        news = read_progress(entry.progress)
        return {} if news is None else {key: news}

    def stop(self, seconds: float) -> None:
        """SIGTERM to torchrun, which hands it on; then SIGKILL."""
        if self._running is None:
            return
        _, process, _ = self._running
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """No process is left behind: its workers see that the study is gone."""
        self.stop(0.0)
