"""What became of an experiment: its cells, the model fitted to them, and how two cells compare.

A run that diverged is the worst result there is, not a missing one: where one cell diverged and the other
did not, the difference is unbounded on the bad side.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from maclaurin.report.statistics import BlockFit, Estimate
from maclaurin.study.record import ExperimentRecord, RunRecord

Standing = Literal["baseline", "behind", "ahead", "not distinguishable", "one seed", "not run"]


@final
@dataclass(frozen=True)
class CellOutcome:
    """The runs of one cell: values by seed, and the seeds that gave none."""

    name: str
    runs: tuple[RunRecord, ...]
    values: Mapping[int, float]
    diverged: tuple[int, ...]
    crashed: tuple[int, ...]
    absent: tuple[int, ...]

    @property
    def attention(self) -> tuple[str, ...]:
        """Its notations, one per layer or one for all."""
        return self.runs[0].attention if self.runs else ()

    @property
    def levels(self) -> Mapping[str, str]:
        """Its level on each axis."""
        return self.runs[0].levels if self.runs else {}

    @property
    def order(self) -> int | None:
        """Highest power of the score its kernel holds."""
        return self.runs[0].order if self.runs else None

    @property
    def state_bytes(self) -> int | None:
        """Size of its recurrent state."""
        return self.runs[0].state_bytes if self.runs else None

    @property
    def has_result(self) -> bool:
        """Whether any run came to an end that says something about the cell."""
        return bool(self.values or self.diverged)

    @property
    def spread(self) -> tuple[float, float] | None:
        """Least and largest value over the seeds."""
        return (min(self.values.values()), max(self.values.values())) if self.values else None


@final
class Outcome:
    """One experiment and its runs."""

    def __init__(self, experiment: ExperimentRecord, runs: tuple[RunRecord, ...]) -> None:
        self.experiment = experiment
        self.runs = tuple(run for run in runs if run.experiment == experiment.name)
        self.cells = {name: self._cell(name) for name in experiment.cells}

    @property
    def higher_is_better(self) -> bool:
        """True for accuracies, False for losses."""
        return self.experiment.metric == "accuracy"

    @property
    def metric(self) -> str:
        """The metric's name for people."""
        return self.experiment.metric.replace("_", " ")

    @functools.cached_property
    def fit(self) -> BlockFit:
        """The block model over all finished runs."""
        return BlockFit({(c.name, s): v for c in self.cells.values() for s, v in c.values.items()})

    @functools.cached_property
    def means(self) -> dict[str, Estimate | None]:
        """Cell → mean over the seeds that finished."""
        return {name: self._possible(self.fit.mean(name)) for name in self.cells}

    @functools.cached_property
    def differences(self) -> dict[str, Estimate | None]:
        """Cell → its difference to the baseline."""
        return {name: self.compare(name, self.experiment.baseline) for name in self.cells}

    def value(self, run: RunRecord) -> float | None:
        """The experiment's metric of one run."""
        return run.accuracy if self.higher_is_better else run.test_loss

    def compare(self, cell: str, other: str) -> Estimate | None:
        """Metric of cell − other; infinite where just one of them diverged; None where nothing is known."""
        a, b = self.cells[cell], self.cells[other]
        known = self.fit.difference(cell, other) if a.values and b.values else None
        if bool(a.diverged) == bool(b.diverged):
            return known if not a.diverged else None
        worst = -math.inf if self.higher_is_better else math.inf
        good, bad, end = (b, a, worst) if a.diverged else (a, b, -worst)
        if not good.values:
            return None
        seeds = min(len(good.values), len(bad.values) + len(bad.diverged))
        if seeds < 2:
            return Estimate(end, None, None, seeds)
        if not bad.values:
            return Estimate(end, end, end, seeds)
        near = -end if known is None or not known.has_interval else (known.low if end > 0 else known.high)
        return Estimate(end, *((near, end) if end > 0 else (end, near)), seeds)

    def harm(self, difference: Estimate) -> Estimate:
        """The same difference, counted so that more is worse."""
        if not self.higher_is_better:
            return difference
        low, high = difference.low, difference.high
        return Estimate(
            -difference.value,
            None if high is None else -high,
            None if low is None else -low,
            difference.n,
        )

    def standing(self, cell: str) -> Standing:
        """Where a cell stands against the baseline."""
        if not self.cells[cell].has_result:
            return "not run"
        if cell == self.experiment.baseline:
            return "baseline"
        return self.standing_of(self.differences[cell])

    def standing_of(self, difference: Estimate | None) -> Standing:
        """What a difference to a reference says."""
        if difference is None:
            return "not distinguishable"
        harm = self.harm(difference)
        if harm.low is None or harm.high is None:
            return "one seed" if harm.n < 2 else "not distinguishable"
        if harm.low > 0:
            return "behind"
        return "ahead" if harm.high < 0 else "not distinguishable"

    def best_first(self) -> list[str]:
        """Cells by their mean, cells that diverged after them, cells without results last."""
        return sorted(self.cells, key=self._rank)

    def _possible(self, mean: Estimate | None) -> Estimate | None:
        """No accuracy lies outside 0 and 1, so its interval need not either."""
        if mean is None or not self.higher_is_better or mean.low is None or mean.high is None:
            return mean
        return Estimate(mean.value, max(mean.low, 0.0), min(mean.high, 1.0), mean.n)

    def _rank(self, name: str) -> tuple[int, float]:
        cell, mean = self.cells[name], self.means[name]
        if not cell.has_result:
            return 2, 0.0
        value = 0.0 if mean is None else (-mean.value if self.higher_is_better else mean.value)
        return (1 if cell.diverged else 0), value

    def _cell(self, name: str) -> CellOutcome:
        runs = tuple(run for run in self.runs if run.cell == name)
        values = {
            run.seed: value
            for run in runs
            if run.status == "finished" and (value := self.value(run)) is not None and math.isfinite(value)
        }
        diverged = tuple(run.seed for run in runs if self._diverged(run))
        crashed = tuple(run.seed for run in runs if run.status == "crashed")
        there = {*values, *diverged, *crashed}
        absent = tuple(seed for seed in self.experiment.seeds if seed not in there)
        return CellOutcome(name, runs, values, diverged, crashed, absent)

    def _diverged(self, run: RunRecord) -> bool:
        value = self.value(run)
        not_a_number = value is not None and not math.isfinite(value)
        return run.status == "diverged" or (run.status == "finished" and not_a_number)
