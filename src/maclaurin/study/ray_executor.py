"""Runs as tasks of a Ray cluster, on any node; a run whose node dies is run again elsewhere.

Nodes need the same versions, but need not share a disk with the study: a worker that does not see the pool
trains in a folder on its node and sends the record back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError, MaclaurinError, load_extra
from maclaurin.plain_data import from_plain, to_plain
from maclaurin.study.executors import Result
from maclaurin.study.pool import Pool, RunPlace
from maclaurin.study.run_progress import RunProgress
from maclaurin.study.run_record import RunRecord
from maclaurin.study.worker import Job, work

#: how often a run is restarted after its node or process was lost
RETRIES = 5
SECONDS_TO_ANSWER = 10.0


def require_ray() -> Any:
    """The ray module; raises with the install command if it is missing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return load_extra("ray", "ray", "executor ray")


@final
class RayExecutor:
    """Connects to the cluster at `address`, to the one $RAY_ADDRESS names, or starts one on this machine."""

    def __init__(self, address: str | None, workers: int | None, on_gpu: bool) -> None:
        self._ray = ray = require_ray()
        _refuse_unreachable(address or os.environ.get("RAY_ADDRESS"))
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None and "RAY_ADDRESS" not in os.environ:
            options["include_dashboard"] = False
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            first = (str(problem).splitlines() or [type(problem).__name__])[0]
            raise MaclaurinError(f"no Ray cluster answers at {address or 'this machine'}: {first}") from None
        total = ray.cluster_resources()
        cores = max(1, int(total.get("CPU", 1)))
        places = max(1, int(total.get("GPU", 1))) if on_gpu else cores
        self._workers = workers or places
        self._threads = max(1, cores // self._workers)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        board = ray.remote(num_cpus=0, max_concurrency=8)(Board)
        self._board = board.options(scheduling_strategy=here).remote()
        self._task = ray.remote(max_calls=1, max_retries=RETRIES, retry_exceptions=False)(train_task).options(
            num_cpus=1 if on_gpu else self._threads, num_gpus=1 if on_gpu else 0
        )
        self._running: dict[Any, tuple[str, str]] = {}  # task → key, pool

    @property
    def workers(self) -> int:
        """Runs at once."""
        return self._workers

    @property
    def threads(self) -> int | None:
        """An equal share of the cluster's cores."""
        return self._threads

    def free(self) -> int:
        """How many more tasks can start now."""
        return self._workers - len(self._running)

    def submit(self, record: RunRecord, place: RunPlace) -> None:
        """Start a task for this run."""
        # tasks go to any node, so how many share one is unknown
        job = Job(record=record, place=dataclasses.replace(place, study_lock=None, runs_at_once=None))
        self._running[self._task.remote(to_plain(job), self._board)] = (record.key, place.pool)

    def poll(self, seconds: float) -> list[Result]:
        """The runs whose task has ended; records from other disks are written to the pool here."""
        if not self._running:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._running), timeout=seconds, num_returns=1)
        return [self._result(reference) for reference in ready]

    def progress(self) -> dict[str, RunProgress]:
        """The last report of each task, from the `Board` actor."""
        try:
            reports = self._ray.get(self._board.reports.remote(), timeout=2)
        except self._ray.exceptions.RayError:
            return {}
        running = {key for key, _ in self._running.values()}
        return {key: RunProgress(**values) for key, values in reports.items() if key in running}

    def stop(self, seconds: float) -> None:
        """Interrupt the tasks, which save and end; then kill their processes."""
        for reference in self._running:
            self._ray.cancel(reference, force=False)
        if self._running:
            count = len(self._running)
            _, late = self._ray.wait(list(self._running), timeout=seconds, num_returns=count)
            for reference in late:
                self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster, which ends the tasks that still run."""
        self._ray.shutdown()

    def _result(self, reference: Any) -> Result:
        key, pool = self._running.pop(reference)
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.TaskCancelledError:
            return Result(key)
        except self._ray.exceptions.RayError as problem:
            return Result(key, problem=f"the run was lost {RETRIES + 1} times: {problem}")
        if answer["record"] is None:
            return Result(key, problem=answer["problem"], is_input_error=answer["is_input_error"])
        record = from_plain(RunRecord, answer["record"])
        entry = Pool(Path(pool)).entry(key)
        if entry.record() is None:  # trained on another disk
            entry.write(record)
        return Result(key, record)


def _refuse_unreachable(address: str | None) -> None:
    """Raise at once if no cluster answers; Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # auto, local, or none
        return
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except OSError as problem:
        raise MaclaurinError(f"no Ray cluster answers at {address}: {problem}.") from None


class Board:
    """An actor on the study's node that keeps the last report of each run."""

    def __init__(self) -> None:
        self._reports: dict[str, dict[str, Any]] = {}

    def report(self, key: str, progress: dict[str, Any]) -> None:
        """The last report of a run."""
        self._reports[key] = progress

    def reports(self) -> dict[str, dict[str, Any]]:
        """The last reports of all runs."""
        return self._reports


def train_task(values: dict[str, Any], board: Any) -> dict[str, Any]:
    """Train on a node and return the record as data; neither record nor problem if it was stopped."""
    job = from_plain(Job, values)
    if not Pool(Path(job.place.pool)).has_marker(job.place.marker):
        own = str(Path(tempfile.gettempdir()) / "maclaurin-pool")
        job = dataclasses.replace(job, place=dataclasses.replace(job.place, pool=own))

    def report(progress: RunProgress) -> None:
        with contextlib.suppress(Exception):  # a lost report must not end the run
            board.report.remote(job.record.key, to_plain(progress))

    answer: dict[str, Any] = {"record": None, "problem": None, "is_input_error": False}
    try:
        record = work(job, report)
    except KeyboardInterrupt:
        return answer
    except MaclaurinError as problem:
        wrong = isinstance(problem, InputError)
        return {**answer, "problem": f"error: {problem}", "is_input_error": wrong}
    except Exception:
        return {**answer, "problem": traceback.format_exc(limit=-6)}
    return {**answer, "record": None if record is None else to_plain(record)}
