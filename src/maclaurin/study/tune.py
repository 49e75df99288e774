"""A separate learning rate for every cell, chosen on validation data.

The grid is in factors of two. While the best rate of a cell is at the edge of the rates tried, the next rate
beyond that edge is tried too. If the study asks for it, the factor of the rate for the output projections of
attention is then searched in the same way at the best rate. Then neighbours of the best setting are tried
until all are worse: another rate with the same factor, another factor with the same rate, and another rate
with the same rate of the output projections (twice the rate, half the factor). Without the last the search
would stop early: what limits the rate at a large factor is the output projections alone. The two best
settings get further seeds, if the study asks for them. No final run shares a seed with a tuning run, and no
tuning run uses the test data.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from maclaurin.errors import MaclaurinError
from maclaurin.plain_data import significant
from maclaurin.study.design import Cell, Experiment, Study, Tune
from maclaurin.study.metrics import metric_named
from maclaurin.study.run_record import (
    CellTuning,
    Label,
    NextRuns,
    Plan,
    RunRecord,
    Trial,
    Tuning,
    error_line,
)
from maclaurin.study.tuned_rates import TunedFile

#: trains runs, and further runs that follow from their results, until none follow; returns results by key
Train = Callable[[NextRuns], Mapping[str, RunRecord]]
MakeRun = Callable[[Experiment, Cell, Mapping[str, Any]], RunRecord]


class Point(NamedTuple):
    """What a trial is about: a learning rate, and its factor for the output projections."""

    rate: float
    factor: float = 1.0

    def moved(self, direction: Point, steps: int = 1) -> Point:
        """Some steps away in this direction."""
        return Point(_tidy(self.rate * direction.rate**steps), _tidy(self.factor * direction.factor**steps))


#: directions of the search, one step each: the rate alone; the factor alone; the rate, with the rate of the
#: output projections kept as it is
RATE, FACTOR, TRADED = Point(2.0, 1.0), Point(1.0, 2.0), Point(2.0, 0.5)
#: settings further away than this are not on the same line of the search
_MOST_STEPS = 30


@final
class Search:
    """The search for one cell: settings tried, the best of them, settings to try next.

    In the end both neighbours of the best setting in every direction were tried, unless a limit was reached.
    """

    def __init__(self, tune: Tune) -> None:
        self._tune = tune
        self._sign = -1.0 if metric_named(tune.metric).higher_is_better else 1.0
        self._directions = (RATE, FACTOR, TRADED) if tune.factors else (RATE,)
        self._most = 4 * tune.most if tune.factors else tune.most
        self.trials: dict[Point, list[Trial]] = {}

    def add(self, trial: Trial) -> None:
        """One more result."""
        self.trials.setdefault(Point(trial.rate, trial.factor), []).append(trial)

    def sort_value(self, point: Point) -> float:
        """Mean value over the seeds, signed so that less is better; infinite if a run diverged."""
        values = [trial.value for trial in self.trials[point]]
        if any(value is None for value in values):
            return math.inf
        return self._sign * statistics.fmean(value for value in values if value is not None)

    @property
    def best(self) -> Point:
        """The best setting; the smallest rate if all diverged."""
        return min(sorted(self.trials), key=self.sort_value)

    @property
    def is_on_edge(self) -> bool:
        """Whether the best setting is the first or the last that was tried in some direction."""
        lines = [self._line(direction) for direction in self._directions]
        return any(line[0] == 0 or line[-1] == 0 for line in lines)

    def next_trials(self) -> list[tuple[Point, int]]:
        """Settings and seeds still to try: the grid, missing neighbours of the best, the two best."""
        tune = self._tune
        if not self.trials:
            return [(Point(rate), seed) for rate in tune.rates for seed in tune.seeds]
        begun_first = sorted(self._directions, key=lambda direction: len(self._line(direction)) < 2)
        for direction in begun_first:
            missing = self._missing(direction)
            if missing:
                return [(point, seed) for point in missing for seed in tune.seeds]
        two_best = sorted(sorted(self.trials), key=self.sort_value)[:2]
        tried = {(point, trial.seed) for point, trials in self.trials.items() for trial in trials}
        return [(point, seed) for point in two_best for seed in tune.confirm if (point, seed) not in tried]

    def tuning(self, subject: str) -> CellTuning:
        """The outcome."""
        trials = tuple(trial for point in sorted(self.trials) for trial in self.trials[point])
        best = self.best
        factor = best.factor if self._tune.factors else None
        return CellTuning(
            rate=best.rate, factor=factor, trials=trials, subject=subject, on_edge=self.is_on_edge
        )

    def _line(self, direction: Point) -> list[int]:
        """How many steps from the best setting others were tried in this direction; 0 is the best itself."""
        best = self.best
        return [n for n in range(-_MOST_STEPS, _MOST_STEPS + 1) if best.moved(direction, n) in self.trials]

    def _missing(self, direction: Point) -> list[Point]:
        """Settings to try next to the best in a direction: at first the grid of factors, then neighbours."""
        best = self.best
        if len(self._line(direction)) >= self._tune.most or len(self.trials) >= self._most:
            return []
        if direction != RATE:
            if math.isinf(self.sort_value(best)):
                return []  # every rate diverged
            if all(point.factor == 1.0 for point in self.trials):
                return [Point(best.rate, value) for value in self._tune.factors if value != 1.0]
        return [point for step in (-1, 1) if (point := best.moved(direction, step)) not in self.trials]


def _tidy(value: float) -> float:
    """Rounded, without binary floating-point noise."""
    return significant(value, 9)


def tune_study(
    study: Study, missing: Mapping[str, Mapping[str, str]], make_run: MakeRun, train: Train
) -> TunedFile:
    """Tune the cells in `missing` (experiment → cell → subject), all at the same time."""
    experiments = {e.name: e for e in study.experiments}
    searches = [
        _CellSearch(experiments[name], cell, make_run)
        for name, cells in missing.items()
        for cell in experiments[name].cells
        if cell.name in cells
    ]
    runs: dict[str, RunRecord] = {}

    def next_runs(results: Mapping[str, RunRecord]) -> Plan:
        asked = {run.key for search in searches for run in search.asked.values()}
        if any(results[key].status == "crashed" for key in asked & results.keys()):
            return {}  # start no more runs; those in progress are finished
        return {label: run for search in searches for label, run in search.next_runs(results).items()}

    results = train(next_runs)
    asked = {label: run for search in searches for label, run in search.asked.items()}
    refuse_crashes(asked, results)
    for search in searches:
        runs |= search.runs
    tunings = {
        name: Tuning(
            metric=_tune_of(experiments[name]).metric,
            source="",
            cells={s.cell.name: s.search.tuning(cells[s.cell.name]) for s in searches if s.of == name},
        )
        for name, cells in missing.items()
    }
    return TunedFile(study=study.name, experiments=tunings, runs=runs)


@final
class _CellSearch:
    """The search for one cell, with the runs it asked for."""

    def __init__(self, experiment: Experiment, cell: Cell, make_run: MakeRun) -> None:
        self.of, self.cell, self.search = experiment.name, cell, Search(_tune_of(experiment))
        self._experiment, self._make_run, self._tune = experiment, make_run, _tune_of(experiment)
        #: every run asked for, and its setting; those without a result yet
        self.asked: dict[Label, RunRecord] = {}
        self._points: dict[Label, Point] = {}
        self._open: list[Label] = []
        self._has_chosen = False
        #: results without curves, by key
        self.runs: dict[str, RunRecord] = {}

    def next_runs(self, results: Mapping[str, RunRecord]) -> Plan:
        """The runs that follow once all runs asked for have a result; none before."""
        if any(self.asked[label].key not in results for label in self._open):
            return {}
        for label in self._open:
            record = results[self.asked[label].key]
            self.search.add(trial_of(record, self._points[label], self._tune.metric))
            self.runs[record.key] = dataclasses.replace(record, curves={}, loss_by_position=())
        self._open = []
        for point, seed in self.search.next_trials():
            label = Label(self.of, run_name(self.cell, point), seed)
            factor = {"output_lr": point.factor} if self._tune.factors else {}
            keys = {"lr": point.rate, **factor, "seed": seed, "test": False}
            self.asked[label] = self._make_run(self._experiment, self.cell, keys)
            self._points[label] = point
            self._open.append(label)
        return {label: self.asked[label] for label in self._open} or self._final_runs()

    def _final_runs(self) -> Plan:
        """Once: the runs at the chosen setting, so that no core waits for the searches of other cells.

        Their results are in the pool when the study asks for them. Runs with tasks are others and come later.
        """
        if self._has_chosen or self._experiment.tasks is not None:
            return {}
        self._has_chosen = True
        keys = self.search.tuning("").settings
        return {
            Label(self.of, self.cell.name, seed): self._make_run(
                self._experiment, self.cell, {**keys, "seed": seed}
            )
            for seed in self._experiment.seeds
        }


def _tune_of(experiment: Experiment) -> Tune:
    if not isinstance(experiment.tune, Tune):
        raise MaclaurinError(f"experiment {experiment.name!r} searches for no learning rates.")
    return experiment.tune


def run_name(cell: Cell, point: Point) -> str:
    """The name of a tuning run in a study."""
    return f"{cell.name}, lr {point.rate:g}" + (f", output × {point.factor:g}" if point.factor != 1.0 else "")


def refuse_crashes(plan: Plan, results: Mapping[str, RunRecord]) -> None:
    """Raise if a tuning run crashed: a crash says nothing about its learning rate."""
    found = [(label, results[record.key]) for label, record in plan.items() if record.key in results]
    crashed = [(label, record) for label, record in found if record.status == "crashed"]
    if crashed:
        label, record = crashed[0]
        more = f" (and {len(crashed) - 1} more)" if len(crashed) > 1 else ""
        raise MaclaurinError(
            f"a tuning run crashed{more}, so no learning rate is chosen: {label}: "
            f"{error_line(record.message)} Remove the cause, then start again with --retry; finished runs "
            "are kept."
        )


def trial_of(record: RunRecord, point: Point, metric: str) -> Trial:
    """What a tuning run says about its setting."""
    value = record.value(metric) if record.status == "finished" else None
    if record.status == "finished" and value is None:
        raise MaclaurinError(f"a tuning run finished without {metric}, so no rate can be chosen by it.")
    return Trial(
        rate=point.rate,
        factor=point.factor,
        seed=record.run.seed,
        value=value,
        status=record.status,
        key=record.key,
        seconds=record.seconds,
        tokens=record.run.tokens,
    )
