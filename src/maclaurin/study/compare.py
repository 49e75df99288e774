"""Compare runs and studies: their contents, differences and disk use. Needs no torch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError
from maclaurin.study.pool import Pool, PoolEntry
from maclaurin.study.run_record import FILE, RunRecord, StudyRecord, read_run, read_study

# --------------------------------------------------------------------------------- training runs


@final
@dataclass(frozen=True)
class RunSummary:
    """A run as its folder describes it: of `maclaurin train`, of a sweep, or of a pool.

    status   finished, running or stopped for a training folder; the status of its record in a pool
    """

    path: Path
    config: Mapping[str, Any]
    status: str
    step: int
    numbers: Mapping[str, float]
    data: str | None = None
    commit: str | None = None

    @property
    def attention(self) -> str:
        """The notation, or one per layer."""
        return ", ".join(self.config.get("attention", ())) or "–"


def find_runs(paths: Sequence[Path]) -> list[RunSummary]:
    """Every run in these folders and below, newest first; a folder without runs is an error."""
    found: dict[Path, RunSummary] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no folder {path}.")
        here = [file.parent for file in [path / "config.json", *sorted(path.rglob("config.json"))]]
        runs = {folder: run for folder in here if (run := read_summary(folder)) is not None}
        if not runs:
            raise InputError(
                f"{path} holds no training run: the folder of a run has config.json and records.jsonl."
            )
        found |= runs
    return sorted(found.values(), key=lambda run: -_changed(run.path))


def read_summary(folder: Path) -> RunSummary | None:
    """The run in this folder; None if there is none."""
    config = _json(folder / "config.json")
    if config is None or "steps" not in config or "attention" not in config:
        return None
    record = read_run(folder / "record.json")
    if record is not None:
        numbers = {**record.metrics, **({"seconds": record.seconds} if record.seconds else {})}
        commit = record.provenance.get("commit")
        return RunSummary(
            folder, config, record.status, record.step, numbers, record.provenance.get("data"), commit
        )
    summary, machine = _json(folder / "summary.json"), _json(folder / "machine.json") or {}
    step, loss = _last_line(folder / "records.jsonl")
    facts = {"data": (machine.get("data") or {}).get("name"), "commit": machine.get("commit")}
    if summary is not None and summary.get("step", 0) >= config["steps"]:
        numbers = {("loss" if name == "test_loss" else name): v for name, v in _finite(summary).items()}
        return RunSummary(folder, config, "finished", summary["step"], numbers, **facts)
    numbers = {} if loss is None else {"train_loss": loss}
    return RunSummary(folder, config, "unfinished", step, numbers, **facts)


def differing_keys(runs: Sequence[RunSummary]) -> list[str]:
    """Config keys in which the runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return [name for name in names if len({json.dumps(run.config.get(name)) for run in runs}) > 1]


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    }


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _last_line(file: Path) -> tuple[int, float | None]:
    """(step, loss) of the last complete line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, None
    for line in reversed(lines):
        try:
            found = json.loads(line)
            return int(found["step"]), found.get("loss")
        except (ValueError, KeyError, TypeError):
            continue
    return 0, None


def _changed(folder: Path) -> float:
    return max((file.stat().st_mtime for file in folder.iterdir() if file.is_file()), default=0.0)


# --------------------------------------------------------------------------------- two studies


@final
@dataclass(frozen=True)
class CellDifference:
    """A cell in two studies: means over seeds, standard deviations, and config keys that differ."""

    experiment: str
    cell: str
    metric: str
    before: tuple[float, float | None, int] | None
    after: tuple[float, float | None, int] | None
    changed: tuple[str, ...]


def diff_studies(before: StudyRecord, after: StudyRecord) -> list[CellDifference]:
    """Every cell of either study."""
    cells = dict.fromkeys(
        (e.name, c.name) for study in (before, after) for e in study.experiments for c in e.cells
    )
    return [_cell_difference(before, after, experiment, cell) for experiment, cell in cells]


def _cell_difference(before: StudyRecord, after: StudyRecord, experiment: str, cell: str) -> CellDifference:
    metrics = [e.metric for study in (after, before) for e in study.experiments if e.name == experiment]
    runs = [_records(study, experiment, cell) for study in (before, after)]
    configs = [found[0].run.config if found else None for found in runs]
    changed: tuple[str, ...] = ()
    if configs[0] is not None and configs[1] is not None:
        names = dict.fromkeys([*configs[0], *configs[1]])
        changed = tuple(
            f"{n}: {configs[0].get(n)} → {configs[1].get(n)}"
            for n in names
            if n != "seed" and configs[0].get(n) != configs[1].get(n)
        )
    first, second = (_spread(found, metrics[0]) for found in runs)
    return CellDifference(experiment, cell, metrics[0], first, second, changed)


def _records(study: StudyRecord, experiment: str, cell: str) -> list[RunRecord]:
    return [record for label, record in study.labelled() if label[:2] == (experiment, cell)]


def _spread(records: Iterable[RunRecord], metric: str) -> tuple[float, float | None, int] | None:
    values = [v for record in records if (v := record.value(metric)) is not None]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)


# ------------------------------------------------------------------------------------ the pool


@final
@dataclass(frozen=True)
class PoolUse:
    """A run of the pool: its size, its weights and checkpoints, and the studies that refer to it."""

    entry: PoolEntry
    size: int
    model_bytes: int
    studies: tuple[str, ...]
    status: str
    is_busy: bool


def pool_use(pool: Pool, studies: Path) -> list[PoolUse]:
    """Every run of a pool; studies are the folders next to it that hold records."""
    users: dict[str, list[str]] = {}
    for file in sorted(studies.glob(f"*/{FILE}")):
        try:
            study = read_study(file)
        except InputError:
            continue
        keys = {key for e in study.experiments for cell in e.cells for key in cell.runs.values()}
        keys |= {
            t.key for e in study.experiments if e.tuning for c in e.tuning.cells.values() for t in c.trials
        }
        for key in keys:
            users.setdefault(key, []).append(file.parent.name)
    return [_use(entry, users.get(entry.path.name, [])) for entry in pool.entries()]


def _use(entry: PoolEntry, studies: list[str]) -> PoolUse:
    record = entry.record()
    models = sum(
        file.stat().st_size
        for name in ("checkpoints", "model")
        for file in (entry.path / name).rglob("*")
        if file.is_file()
    )
    status = record.status if record is not None else "unfinished"
    return PoolUse(entry, entry.size(), models, tuple(studies), status, entry.is_busy())
