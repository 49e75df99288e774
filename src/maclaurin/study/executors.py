"""Where runs are trained: the interface of an executor, and the two executors for this machine.

Ray and Slurm have their own files.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, final

import torch

from maclaurin.errors import InputError
from maclaurin.study.pool import Pool, PoolEntry, RunPlace
from maclaurin.study.run_progress import RunProgress, read_progress
from maclaurin.study.run_record import RunRecord
from maclaurin.study.worker import INPUT_ERROR, Job, work_in_child

WORKER = "maclaurin.study.worker"
EXECUTORS = ("local", "ray", "slurm")


@final
@dataclass(frozen=True)
class Result:
    """How a run ended: with a record, with a problem (it crashed), or with neither (it was stopped).

    is_input_error   whether the problem is wrong input, such as a setting that cannot work
    """

    key: str
    record: RunRecord | None = None
    problem: str | None = None
    is_input_error: bool = False


class Executor(Protocol):
    """Trains runs somewhere, several at a time."""

    @property
    def workers(self) -> int:
        """How many runs it trains at once."""
        ...

    @property
    def threads(self) -> int | None:
        """Torch threads of each run; None if something else decides."""
        ...

    def free(self) -> int:
        """How many more runs it can take now."""
        ...

    def submit(self, record: RunRecord, place: RunPlace) -> None:
        """Start a run."""
        ...

    def poll(self, seconds: float) -> list[Result]:
        """The runs that ended since the last call; waits at most this long for one."""
        ...

    def progress(self) -> dict[str, RunProgress]:
        """Key → the last report of each running run."""
        ...

    def stop(self, seconds: float) -> None:
        """Ask all runs to save and end, wait at most this long, then kill them."""
        ...

    def close(self) -> None:
        """Release resources; no more runs will be submitted."""
        ...


def result_of_exit(entry: PoolEntry, code: int | None) -> Result:
    """The result of a process that exited: its record, else stopped for code 0 and crashed for any other."""
    record = entry.record()
    if record is not None or code == 0:
        return Result(entry.path.name, record)
    lines, ended = entry.last_lines(), _how_it_ended(code)
    problem = f"{ended}\n{lines}" if lines else ended
    return Result(entry.path.name, problem=problem, is_input_error=code == INPUT_ERROR)


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the process was ended by {name}"
    return f"the process ended with exit code {code}"


# ---------------------------------------------------------------------- processes of this machine


def warm_up() -> None:
    """Start the server that loads torch and the trainer, from which each run is forked in milliseconds."""
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload([WORKER])
    forkserver.ensure_running()


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(workers: int) -> int:
    """An equal share of the cores, and no more than $OMP_NUM_THREADS if it is set."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, available_cores() // workers)
    return min(share, int(limit)) if limit.isdecimal() and int(limit) > 0 else share


def visible_gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


@final
@dataclass
class _Running:
    process: BaseProcess
    entry: PoolEntry
    slot: int


@final
class LocalExecutor:
    """Several processes at once; with several GPUs, each process uses one of them."""

    def __init__(self, workers: int, gpus: Sequence[str] = ()) -> None:
        self._workers, self._gpus = workers, tuple(gpus)
        self._running: dict[str, _Running] = {}

    @property
    def workers(self) -> int:
        """Processes at once."""
        return self._workers

    @property
    def threads(self) -> int | None:
        """An equal share of the cores."""
        return threads_for(self._workers)

    def free(self) -> int:
        """Slots without a process."""
        return self._workers - len(self._running)

    def submit(self, record: RunRecord, place: RunPlace) -> None:
        """Start a process for this run."""
        taken = {running.slot for running in self._running.values()}
        slot = next(i for i in range(self._workers) if i not in taken)
        gpu = self._gpus[slot % len(self._gpus)] if self._gpus else None
        context = multiprocessing.get_context("forkserver")
        job = Job(record=record, place=place, gpu=gpu)
        process = context.Process(target=work_in_child, args=(job,), name=f"run-{record.key[:8]}")
        with without_main_module():
            process.start()
        entry = Pool(Path(place.pool)).entry(record.key)
        self._running[record.key] = _Running(process, entry, slot)

    def poll(self, seconds: float) -> list[Result]:
        """The runs whose process has ended."""
        if not self._running:
            time.sleep(seconds)
            return []
        wait([running.process.sentinel for running in self._running.values()], seconds)
        ended = [key for key, running in self._running.items() if not running.process.is_alive()]
        results = []
        for key in ended:
            running = self._running.pop(key)
            running.process.join()
            results.append(result_of_exit(running.entry, running.process.exitcode))
        return results

    def progress(self) -> dict[str, RunProgress]:
        """Read the last reports from the files in the pool."""
        found = {key: read_progress(running.entry.progress) for key, running in self._running.items()}
        return {key: progress for key, progress in found.items() if progress is not None}

    def stop(self, seconds: float) -> None:
        """Send SIGTERM to every process, then SIGKILL to those that are left."""
        for running in self._running.values():
            running.process.terminate()
        end = time.monotonic() + seconds
        for running in self._running.values():
            running.process.join(max(0.0, end - time.monotonic()))
            if running.process.is_alive():
                running.process.kill()
                running.process.join()

    def close(self) -> None:
        """Kill every process that is left."""
        self.stop(0.0)


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the user's script, which multiprocessing would run again in each process."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


