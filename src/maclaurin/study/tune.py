"""A separate learning rate for every cell, chosen on validation data.

The grid is in factors of two. While the best rate of a cell is at the edge of the rates tried, the next rate
beyond that edge is tried too. Then the two best rates get further seeds, if the study asks for them. No final
run shares a seed with a tuning run, and no tuning run uses the test data.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from maclaurin.code_version import FREE_KEYS
from maclaurin.errors import InputError, MaclaurinError
from maclaurin.plain_data import digest, read_record, write_json
from maclaurin.study.design import Cell, Experiment, Study, Tune
from maclaurin.study.find import source_name
from maclaurin.study.metrics import metric_named
from maclaurin.study.plan_runs import resolved
from maclaurin.study.run_record import (
    CellTuning,
    Label,
    RunRecord,
    Trial,
    Tuning,
    error_line,
    without_default_keys,
)

FILE = "tuned.json"
SCHEMA = 1
#: keys that are not part of what a rate is tuned for. The best rate depends on the steps, but a rate is kept
#: for other steps; the page then says at how many it was tuned
NOT_TUNED = (
    *FREE_KEYS,
    "lr",
    "seed",
    "device",
    "steps",
    "warmup",
    "decay_steps",
    "eval_every",
    "eval_rows",
    "largest_loss",
    "test",
)

Train = Callable[[dict[Label, RunRecord]], dict[str, RunRecord]]
MakeRun = Callable[[Experiment, Cell, Mapping[str, Any]], RunRecord]


@final
@dataclass(frozen=True, kw_only=True)
class TunedFile:
    """tuned.json: the rates of a study, and the runs they were chosen from (without their curves)."""

    study: str
    experiments: Mapping[str, Tuning]
    runs: Mapping[str, RunRecord] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write it atomically."""
        write_json(path, self, SCHEMA)

    @classmethod
    def read(cls, path: Path) -> TunedFile | None:
        """The file, if there is one."""
        if not path.exists():
            return None
        what = "a file of tuned learning rates"
        return read_record(cls, path, SCHEMA, what, missing=f"{path} is not {what}: it is a folder.")


@final
@dataclass(frozen=True)
class KnownRates:
    """Learning rates that were tuned earlier for the same subject.

    cells     experiment → cell → its tuning
    sources   experiment → the file the rates come from
    data      experiment → digests of the data they were chosen on, for any seed
    missing   experiment → cell → subject, for cells without a rate
    """

    cells: dict[str, dict[str, CellTuning]]
    sources: dict[str, str]
    data: dict[str, set[str]]
    missing: dict[str, dict[str, str]]


def known_rates(study: Study, out: Path, *, retune: bool = False) -> KnownRates:
    """Rates from OUT/tuned.json, then from the tuned.json next to study.py; none with `retune`."""
    wanted = [e for e in study.experiments if e.tune is not None]
    known: dict[str, dict[str, CellTuning]] = {e.name: {} for e in wanted}
    sources: dict[str, str] = {}
    data: dict[str, set[str]] = {e.name: set() for e in wanted}
    if not retune:
        for file in (out / FILE, _beside(study)):
            _take_known(wanted, file, known, sources, data)
    missing = {
        e.name: {cell.name: subject(e, cell) for cell in e.cells if cell.name not in known[e.name]}
        for e in wanted
    }
    return KnownRates(known, sources, data, {name: cells for name, cells in missing.items() if cells})


def learning_rates(
    study: Study, out: Path, make_run: MakeRun, train: Train, *, retune: bool = False
) -> tuple[Study, dict[str, Tuning]]:
    """The study with a learning rate in every cell, and where each rate comes from.

    Cells without a rate are tuned now. With `retune` all cells are, and rates are stored next to study.py.
    """
    wanted = [e for e in study.experiments if e.tune is not None]
    if retune and not wanted:
        raise InputError(f"study {study.name!r} has no experiment with tune=…: there is nothing to tune.")
    rates = known_rates(study, out, retune=retune)
    known, sources = rates.cells, rates.sources
    if rates.missing:
        beside = _beside(study)
        target = beside if retune and beside is not None and os.access(beside.parent, os.W_OK) else out / FILE
        fresh = tune_study(study, rates.missing, make_run, train)
        _merged(TunedFile.read(target), fresh).write(target)
        for name, tuning in fresh.experiments.items():
            known[name] |= tuning.cells
            for cell in tuning.cells.values():
                rates.data[name] |= _data_of(cell, fresh.runs)
            sources[name] = f"{sources[name]} and this study" if name in sources else "this study"
    tunings = {
        e.name: Tuning(
            metric=_tune_of(e).metric,
            source=sources[e.name],
            cells=known[e.name],
            data=tuple(sorted(rates.data[e.name])),
        )
        for e in wanted
    }
    experiments = tuple(
        e.with_rates({name: cell.rate for name, cell in known[e.name].items()}) if e.tune is not None else e
        for e in study.experiments
    )
    return dataclasses.replace(study, experiments=experiments), tunings


