"""Train one run in its own process, on any machine.

    python -m maclaurin.study.worker JOB.json
    python -m torch.distributed.run --nproc-per-node 8 -m maclaurin.study.worker JOB.json

The exit code is 0 with a record if the run has a result (finished or diverged), 0 without a record if it was
asked to stop and saved a checkpoint, 2 if the input was wrong, and another number if it crashed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from maclaurin.code_version import NUMERICS_VERSION, code_version
from maclaurin.data.source import Source
from maclaurin.errors import InputError, MaclaurinError
from maclaurin.evaluation.evaluate import ask_run
from maclaurin.evaluation.results import TaskResult
from maclaurin.extensions import load_entry_points, load_extension
from maclaurin.machine import provenance
from maclaurin.plain_data import read_value, write_json
from maclaurin.study.metrics import task_number
from maclaurin.study.plan_runs import INSTALLED_TORCH
from maclaurin.study.pool import Pool, PoolEntry, RunPlace, end_with_study
from maclaurin.study.run_progress import RunProgress, RunReporter, StoppedEarly, read_progress, write_progress
from maclaurin.study.run_record import Run, RunRecord, Status, by_position, thinned
from maclaurin.training.batches import open_data
from maclaurin.training.config import config_from
from maclaurin.training.optimizer_step import Diverged
from maclaurin.training.processes import Processes, join, leave
from maclaurin.training.run_folder import RunFolder, read_records
from maclaurin.training.trainer import Trainer

OnProgress = Callable[[RunProgress], None]

#: exit code for wrong input
INPUT_ERROR = 2

#: version of the loaded code; files may be edited while a study runs
CODE = code_version()
#: of the provenance, what describes the machine
MACHINE = ("platform", "processor", "cores", "threads", "gpu")
#: kind of a line in records.jsonl → prefix of its numbers
CURVES = {"test": "", "validation": "validation_"}
FINALS = {"final": "", "final-validation": "validation_"}
#: keys of such a line that are not metrics
NOT_METRICS = ("kind", "step", "loss_by_position")


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """The input of a worker: a waiting run, and where to train it."""

    record: RunRecord
    place: RunPlace
    gpu: str | None = None

    def write(self, path: Path) -> None:
        """As a file for `python -m maclaurin.study.worker`."""
        write_json(path, self)

    @classmethod
    def read(cls, path: Path) -> Job:
        """The job of a file."""
        return read_value(cls, path)


def work(job: Job, report: OnProgress | None = None) -> RunRecord | None:
    """Train the run in its pool; returns its record, or None if it was asked to stop.

    If another process is training the same run, wait for it and take its result.
    """
    place = job.place
    _refuse_other_versions(job.record.run)
    load_entry_points()
    for extension in place.code:
        load_extension(extension)
    if place.threads is not None:
        torch.set_num_threads(place.threads)
    _set_tracker_names(place)
    config = config_from(job.record.run.config)
    processes = join(config.device)
    try:
        source = open_data(config, processes)
        record = _with_data(job.record, source)
        entry = Pool(Path(place.pool)).entry(record.key)
        with entry.locked() if processes.is_first else contextlib.nullcontext():
            found = entry.record()
            if _first_sees(processes, found is not None):
                return found
            return _train(record, place, source, entry, processes, report)
    finally:
        leave()


def _train(
    waiting: RunRecord,
    place: RunPlace,
    source: Source,
    entry: PoolEntry,
    processes: Processes,
    report: OnProgress | None,
) -> RunRecord | None:
    config = config_from(waiting.run.config)
    before = read_progress(entry.progress)
    reporter = RunReporter(
        config.steps,
        _reporting(entry, processes, report),
        seconds_before=before.seconds if before else 0.0,
        losses_before=[
            (line["step"], line["loss"]) for line in _lines(entry.path) if line["kind"] == "train"
        ],
        prints=processes.is_first,
    )

    def settle(status: Status, step: int, message: str | None = None) -> RunRecord | None:
        if not processes.is_first:
            return None
        made = from_folder(
            waiting, entry.path, status, step=step, seconds=reporter.seconds, message=message, place=place
        )
        if made.run.tasks:
            _share_training(made, Pool(Path(place.pool)))
            if status == "finished":
                made = with_task_results(made, _ask_tasks(made.run, entry.path, processes))
        entry.write(made)
        if not place.keep_models:  # last, since a task needs the model again if there is no record
            entry.drop_models()
        return made

    if _first_sees(processes, RunFolder(entry.path).read_summary().get("step") == config.steps):
        return settle("finished", config.steps)  # it was killed after training, before its record was written
    resume = _first_sees(processes, RunFolder(entry.path).config.exists())
    trainer = Trainer(config, source, entry.path, processes)
    try:
        outcome = trainer.run(resume=resume, display=reporter)
    except (Diverged, StoppedEarly) as problem:
        return settle("diverged", problem.step, str(problem))
    return settle("finished", outcome.step) if outcome.finished else None


def _share_training(record: RunRecord, pool: Pool) -> None:
    """Write the same result under the key without tasks, if there is none yet."""
    plain = dataclasses.replace(record, run=dataclasses.replace(record.run, tasks=()))
    entry = pool.entry(plain.key)
    if entry.record() is None:
        entry.write(plain)


def _ask_tasks(run: Run, folder: Path, processes: Processes) -> dict[str, TaskResult]:
    """Task name → result of the trained model; raises if the items differ from those of the study."""
    answers: dict[str, TaskResult] = {}
    for task in run.tasks:
        print(f"running task {task.name}", flush=True)
        answers |= ask_run(
            folder,
            [task.name],
            items=task.items,
            seed=task.seed,
            max_length=run.config["length"],
            device=str(processes.device),
        )
        if not (answers[task.name].fingerprint or "").startswith(task.fingerprint):
            raise InputError(
                f"the items of {task.name} are not the same as where the study was started: "
                "install the same versions of Python and maclaurin on all machines."
            )
    return answers


# ---------------------------------------------------------------------------- from folder to record


def from_folder(
    waiting: RunRecord,
    folder: Path,
    status: Status,
    *,
    step: int,
    seconds: float | None,
    place: RunPlace,
    message: str | None = None,
) -> RunRecord:
    """The record of a run: what its folder holds, and how it ended."""
    lines = _lines(folder)
    finals = [line for line in lines if line["kind"] in FINALS] if status == "finished" else []
    metrics = {name: value for line in finals for name, value in _metrics(line).items()}
    if status == "finished":
        metrics |= _summary_metrics(RunFolder(folder).read_summary(), waiting.run)
    last = next((line for line in reversed(finals) if "loss_by_position" in line), {})
    return dataclasses.replace(
        waiting,
        status=status,
        message=message,
        step=step,
        metrics=metrics,
        curves=_curves(lines),
        loss_by_position=by_position(last.get("loss_by_position", ())),
        seconds=seconds,
        provenance={**waiting.provenance, **where_made(place.runs_at_once)},
    )


def with_task_results(record: RunRecord, answers: Mapping[str, TaskResult]) -> RunRecord:
    """The record with the task results: numbers in `metrics`, everything else in `provenance`."""
    metrics = {
        task_number(name, number): found.value
        for name, answer in answers.items()
        for number, found in answer.metrics.items()
        if found.value is not None
    }
    facts = {name: _facts(answer) for name, answer in answers.items()}
    more = {"tasks": facts} if facts else {}
    return dataclasses.replace(
        record, metrics={**record.metrics, **metrics}, provenance={**record.provenance, **more}
    )


def _facts(answer: TaskResult) -> dict[str, Any]:
    """The number of items, the chance level, and the standard errors over the items."""
    errors = {name: found.stderr for name, found in answer.metrics.items() if found.stderr is not None}
    names = ("version", "fingerprint", "items", "questions", "chance", "truncated", "non_finite", "seconds")
    return {**{name: getattr(answer, name) for name in names}, "errors": errors}


def where_made(runs_at_once: int | None) -> dict[str, Any]:
    """`provenance` as records of runs hold it: the machine as one entry."""
    facts = provenance()
    machine = {name: facts.pop(name) for name in MACHINE}
    versions = {"python": facts.pop("python"), **facts.pop("versions")}
    return {**facts, "code": CODE, "machine": machine, "versions": versions, "runs_at_once": runs_at_once}


def _metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Every finite number of a final evaluation; `tokens` is how many were scored."""
    prefix = FINALS[line["kind"]]
    found = {name: value for name, value in line.items() if name not in NOT_METRICS and _is_finite(value)}
    if "tokens" in found:
        found["scored_tokens"] = found.pop("tokens")
    return {prefix + name: float(value) for name, value in found.items()}


