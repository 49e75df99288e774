"""Compare two studies, or two versions of one, cell by cell. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from maclaurin.study.run_record import RunRecord, StudyRecord, without_default_keys

#: what a run depends on besides its config → how to read it
FACTS: dict[str, Callable[[RunRecord], str]] = {
    "data": lambda record: record.run.data[:12],
    "torch": lambda record: record.run.torch,
    "numerics": lambda record: str(record.run.numerics),
    "own parts": lambda record: (record.run.parts or "")[:12],
}


@final
@dataclass(frozen=True)
class CellDifference:
    """A cell in two studies.

    before, after   (mean, standard deviation, number) over the seeds that finished
    by_seed         seed → (before, after), for the seeds that finished in both
    changed         what differs, in words: settings, data, versions, runs that diverged
    """

    experiment: str
    cell: str
    metric: str
    before: tuple[float, float | None, int] | None
    after: tuple[float, float | None, int] | None
    by_seed: Mapping[int, tuple[float, float]]
    changed: tuple[str, ...]


def diff_studies(before: StudyRecord, after: StudyRecord) -> list[CellDifference]:
    """Every cell of either study."""
    cells = dict.fromkeys(
        (e.name, c.name) for study in (before, after) for e in study.experiments for c in e.cells
    )
    return [_cell_difference(before, after, experiment, cell) for experiment, cell in cells]


def _cell_difference(before: StudyRecord, after: StudyRecord, experiment: str, cell: str) -> CellDifference:
    metric = next(e.metric for study in (after, before) for e in study.experiments if e.name == experiment)
    first, second = (_records(study, experiment, cell) for study in (before, after))
    old, new = _values(first, metric), _values(second, metric)
    shared = {seed: (old[seed], new[seed]) for seed in sorted(old.keys() & new.keys())}
    changed = (*_settings(first, second), *_facts(first, second), *_divergence(first, second))
    return CellDifference(
        experiment, cell, metric, _spread(old.values()), _spread(new.values()), shared, changed
    )


def _settings(first: Mapping[int, RunRecord], second: Mapping[int, RunRecord]) -> list[str]:
    """Config keys that differ. A key that one config does not have counts only if the other sets it."""
    if not first or not second:
        return []
    old, new = (without_default_keys(next(iter(runs.values())).run.config) for runs in (first, second))
    names = [name for name in dict.fromkeys([*old, *new]) if name != "seed"]
    return [
        f"{name}: {_shown(old, name)} → {_shown(new, name)}"
        for name in names
        if old.get(name) != new.get(name)
        and ((name in old and name in new) or old.get(name) or new.get(name))
    ]


def _facts(first: Mapping[int, RunRecord], second: Mapping[int, RunRecord]) -> list[str]:
    """Data and versions that differ between runs with the same seed."""
    changed = []
    for name, read in FACTS.items():
        pairs = [(read(first[seed]), read(second[seed])) for seed in sorted(first.keys() & second.keys())]
        differing = [(old, new) for old, new in pairs if old != new]
        if differing:
            changed.append(f"{name}: {differing[0][0] or 'none'} → {differing[0][1] or 'none'}")
    return changed


def _divergence(first: Mapping[int, RunRecord], second: Mapping[int, RunRecord]) -> list[str]:
    counts = [sum(record.status == "diverged" for record in runs.values()) for runs in (first, second)]
    if not any(counts):
        return []
    return [f"diverged: {counts[0]} of {len(first)} → {counts[1]} of {len(second)}"]


def _shown(config: Mapping[str, Any], name: str) -> str:
    return str(config[name]) if name in config else "not set"


def _records(study: StudyRecord, experiment: str, cell: str) -> dict[int, RunRecord]:
    """Seed → record."""
    return {label.seed: record for label, record in study.labelled() if label[:2] == (experiment, cell)}


def _values(runs: Mapping[int, RunRecord], metric: str) -> dict[int, float]:
    finished = {seed: record for seed, record in runs.items() if record.status == "finished"}
    return {seed: v for seed, record in finished.items() if (v := record.value(metric)) is not None}


def _spread(found: Iterable[float]) -> tuple[float, float | None, int] | None:
    values = list(found)
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)