def _beside(study: Study) -> Path | None:
    return None if study.file is None else study.file.parent / FILE


def _take_known(
    wanted: list[Experiment],
    file: Path | None,
    known: dict[str, dict[str, CellTuning]],
    sources: dict[str, str],
    data: dict[str, set[str]],
) -> None:
    """Add the rates of a file that were tuned for the same subject.

    The experiment may differ: two that differ only in their metric have the same runs.
    """
    found = TunedFile.read(file) if file is not None else None
    for e in wanted:
        tuned = {
            old.subject: old
            for tuning in (found.experiments.values() if found is not None else ())
            if tuning.metric == _tune_of(e).metric
            for old in tuning.cells.values()
        }
        for cell in e.cells:
            old = tuned.get(subject(e, cell))
            if cell.name not in known[e.name] and old is not None:
                known[e.name][cell.name] = old
                sources.setdefault(e.name, source_name(file))
                data[e.name] |= _data_of(old, found.runs if found is not None else {})


def _data_of(tuning: CellTuning, runs: Mapping[str, RunRecord]) -> set[str]:
    """Digests of the data of its trials, for any seed, where known."""
    known = (runs[trial.key].content for trial in tuning.trials if trial.key in runs)
    return {content for content in known if content}


def _merged(before: TunedFile | None, fresh: TunedFile) -> TunedFile:
    """The file with the new entries; cells that were not tuned now keep theirs."""
    if before is None:
        return fresh
    experiments = dict(before.experiments)
    for name, tuning in fresh.experiments.items():
        old = experiments[name].cells if name in experiments else {}
        experiments[name] = dataclasses.replace(tuning, cells={**old, **tuning.cells})
    keys = {t.key for e in experiments.values() for cell in e.cells.values() for t in cell.trials}
    runs = {key: record for key, record in {**before.runs, **fresh.runs}.items() if key in keys}
    return TunedFile(study=fresh.study, experiments=experiments, runs=runs)


def subject(experiment: Experiment, cell: Cell) -> str:
    """What a rate is tuned for: the config without rate, seed and length of training."""
    config = without_default_keys(resolved(experiment.settings(cell)).to_dict())
    return digest({name: value for name, value in config.items() if name not in NOT_TUNED})[:32]


@final
class Search:
    """The search for one cell: rates tried, the best rate, rates to try next."""

    def __init__(self, tune: Tune) -> None:
        self._tune = tune
        self._sign = -1.0 if metric_named(tune.metric).higher_is_better else 1.0
        self.trials: dict[float, list[Trial]] = {}

    def add(self, trial: Trial) -> None:
        """One more result."""
        self.trials.setdefault(trial.rate, []).append(trial)

    def sort_value(self, rate: float) -> float:
        """Mean value over the seeds, signed so that less is better; infinite if a run diverged."""
        values = [trial.value for trial in self.trials[rate]]
        if any(value is None for value in values):
            return math.inf
        return self._sign * statistics.fmean(value for value in values if value is not None)

    @property
    def best(self) -> float:
        """The best rate; the smallest if all diverged."""
        return min(sorted(self.trials), key=self.sort_value)

    @property
    def is_on_edge(self) -> bool:
        """Whether the best rate is the largest or smallest that was tried."""
        return self.best in (min(self.trials), max(self.trials))

    def next_trials(self) -> list[tuple[float, int]]:
        """Rates and seeds still to try: the grid, beyond the edge at which the best rate is, the two best."""
        tune = self._tune
        if not self.trials:
            return [(rate, seed) for rate in tune.rates for seed in tune.seeds]
        if self.is_on_edge and len(self.trials) < tune.most:
            beyond = _tidy(self.best * 2 if self.best == max(self.trials) else self.best / 2)
            return [(beyond, seed) for seed in tune.seeds]
        two_best = sorted(self.trials, key=self.sort_value)[:2]
        tried = {(trial.rate, trial.seed) for trials in self.trials.values() for trial in trials}
        return [(rate, seed) for rate in two_best for seed in tune.confirm if (rate, seed) not in tried]

    def tuning(self, subject: str) -> CellTuning:
        """The outcome."""
        trials = tuple(trial for rate in sorted(self.trials) for trial in self.trials[rate])
        return CellTuning(rate=self.best, trials=trials, subject=subject, on_edge=self.is_on_edge)


