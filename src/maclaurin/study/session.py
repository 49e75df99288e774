"""Train the runs of a plan with an executor, until all have results or a signal asks to stop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import final

from maclaurin.errors import InputError
from maclaurin.stop_request import StopRequest
from maclaurin.study.executors import Executor, Result
from maclaurin.study.live_table import Overview, Row, RowStatus, View
from maclaurin.study.metrics import task_of
from maclaurin.study.plan_runs import INSTALLED_TORCH
from maclaurin.study.pool import SECONDS_TO_SAVE, Pool, RunPlace
from maclaurin.study.run_progress import RunProgress, read_progress
from maclaurin.study.run_record import SETTLED, Label, NextRuns, Plan, RunRecord, Status
from maclaurin.study.worker import from_folder

POLL_SECONDS = 0.5
#: of the expected time of a run must be left to start it under a limit of time
SPARE = 1.15

Changed = Callable[[dict[str, RunRecord]], object]


class Interrupted(Exception):
    """A signal asked the study to stop."""


@final
class Session:
    """One executor and one pool, for one or several plans."""

    def __init__(
        self,
        executor: Executor,
        place: RunPlace,
        view: View,
        *,
        retry: bool = False,
        elsewhere: str | None = None,
        seconds: float | None = None,
        at_once: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._executor, self._place, self._view, self._retry = executor, place, view, retry
        #: version of torch, not the installed one, that made the results: nothing is trained here
        self._elsewhere = elsewhere
        #: experiment → most of its runs at a time, where that is limited
        self._at_once = at_once
        self.pool = Pool(Path(place.pool))
        self._begun = time.monotonic()
        #: when it stops as if by a signal; None: when all runs have a result
        self._end = None if seconds is None else self._begun + seconds
        self._is_over = False
        #: whether a run was started here, not only reused
        self.has_trained = False
        self._stop_request = StopRequest(
            "SIGINT", "SIGTERM", "SIGHUP"
        )  # a second Ctrl-C does not wait for runs to save

    def __enter__(self) -> Session:
        self._stop_request.__enter__()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop_request.__exit__()
        self._executor.close()

    @property
    def interrupted(self) -> bool:
        """Whether a signal asked to stop, or the time is up."""
        self._is_over |= self._end is not None and time.monotonic() >= self._end
        return self._is_over or self._stop_request.is_set

    @property
    def workers(self) -> int:
        """How many runs are trained at once."""
        return self._executor.workers

    def train(
        self,
        plan: Plan,
        metrics: Mapping[str, str],
        changed: Changed,
        next_runs: NextRuns = lambda results: {},
    ) -> dict[str, RunRecord]:
        """Key → final record; `changed` is called with the current records whenever a run begins or ends.

        `metrics` maps each experiment to the number the view shows. `next_runs` is asked for further runs at
        the start and whenever runs end, so none waits for a slower one.
        """
        state = _State(self.pool, metrics)
        self._add(state, plan, next_runs)
        changed(state.records())
        with self._view:
            while state.has_work and not self.interrupted:
                begun = self._submit(state)
                results = self._executor.poll(POLL_SECONDS)
                ended = state.settle(results, stopping=self.interrupted)
                state.progress |= self._executor.progress()
                if ended and not self.interrupted:
                    self._add(state, {}, next_runs)
                if begun or ended:
                    changed(state.records())
                self._show(state)
            if self.interrupted:
                self._stop(state)
            self._show(state)
        changed(state.records())
        return state.records()

    def _add(self, state: _State, plan: Plan, next_runs: NextRuns) -> None:
        """Add runs, and those that follow from results in the pool."""
        while True:
            state.add(plan)
            if self._retry:
                state.forget_failures(plan)
            state.take_results()
            self._refuse_other_torch(state)
            plan = next_runs(state.results)
            if not plan:
                return

    def _refuse_other_torch(self, state: _State) -> None:
        if self._elsewhere is not None and state.waiting:
            raise InputError(
                f"{len(state.waiting)} runs have no result of torch {self._elsewhere} in {self.pool.root}, "
                f"and this machine has torch {INSTALLED_TORCH}: train them where torch "
                f"{self._elsewhere} is installed, or leave out the version."
            )

    def _submit(self, state: _State) -> bool:
        """Submit waiting runs while the executor has free slots; not those that another study is training."""
        free, changed = self._executor.free(), False
        for key in list(state.waiting):
            if free < 1:
                break
            if state.take_result(key):
                changed = True
            elif not self._would_end(state, state.waiting[key]) or self._is_full(state, key):
                continue
            elif not self.pool.entry(key).is_busy():
                record = state.waiting.pop(key)
                place = dataclasses.replace(
                    self._place, run_name=state.tracked_name(key), job_type=_job_type(record)
                )
                self._executor.submit(record, place)
                state.running.add(key)
                self.has_trained = True
                free, changed = free - 1, True
        if state.waiting and not state.running:
            self._is_over |= not any(self._would_end(state, record) for record in state.waiting.values())
        return changed

    def _is_full(self, state: _State, key: str) -> bool:
        """Whether as many runs of the experiment are trained as may be at a time."""
        of = state.experiment(key)
        running = sum(state.experiment(each) == of for each in state.running)
        return of in self._at_once and running >= self._at_once[of]

    def _would_end(self, state: _State, record: RunRecord) -> bool:
        """Whether a run can be started: it would end before the time is up, or it keeps checkpoints.

        A run that is stopped can be continued anywhere its folder in the pool is.
        """
        if self._end is None or record.run.config["checkpoint_every"]:
            return True
        expected = state.expected_seconds(record)
        return expected is None or SPARE * expected < self._end - time.monotonic()

    def _stop(self, state: _State) -> None:
        self._executor.stop(SECONDS_TO_SAVE)
        results = self._executor.poll(0.0)
        while results:
            state.settle(results, stopping=True)
            results = self._executor.poll(1.0) if state.running else []
        state.running.clear()

    def _show(self, state: _State) -> None:
        elapsed = time.monotonic() - self._begun
        self._view.show(Overview(state.rows(), elapsed, self._executor.workers))


@final
class _State:
    """Which runs of a session wait, run or have a result."""

    def __init__(self, pool: Pool, metrics: Mapping[str, str]) -> None:
        self._pool, self._metrics = pool, metrics
        self._asked: dict[str, RunRecord] = {}  # by key: two cells may share a run
        self._labels: dict[str, Label] = {}
        self.waiting: dict[str, RunRecord] = {}
        self.running: set[str] = set()
        self.progress: dict[str, RunProgress] = {}
        self.results: dict[str, RunRecord] = {}
        self._reused: set[str] = set()
        self._stopped: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, plan: Plan) -> None:
        for label, record in plan.items():
            self._labels.setdefault(record.key, label)
            if record.key not in self._asked:
                self._asked[record.key] = self.waiting[record.key] = record

    def forget_failures(self, plan: Plan) -> None:
        """Delete failed results of runs that wait, so that they are trained again."""
        for key in self.waiting.keys() & {record.key for record in plan.values()}:
            record = self._pool.entry(key).record()
            if record is not None and record.status != "finished":
                self._pool.entry(key).forget()

    def take_results(self) -> None:
        """Take the results that are already in the pool."""
        for key in list(self.waiting):
            self.take_result(key)

    def take_result(self, key: str) -> bool:
        record = self._pool.entry(key).record()
        if record is None:
            return False
        self.results[key] = record
        self._reused.add(key)
        self.waiting.pop(key, None)
        return True

    def settle(self, results: list[Result], *, stopping: bool = False) -> bool:
        for result in results:
            self.running.discard(result.key)
            if result.record is not None:
                self.results[result.key] = result.record
            elif result.problem is None or stopping:
                self._stopped.add(result.key)
                self.progress.pop(result.key, None)  # its last report is in the pool
            else:
                self.results[result.key] = self._crashed(result)
        return bool(results)

    def expected_seconds(self, record: RunRecord) -> float | None:
        """The time of the slowest run of the same shape that ended here; None if there is none."""
        shape = _shape(record)
        ended = (r for key, r in self.results.items() if key not in self._reused and _shape(r) == shape)
        paces = [r.seconds / r.step for r in ended if r.seconds is not None and r.step]
        return max(paces) * record.run.steps if paces else None

    def records(self) -> dict[str, RunRecord]:
        return {key: self._record(key) for key in self._asked}

    def rows(self) -> tuple[Row, ...]:
        """Each run once, under its first label."""
        return tuple(self._row(label, key) for key, label in self._labels.items())

    def experiment(self, key: str) -> str:
        """The first experiment that asked for the run."""
        return self._labels[key].experiment

    def tracked_name(self, key: str) -> str:
        """The name of a run for trackers: its first label in this study."""
        label = self._labels[key]
        return f"{label.experiment}/{label.cell}/seed-{label.seed}"

    def _record(self, key: str) -> RunRecord:
        """The result, or the progress of the run."""
        if key in self.results:
            return self.results[key]
        progress = self.progress.get(key) or read_progress(self._pool.entry(key).progress)
        step = progress.step if progress else 0
        status: Status = "running" if key in self.running else "stopped" if step > 0 else "waiting"
        return dataclasses.replace(self._asked[key], status=status, step=step)

    def _row(self, label: Label, key: str) -> Row:
        record = self._record(key)
        result = _result_text(record, self._metrics.get(label.experiment, "loss"))
        return Row(label, record, self._row_status(key, record), self.progress.get(key), result)

    def _row_status(self, key: str, record: RunRecord) -> RowStatus:
        if key in self.results:
            return "reused" if key in self._reused else record.status
        if key in self.running:
            return "running"
        if key in self._stopped:
            return "stopped"
        return "elsewhere" if self._pool.entry(key).is_busy() else "waiting"

    def _crashed(self, result: Result) -> RunRecord:
        """The record of a crash. It is stored in the pool, unless the input was wrong.

        Wrong input may be a setting that is not part of the key, and another study may have it right.
        """
        key = result.key
        entry = self._pool.entry(key)
        progress = read_progress(entry.progress)
        record = from_folder(
            self._asked[key],
            entry.path,
            "crashed",
            step=progress.step if progress else 0,
            seconds=progress.seconds if progress else None,
            message=result.problem,
            place=RunPlace(pool=str(self._pool.root)),
        )
        if not result.is_input_error:
            entry.write(record)
        return record


def _shape(record: RunRecord) -> tuple[object, ...]:
    """What mostly decides how long a step takes."""
    return tuple(record.run.config[name] for name in ("size", "length", "batch_size", "precision", "device"))


def _job_type(record: RunRecord) -> str:
    """What trackers group runs by: those that choose a learning rate leave the test data alone."""
    return "train" if record.run.config.get("test", True) else "tune"


def _result_text(record: RunRecord, metric: str) -> str:
    if record.status not in SETTLED:
        return ""
    if record.status != "finished":
        return f"{record.status} at step {record.step}"
    value = record.value(metric)
    name = metric if task_of(metric) else metric.replace("_", " ")
    return "" if value is None else f"{name} {value:.4g}"
