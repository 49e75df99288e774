"""Trains what a study asks for and is not there yet; writes down what there is after every run."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import final

from maclaurin.study.design import Study
from maclaurin.study.eta import RunTiming, seconds_to_end
from maclaurin.study.executor import Executor, Result
from maclaurin.study.forms_check import FormsCheck
from maclaurin.study.glance import Glance, RunRow, State
from maclaurin.study.job import Job
from maclaurin.study.pool import Pool, PoolEntry
from maclaurin.study.progress import RunProgress, read_progress
from maclaurin.study.record import (
    ExperimentRecord,
    FormsRecord,
    RunRecord,
    Status,
    StudyRecord,
    write_study,
)
from maclaurin.study.run_record import make_record
from maclaurin.study.view import View

SECONDS_BETWEEN_GLANCES = 0.5
SECONDS_TO_SAVE = 60.0
SECONDS_FOR_FORMS = 120.0


@final
@dataclass(frozen=True)
class Task:
    """One planned run: what the worker is told, how many tokens it sees, where its numbers come from."""

    job: Job
    key: str
    tokens: int
    metric: str
    provenance: dict[str, object]


@final
@dataclass(frozen=True)
class Ending:
    """How a study ended."""

    record: StudyRecord
    interrupted: bool

    def having(self, status: Status) -> list[RunRecord]:
        """The runs that ended so."""
        return [run for run in self.record.runs if run.status == status]

    @property
    def unfinished(self) -> list[RunRecord]:
        """The runs without a result."""
        return [*self.having("stopped"), *self.having("waiting")]


@final
class Runner:
    """One study from what the pool holds to its end, or to the moment it is asked to stop."""

    def __init__(
        self,
        study: Study,
        scale: float,
        tasks: Sequence[Task],
        *,
        out: Path,
        pool: Pool,
        executor: Executor,
        view: View,
        forms: FormsCheck,
    ) -> None:
        self._study, self._scale, self._tasks = study, scale, tuple(tasks)
        self._file, self._pool, self._executor = out / "records.json", pool, executor
        self._view, self._forms = view, forms
        self._jobs = {task.key: task.job for task in tasks}  # two cells may ask for the same run
        self._waiting = list(self._jobs)
        self._results: dict[str, RunRecord] = {}
        self._reused: set[str] = set()
        self._running: set[str] = set()
        self._stopped: set[str] = set()
        self._news: dict[str, RunProgress] = {}
        self._begun = time.monotonic()

    def run(self) -> Ending:
        """Every run has a result in the end, unless a signal comes before."""
        with _asked_to_stop() as stop:
            try:
                with self._view:
                    self._work(stop)
                if not stop:
                    self._forms.wait(SECONDS_FOR_FORMS)
            finally:
                self._executor.close()
                self._forms.close()
        return Ending(self._write(), interrupted=bool(stop))

    def _work(self, stop: list[int]) -> None:
        self._take_results()
        self._write()
        while not stop and (self._waiting or self._running):
            self._submit()
            self._settle(self._executor.poll(SECONDS_BETWEEN_GLANCES))
            self._news |= self._executor.progress()
            self._view.show(self._glance())
        if stop:
            self._executor.stop(SECONDS_TO_SAVE)
            self._settle(self._executor.poll(0.0), stopping=True)
            while self._running and (results := self._executor.poll(1.0)):
                self._settle(results, stopping=True)
        self._view.show(self._glance())

    # ------------------------------------------------------------------------------- step by step

    def _take_results(self) -> None:
        """What the pool has need not be trained."""
        for key in list(self._waiting):
            self._take_result(key)

    def _take_result(self, key: str) -> bool:
        record = self._entry(key).record()
        if record is None:
            return False
        self._results[key] = record
        self._reused.add(key)
        self._waiting.remove(key)
        return True

    def _submit(self) -> None:
        """Fill the free places; runs that another study is at are left to it."""
        free = self._executor.free()
        for key in list(self._waiting):
            if free < 1:
                return
            if self._take_result(key):
                self._write()
            elif not self._entry(key).is_busy():
                self._executor.submit(self._jobs[key])
                self._waiting.remove(key)
                self._running.add(key)
                free -= 1

    def _settle(self, results: list[Result], *, stopping: bool = False) -> None:
        for result in results:
            self._running.discard(result.key)
            if result.record is not None:
                self._results[result.key] = result.record
            elif result.problem is None or stopping:
                self._stopped.add(result.key)
            else:
                self._results[result.key] = self._crashed(result.key, result.problem)
        if results:
            self._write()

    def _crashed(self, key: str, problem: str) -> RunRecord:
        """A crash is a result as well, and kept like one."""
        task = next(task for task in self._tasks if task.key == key)
        entry = self._entry(key)
        news = read_progress(entry.progress)
        record = make_record(
            task.job,
            key,
            "crashed",
            folder=entry.path,
            provenance=task.provenance,
            step=news.step if news else 0,
            seconds=news.seconds if news else None,
            message=problem,
        )
        entry.write(record)
        return record

    def _entry(self, key: str) -> PoolEntry:
        return self._pool.entry(key)

    # ------------------------------------------------------------------------- what is written down

    def _write(self) -> StudyRecord:
        record = study_record(
            self._study, self._scale, [self._run_record(task) for task in self._tasks], self._forms.result()
        )
        write_study(record, self._file)
        return record

    def _run_record(self, task: Task) -> RunRecord:
        """The result under this cell's name, or that there is none yet."""
        found = self._results.get(task.key)
        if found is not None:
            return relabelled(found, task.job)
        news = read_progress(self._entry(task.key).progress)
        return make_record(
            task.job,
            task.key,
            "stopped" if news else "waiting",
            folder=None,
            provenance=task.provenance,
            step=news.step if news else 0,
        )

    def _glance(self) -> Glance:
        rows = tuple(self._row(task) for task in self._tasks)
        timings = [
            RunTiming(
                row.experiment,
                row.cell,
                task.tokens,
                row.state in ("waiting", "elsewhere"),
                row.seconds,
                row.seconds_left,
            )
            for row, task in zip(rows, self._tasks, strict=True)
        ]
        left = seconds_to_end(timings, self._executor.workers) if self._running or self._waiting else None
        return Glance(rows, time.monotonic() - self._begun, left)

    def _row(self, task: Task) -> RunRow:
        job, found = task.job, self._results.get(task.key)
        if found is not None:
            state: State = "reused" if task.key in self._reused else _state_of(found)
            result = _result_text(found, task.metric)
            return RunRow(
                job.experiment, job.cell, job.seed, state, found.step, found.steps,
                result=result, seconds=found.seconds,
            )  # fmt: skip
        news = self._news.get(task.key)
        step, loss = (news.step, news.loss) if news else (0, None)
        steps, left, seconds = job.config["steps"], None, None
        if task.key in self._running:
            state = "running"
            left = news.seconds_left if news else None
            seconds = None if news is None or left is None else news.seconds + left
        elif task.key in self._stopped:
            state = "stopped"
        else:
            state = "elsewhere" if self._entry(task.key).is_busy() else "waiting"
        return RunRow(
            job.experiment, job.cell, job.seed, state, step, steps,
            loss=loss, seconds_left=left, seconds=seconds,
        )  # fmt: skip


