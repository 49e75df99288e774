"""Learning rates that follow from those tuned at other sizes, and the runs that test the rule.

The rule is rate ∝ width^−p, in factors of two. Its exponent p is the one that suits most cells of two sizes
at which rates were searched. At the size that it is used for, rates around the carried one can be tried with
the tuning seed: the page then says for which cells another one is better. The runs keep the rate of the rule.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError
from maclaurin.models.configuration import size_named
from maclaurin.plain_data import significant
from maclaurin.study.design import Carried, Cell, Experiment, Study
from maclaurin.study.run_record import CellTuning, Label, Plan, RunRecord, Tuning
from maclaurin.study.tune import MakeRun, Point, Train, refuse_crashes, run_name, trial_of
from maclaurin.study.tuned_rates import TunedFile, known_tests, subject


@final
@dataclass(frozen=True)
class Rule:
    """rate ∝ width^−exponent, from the rates of one experiment to another.

    exponent   rounded to two digits
    measured   the experiments whose rates gave the exponent; empty if it was given
    origin     the experiment that the rates are carried from
    doublings  the carried rate is that of `origin` times 2^doublings
    """

    exponent: float
    measured: tuple[str, ...]
    origin: str
    doublings: int

    def rate(self, tuned: float) -> float:
        """The rate of a cell, from the one that `origin` was tuned to."""
        return significant(tuned * 2.0**self.doublings, 9)

    def __str__(self) -> str:
        times = {1: "twice", 0: "", -1: "half"}.get(self.doublings, f"{2.0**self.doublings:g} times")
        how = (
            f"p suits most cells between {self.measured[0]} and {self.measured[1]}"
            if self.measured
            else "p was given"
        )
        return (
            f"{times} the rate tuned in {self.origin} (rate ∝ width^−p with p = {self.exponent:g}, in "
            f"factors of two; {how}), with its factor of the output projections"
        ).strip()


def require_rules(study: Study) -> None:
    """Raise if an experiment cannot take its rates from others, before hours of searching for those."""
    for experiment in study.experiments:
        if isinstance(experiment.tune, Carried):
            _widths(study, experiment, experiment.tune)


def _widths(study: Study, experiment: Experiment, carried: Carried) -> dict[str, int]:
    """Experiment → width of its models, for those of the rule; raises if no rule follows from them."""
    experiments = {e.name: e for e in study.experiments}
    first, origin = carried.tuned[0], carried.tuned[-1]
    widths = {name: _width(experiments[name]) for name in (first, origin, experiment.name)}
    if carried.exponent is None and widths[first] == widths[origin]:
        raise InputError(
            f"rates of two models of width {widths[first]} do not say how they change with the width: give "
            f"Carried(…) of experiment {experiment.name!r} an exponent, or tune at another width."
        )
    return widths


def rule_for(study: Study, experiment: Experiment, carried: Carried, tunings: Mapping[str, Tuning]) -> Rule:
    """The rule by which this experiment takes its rates from those of others."""
    first, origin = carried.tuned[0], carried.tuned[-1]
    widths = _widths(study, experiment, carried)
    exponent, measured = carried.exponent, ()
    if exponent is None:
        measured = (first, origin)
        exponent = _common_exponent(tunings[first], tunings[origin], widths[first], widths[origin])
    doublings = round(-exponent * math.log2(widths[experiment.name] / widths[origin]))
    return Rule(round(exponent, 2), measured, origin, doublings)


def _common_exponent(small: Tuning, large: Tuning, narrow: int, wide: int) -> float:
    """The median over the cells of p in rate ∝ width^−p; the lower of two in the middle.

    All cells of both sizes count, so that a larger size with fewer cells follows the same rule.
    """
    return statistics.median_low(
        math.log2(cell.rate / large.cells[name].rate) / math.log2(wide / narrow)
        for name, cell in small.cells.items()
        if name in large.cells
    )


def _width(experiment: Experiment) -> int:
    """Width of the models of an experiment; raises if its cells differ."""
    sizes = {experiment.settings(cell).get("size", "mini") for cell in experiment.cells}
    widths = {size_named(size).hidden for size in sizes}
    if len(widths) > 1:
        raise InputError(
            f"experiment {experiment.name!r} has models of widths {', '.join(map(str, sorted(widths)))}, so "
            "a rule about the width gives it no learning rates: make one experiment of each."
        )
    return widths.pop()


def carried_rates(
    study: Study,
    out: Path,
    tunings: Mapping[str, Tuning],
    file: Path,
    make_run: MakeRun,
    train: Train,
    *,
    retune: bool,
) -> dict[str, Tuning]:
    """Tunings of the experiments whose rates follow from others, with the runs that test them."""
    cells: dict[str, list[_CarriedCell]] = {}
    found: dict[str, Tuning] = {}
    known = {} if retune else known_tests(study, out)
    for e in study.experiments:
        if isinstance(e.tune, Carried):
            rule = rule_for(study, e, e.tune, tunings)
            cells[e.name] = [
                _CarriedCell(e, e.tune, cell, rule, tunings[rule.origin], make_run, known) for cell in e.cells
            ]
            found[e.name] = dataclasses.replace(tunings[rule.origin], source="this study", rule=str(rule))
    every = [cell for members in cells.values() for cell in members]
    if any(cell.is_open for cell in every):
        results = train(lambda results: {k: r for cell in every for k, r in cell.next_runs(results).items()})
        for cell in every:
            cell.finish(results)
    found = {
        name: dataclasses.replace(tuning, cells={cell.name: cell.tuning for cell in cells[name]})
        for name, tuning in found.items()
    }
    runs = {key: run for cell in every for key, run in cell.runs.items()}
    if runs or any(cell.tuning.diverged for cell in every):
        TunedFile(study=study.name, experiments=found, runs=runs).add_to(file)
    return found


@final
class _CarriedCell:
    """The rate that the rule gives a cell, runs that test it, and half of it where a final run diverges."""

    def __init__(
        self,
        experiment: Experiment,
        carried: Carried,
        cell: Cell,
        rule: Rule,
        origin: Tuning,
        make_run: MakeRun,
        known: Mapping[str, CellTuning],
    ) -> None:
        self.name, self._metric = cell.name, origin.metric
        self._experiment, self._carried, self._cell, self._make_run = experiment, carried, cell, make_run
        rate, factor = rule.rate(origin.cells[cell.name].rate), origin.cells[cell.name].factor
        of = subject(experiment, cell)
        self.tuning = CellTuning(rate=rate, factor=factor, trials=(), subject=of)
        self._tests = [Point(significant(rate * times, 9), factor or 1.0) for times in sorted(carried.tests)]
        self._finals: Plan = {}
        self._asked: dict[Label, tuple[RunRecord, Point]] = {}
        #: results of tests without curves, by key
        self.runs: dict[str, RunRecord] = {}
        if of in known:
            self._take(known[of])
        self._is_tested = len(self.tuning.trials) == len(self._tests) * len(carried.seeds)
        self._has_begun = False

    @property
    def is_open(self) -> bool:
        """Whether runs are needed before the rate is known, or to test it."""
        return not self._is_tested or self._carried.halvings > 0

    def next_runs(self, results: Mapping[str, RunRecord]) -> Plan:
        """At first the tests and the final runs; the latter again at half the rate if one diverged.

        Final runs with tasks are others, which the study asks for later.
        """
        if not self._has_begun:
            self._has_begun = True
            self._asked = {} if self._is_tested else self._test_runs()
            self._finals = self._final_runs() if self._experiment.tasks is None else {}
            return {label: run for label, (run, _) in self._asked.items()} | dict(self._finals)
        diverged = any(
            run.key in results and results[run.key].status == "diverged" for run in self._finals.values()
        )
        if not diverged or len(self.tuning.diverged) >= self._carried.halvings:
            return {}
        self._halve()
        self._finals = self._final_runs()
        return self._finals

    def finish(self, results: Mapping[str, RunRecord]) -> None:
        """Take the results of the tests."""
        refuse_crashes({label: run for label, (run, _) in self._asked.items()}, results)
        if self._asked:
            tried = [trial_of(results[run.key], point, self._metric) for run, point in self._asked.values()]
            self.tuning = dataclasses.replace(
                self.tuning, trials=tuple(sorted(tried, key=lambda trial: (trial.rate, trial.seed)))
            )
            self.runs = {
                run.key: dataclasses.replace(results[run.key], curves={}, loss_by_position=())
                for run, _ in self._asked.values()
            }

    def _take(self, known: CellTuning) -> None:
        """Use what an earlier call found for the same settings."""
        wanted = {(point, seed) for point in self._tests for seed in self._carried.seeds}
        have = {(Point(t.rate, t.factor), t.seed): t for t in known.trials}
        if wanted <= have.keys():
            trials = tuple(have[each] for each in sorted(wanted))
            self.tuning = dataclasses.replace(self.tuning, trials=trials)
        while self.tuning.rate in known.diverged and len(self.tuning.diverged) < self._carried.halvings:
            self._halve()

    def _halve(self) -> None:
        rate = self.tuning.rate
        self.tuning = dataclasses.replace(
            self.tuning, rate=significant(rate / 2, 9), diverged=(*self.tuning.diverged, rate)
        )

    def _test_runs(self) -> dict[Label, tuple[RunRecord, Point]]:
        return {
            Label(self._experiment.name, run_name(self._cell, point), seed): (
                self._run({**self._keys(point.rate), "seed": seed, "test": False}),
                point,
            )
            for point in self._tests
            for seed in self._carried.seeds
        }

    def _final_runs(self) -> Plan:
        """The runs of the result at the present rate. They are in the pool when the study asks for them."""
        point = Point(self.tuning.rate, self.tuning.factor or 1.0)
        name = run_name(self._cell, point) if self.tuning.diverged else self.name
        return {
            Label(self._experiment.name, name, seed): self._run({**self.tuning.settings, "seed": seed})
            for seed in self._experiment.seeds
        }

    def _run(self, keys: Mapping[str, Any]) -> RunRecord:
        return self._make_run(self._experiment, self._cell, keys)

    def _keys(self, rate: float) -> dict[str, float]:
        return dataclasses.replace(self.tuning, rate=rate).settings