# --------------------------------------------------------------------------------------- torchrun


def torchrun_command(arguments: str, job_file: Path) -> list[str]:
    """The command line that trains a job with several processes."""
    try:
        given = shlex.split(arguments)
    except ValueError as problem:
        raise InputError(f"--torchrun {arguments!r} cannot be read as arguments: {problem}.") from None
    return [sys.executable, "-m", "torch.distributed.run", *given, "-m", WORKER, str(job_file)]


def processes_of(arguments: str) -> int:
    """How many processes torchrun would start in total."""
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
        self._running: tuple[subprocess.Popen[bytes], PoolEntry] | None = None

    @property
    def workers(self) -> int:
        """One: a run uses the whole machine."""
        return 1

    @property
    def threads(self) -> int | None:
        """None: torchrun sets them."""
        return None

    def free(self) -> int:
        """1 if no run is in progress, else 0."""
        return 0 if self._running else 1

    def submit(self, record: RunRecord, place: RunPlace) -> None:
        """Start torchrun in its own session, with its output in the run's log."""
        entry = Pool(Path(place.pool)).entry(record.key)
        entry.path.mkdir(parents=True, exist_ok=True)
        file = self._out / "jobs" / f"{record.key}.json"
        Job(record=record, place=place).write(file)
        with entry.log.open("ab") as log:
            process = subprocess.Popen(
                torchrun_command(self._arguments, file),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._running = (process, entry)

    def poll(self, seconds: float) -> list[Result]:
        """The run, if it has ended."""
        if self._running is None:
            time.sleep(seconds)
            return []
        process, entry = self._running
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return []
        self._running = None
        return [result_of_exit(entry, code)]

    def progress(self) -> dict[str, RunProgress]:
        """Read the last report from the file in the pool."""
        if self._running is None:
            return {}
        _, entry = self._running
        progress = read_progress(entry.progress)
        return {} if progress is None else {entry.path.name: progress}

    def stop(self, seconds: float) -> None:
        """Send SIGTERM to torchrun, which passes it on; then SIGKILL."""
        if self._running is None:
            return
        process, _ = self._running
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Kill torchrun; its workers notice and end."""
        self.stop(0.0)


# ---------------------------------------------------------------------------------------- choosing


def check_executor(kind: str, torchrun: str | None) -> None:
    """Raise if the executor is unknown or cannot use torchrun."""
    if kind not in EXECUTORS:
        raise InputError(f"--executor is {', '.join(EXECUTORS[:-1])} or {EXECUTORS[-1]}, not {kind!r}.")
    if torchrun is not None and kind != "local":
        raise InputError(
            f"--torchrun starts processes on this machine, so it cannot be combined with --executor {kind}."
        )


def choose_executor(
    kind: str,
    records: Sequence[RunRecord],
    *,
    out: Path,
    workers: int | None = None,
    ray_address: str | None = None,
    torchrun: str | None = None,
    slurm: str | None = None,
) -> Executor:
    """The requested executor; raises if it cannot work here."""
    on_gpu = any(record.run.config["device"] == "cuda" for record in records)
    if kind == "ray":
        from maclaurin.study.ray_executor import RayExecutor

        return RayExecutor(ray_address, workers, on_gpu)
    if kind == "slurm":
        from maclaurin.study.slurm_executor import SlurmExecutor

        return SlurmExecutor(out / "slurm", workers or len(records), slurm or "", on_gpu=on_gpu)
    if on_gpu and not torch.cuda.is_available():
        raise InputError(
            "the study runs on cuda, but torch finds no CUDA device here: use --device cpu, or "
            "--dry-run to print its cost."
        )
    if torchrun is not None:
        return TorchrunExecutor(torchrun, out)
    gpus = visible_gpus() if on_gpu else []
    most = len(gpus) if on_gpu else available_cores()
    return LocalExecutor(workers or max(1, min(most, len(records))), gpus if len(gpus) > 1 else ())