def _summary_metrics(summary: Mapping[str, Any], run: Run) -> dict[str, float]:
    names = ("parameters", "tokens_per_second", "peak_gpu_bytes", "flops_per_token")
    found = {name: float(summary[name]) for name in names if _is_finite(summary.get(name))}
    if "flops_per_token" in found:
        found["training_flops"] = found.pop("flops_per_token") * run.tokens
    return found


def _curves(lines: list[dict[str, Any]]) -> dict[str, tuple[tuple[int, float], ...]]:
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        if line["kind"] == "train":
            points.setdefault("train_loss", []).append((line["step"], line["loss"]))
        elif line["kind"] in CURVES:
            for name in ("loss", "accuracy"):
                if _is_finite(line.get(name)):
                    points.setdefault(CURVES[line["kind"]] + name, []).append((line["step"], line[name]))
    return {name: thinned(found) for name, found in points.items()}


def _lines(folder: Path) -> list[dict[str, Any]]:
    file = RunFolder(folder).records
    return read_records(file) if file.is_file() else []


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ------------------------------------------------------------------------------------- small steps


def _reporting(entry: PoolEntry, processes: Processes, report: OnProgress | None) -> OnProgress:
    """Report to the file in the pool and to `report`, from the first process only."""

    def pass_on(progress: RunProgress) -> None:
        if processes.is_first:
            write_progress(entry.progress, progress)
            if report is not None:
                report(progress)

    return pass_on