def _tidy(rate: float) -> float:
    """Rounded, without binary floating-point noise."""
    return float(f"{rate:.6g}")


def tune_study(
    study: Study, missing: Mapping[str, Mapping[str, str]], make_run: MakeRun, train: Train
) -> TunedFile:
    """Tune the cells in `missing` (experiment → cell → subject), all at the same time."""
    experiments = {e.name: e for e in study.experiments}
    searches = {
        (name, cell): Search(_tune_of(experiments[name])) for name, cells in missing.items() for cell in cells
    }
    runs: dict[str, RunRecord] = {}
    while True:
        plan, owners = _round(experiments, searches, make_run)
        if not plan:
            break
        results = train(plan)
        _refuse_crashes(plan, results)
        for label, waiting in plan.items():
            search, rate = owners[label]
            record = results[waiting.key]
            search.add(_trial(record, rate, _tune_of(experiments[label.experiment])))
            runs[record.key] = dataclasses.replace(record, curves={}, loss_by_position=())
    tunings = {
        name: Tuning(
            metric=_tune_of(experiments[name]).metric,
            source="",
            cells={cell: searches[name, cell].tuning(subject) for cell, subject in cells.items()},
        )
        for name, cells in missing.items()
    }
    return TunedFile(study=study.name, experiments=tunings, runs=runs)


def _round(
    experiments: Mapping[str, Experiment], searches: Mapping[tuple[str, str], Search], make_run: MakeRun
) -> tuple[dict[Label, RunRecord], dict[Label, tuple[Search, float]]]:
    """The runs of the next round, and the search each belongs to."""
    plan: dict[Label, RunRecord] = {}
    owners: dict[Label, tuple[Search, float]] = {}
    for (name, cell_name), search in searches.items():
        experiment = experiments[name]
        cell = next(cell for cell in experiment.cells if cell.name == cell_name)
        for rate, seed in search.next_trials():
            label = Label(name, f"{cell_name}, lr {rate:g}", seed)
            plan[label] = make_run(experiment, cell, {"lr": rate, "seed": seed, "test": False})
            owners[label] = (search, rate)
    return plan, owners


def _refuse_crashes(plan: Mapping[Label, RunRecord], results: Mapping[str, RunRecord]) -> None:
    """Raise if a tuning run crashed: a crash says nothing about its learning rate."""
    found = [(label, results[record.key]) for label, record in plan.items()]
    crashed = [(label, record) for label, record in found if record.status == "crashed"]
    if crashed:
        label, record = crashed[0]
        more = f" (and {len(crashed) - 1} more)" if len(crashed) > 1 else ""
        raise MaclaurinError(
            f"a tuning run crashed{more}, so no learning rate is chosen: {label}: "
            f"{error_line(record.message)} Remove the cause, then start again with --retry; finished runs "
            "are kept."
        )


def _tune_of(experiment: Experiment) -> Tune:
    if experiment.tune is None:
        raise MaclaurinError(f"experiment {experiment.name!r} does not tune.")
    return experiment.tune


def _trial(record: RunRecord, rate: float, tune: Tune) -> Trial:
    value = record.value(tune.metric) if record.status == "finished" else None
    if record.status == "finished" and value is None:
        raise MaclaurinError(f"a tuning run finished without {tune.metric}, so no rate can be chosen by it.")
    return Trial(
        rate=rate,
        seed=record.run.seed,
        value=value,
        status=record.status,
        key=record.key,
        seconds=record.seconds,
        tokens=record.run.tokens,
    )