def study_record(
    study: Study, scale: float, runs: Sequence[RunRecord], forms: FormsRecord | None
) -> StudyRecord:
    """The study as one record."""
    return StudyRecord(
        name=study.name,
        title=study.title,
        question=study.question,
        budget=study.budget,
        scale=scale,
        experiments=tuple(
            ExperimentRecord(
                name=e.name,
                title=e.title,
                metric=e.metric,
                baseline=e.baseline,
                cells=tuple(cell.name for cell in e.cells),
                seeds=e.seeds,
                axes=e.axes,
            )
            for e in study.experiments
        ),
        claims=study.claims,
        runs=tuple(runs),
        forms=forms,
    )


def relabelled(record: RunRecord, job: Job) -> RunRecord:
    """A run of the pool under the name this study has for it."""
    return dataclasses.replace(
        record,
        experiment=job.experiment,
        cell=job.cell,
        levels=dict(job.levels),
        seed=job.seed,
        config=dict(job.config),
    )


def _state_of(record: RunRecord) -> State:
    states: dict[str, State] = {"finished": "finished", "diverged": "diverged", "crashed": "crashed"}
    return states.get(record.status, "stopped")


def _result_text(record: RunRecord, metric: str) -> str:
    if record.status != "finished":
        return f"{record.status} at step {record.step}"
    if metric == "accuracy" and record.accuracy is not None:
        return f"accuracy {record.accuracy:.3f}"
    return "" if record.test_loss is None else f"test loss {record.test_loss:.4f}"


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Signals that came; a second Ctrl-C does not wait for runs to save."""
    came: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in wanted}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