def _set_tracker_names(place: RunPlace) -> None:
    """Set what wandb.init reads: the study as group, the name of the run, and whether it tunes."""
    names = {"WANDB_RUN_GROUP": place.group, "WANDB_NAME": place.run_name, "WANDB_JOB_TYPE": place.job_type}
    os.environ.update({name: value for name, value in names.items() if value and place.group})


def _first_sees(processes: Processes, fact: bool) -> bool:
    """Broadcast a flag from rank 0: other processes may already see files that rank 0 wrote later."""
    return processes.any(fact and processes.is_first)


def _refuse_other_versions(run: Run) -> None:
    if (run.numerics, run.torch) != (NUMERICS_VERSION, INSTALLED_TORCH):
        raise InputError(
            f"the study was started with torch {run.torch} and numerics version {run.numerics}, but this "
            f"machine has torch {INSTALLED_TORCH} and {NUMERICS_VERSION}: install the same versions on all "
            "machines."
        )


def _with_data(record: RunRecord, source: Source) -> RunRecord:
    """The run with the fingerprint of its data; raises if it differs from a known fingerprint."""
    if record.run.data and record.run.data != source.fingerprint:
        raise InputError(
            f"{source.name} has the fingerprint {source.fingerprint[:12]} here, but {record.run.data[:12]} "
            "where the study was started: give this machine the same files."
        )
    return record.of_data(source.fingerprint, source.facts)


# ------------------------------------------------------------------------------------ as a process


def work_in_child(job: Job) -> None:
    """A process of the local executor: in its own session, with output to the log; ends with its study."""
    os.setsid()  # Ctrl-C reaches the study, which asks its runs to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _write_output_to(Pool(Path(job.place.pool)).entry(job.record.key).log)
    sys.exit(main(job))


def main(job: Job) -> int:
    """Train one job; the exit code says how it ended."""
    if job.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = job.gpu
    if job.place.study_lock is not None:
        end_with_study(Path(job.place.study_lock))
    try:
        work(job)
    except MaclaurinError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return INPUT_ERROR if isinstance(problem, InputError) else 1
    return 0


def _write_output_to(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(Job.read(Path(sys.argv[1]))))
