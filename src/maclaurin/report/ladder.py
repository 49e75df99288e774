"""A ladder: the same cells at three sizes or more. How does the gap to the baseline change, do ranks hold?

    difference to the baseline = a + b · log₂(parameters) + noise
    ln value                   = c + e · ln(parameters)  + noise

Both lines are ordinary least squares over all sizes and seeds. A point of the first is the difference of one
seed at one size, so effects of a seed common to all cells cancel. b is the change of the gap per doubling of
the parameters, and e the exponent of a power law without a floor.

Spreads differ between sizes, so errors are heteroscedasticity-robust (HC3), with Student's t. With three
seeds at three sizes whose spreads are as 3 : 1 : 1, a 95 % interval from pooled noise contains the true slope
in 89 % of cases, one from HC3 in 94 %. `by_seed` assumes nothing about the spreads: one slope per seed and
Student's t over the seeds; with three seeds its intervals are very wide. No interval contains an error that
all runs of a cell share at one size, such as a learning rate that is off: if it is as large as the spread
over seeds, an interval from HC3 contains the true slope in 81 % of cases. The p of the slopes is corrected
for the number of cells (Holm); cells without a line count too, so that a run that diverged never helps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from scipy import stats
from statsmodels.regression.linear_model import OLS

from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.report.statistics import CONFIDENCE, Difference, holm, mean_of, paired, to_scale, two_sided
from maclaurin.study.design import MIN_LADDER_SIZES

GROWS, SHRINKS, TURNS, UNDECIDED = "the gap grows", "the gap shrinks", "the gap changes sign", "undecided"
Direction = Literal["the gap grows", "the gap shrinks", "the gap changes sign", "undecided"]


@final
class Line:
    """y = a + b·x by least squares. One seed gives a line without an interval."""

    def __init__(self, x: Sequence[float], y: Sequence[float], seeds: int) -> None:
        self.n = len(x)
        robust = {"cov_type": "HC3", "use_t": True} if seeds > 1 else {}
        self._fit = OLS(np.array(y), _design(x)).fit(**robust)
        self._has_interval, self._rounding = seeds > 1, 1e-9 * max(map(abs, y))

    @property
    def slope(self) -> Difference:
        """b with its error."""
        error = max(float(self._fit.bse[1]), self._rounding, 1e-30) if self._has_interval else None
        return Difference(float(self._fit.params[1]), error, self.n - 2, self.n)

    def at(self, x: Sequence[float]) -> list[tuple[float, float, float]]:
        """The line at each x with the 95 % interval of its height; the interval is nan with one seed."""
        found = self._fit.get_prediction(_design(x))
        band = found.conf_int(alpha=1 - CONFIDENCE) if self._has_interval else np.full((len(x), 2), np.nan)
        return [
            (float(y), float(low), float(high))
            for y, (low, high) in zip(found.predicted_mean, band, strict=True)
        ]


def _design(x: Sequence[float]) -> np.ndarray:
    return np.column_stack([np.ones(len(x)), np.array(x)])


@final
@dataclass(frozen=True, eq=False)
class Rung:
    """One experiment of a ladder; its size is the number of parameters of its baseline."""

    outcome: Outcome
    parameters: float

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return self.outcome.experiment.name

    @property
    def tokens(self) -> int:
        """Training tokens of a run of the baseline."""
        first = self.outcome.baseline.first
        return first.run.tokens if first else 0


@final
@dataclass(frozen=True, eq=False)
class Trend:
    """The change of the gap between a cell and the baseline, per doubling of the parameters.

    line      through the differences of all seeds; None with fewer than three sizes, or if a run diverged
    by_seed   mean of the slopes of single seeds
    p         of the slope, corrected (Holm); None with one seed
    ends      (smallest, largest) log₂ of the parameters
    """

    cell: str
    line: Line | None
    by_seed: Difference | None
    p: float | None
    ends: tuple[float, float]

    @property
    def direction(self) -> Direction:
        """Away from zero, towards it, or through it; undecided unless the slope is significant."""
        if self.line is None or self.p is None or self.p >= 1 - CONFIDENCE:
            return UNDECIDED
        first, last = self.line.at(self.ends)
        if _is_apart(first) and _is_apart(last) and first[0] * last[0] < 0:
            return TURNS
        return GROWS if abs(last[0]) > abs(first[0]) else SHRINKS


def _is_apart(point: tuple[float, float, float]) -> bool:
    """Whether the interval excludes zero."""
    return point[1] > 0 or point[2] < 0


@final
@dataclass(frozen=True)
class Swap:
    """Two cells that change places: `before` is better at the smaller size, `after` at the larger."""

    before: str
    after: str
    is_decided: bool


@final
@dataclass(frozen=True)
class RankStep:
    """The order of the cells at two neighbouring sizes.

    tau     Kendall's, between the means: 1 if every pair keeps its order; None with fewer than two cells
    pairs   number of pairs of cells with a result at both sizes
    sure    pairs that keep their order, with intervals that exclude zero at both sizes
    """

    smaller: str
    larger: str
    tau: float | None
    pairs: int
    sure: int
    swaps: tuple[Swap, ...]


@final
class Ladder:
    """The experiments of a ladder, the smallest first; without those whose baseline has no result."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        sized = [(outcome, outcome.baseline.average("parameters")) for outcome in outcomes]
        found = [Rung(outcome, size) for outcome, size in sized if size and outcome.baseline.values]
        self.rungs = tuple(sorted(found, key=lambda rung: rung.parameters))

    @property
    def has_lines(self) -> bool:
        """Whether there are enough sizes for a line."""
        return len({rung.parameters for rung in self.rungs}) >= MIN_LADDER_SIZES

    @property
    def first(self) -> Outcome:
        """The experiment of the smallest size."""
        return self.rungs[0].outcome

    @property
    def baseline(self) -> str:
        """The cell that the others are compared with."""
        return self.first.experiment.baseline

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of all rungs, in the order of the study."""
        return tuple(
            name for name in self.first.cells if all(name in rung.outcome.cells for rung in self.rungs)
        )

    @property
    def others(self) -> tuple[str, ...]:
        """The cells that are compared with the baseline."""
        return tuple(name for name in self.cells if name != self.baseline)

    def runs(self, cell: str) -> list[CellOutcome]:
        """The runs of a cell, size by size."""
        return [rung.outcome.cells[cell] for rung in self.rungs]

    @functools.cached_property
    def trends(self) -> dict[str, Trend]:
        """Cell → how its gap changes."""
        lines = {cell: self._gap_line(cell) for cell in self.others}
        slopes = {cell: line.slope for cell, line in lines.items() if line}
        tested = {cell for cell, slope in slopes.items() if slope.is_tested}
        every = [two_sided(slopes[cell]) if cell in tested else 1.0 for cell in lines]
        ps = {cell: p for cell, p in zip(lines, holm(every), strict=True) if cell in tested}
        ends = (math.log2(self.rungs[0].parameters), math.log2(self.rungs[-1].parameters))
        return {
            cell: Trend(cell, line, self._by_seed(cell) if line else None, ps.get(cell), ends)
            for cell, line in lines.items()
        }

    @functools.cached_property
    def powers(self) -> dict[str, Line | None]:
        """Cell → ln of the metric against ln of its own parameters; None without three sizes above zero."""
        return {cell: self._power(cell) for cell in self.cells}

    @functools.cached_property
    def steps(self) -> tuple[RankStep, ...]:
        """The order of the cells from each size to the next."""
        return tuple(self._step(one, other) for one, other in itertools.pairwise(self.rungs))

    def during(self, rung: Rung, cell: str) -> dict[int, Difference]:
        """Training tokens → difference to the baseline at that evaluation, by the validation curves."""
        own, other = _curves(rung, cell), _curves(rung, self.baseline)
        found = {}
        for tokens in sorted(own.keys() & other.keys()):
            difference = paired(own[tokens], other[tokens])
            if difference is not None:
                found[tokens] = difference
        return found

    def _gap_line(self, cell: str) -> Line | None:
        if any(found.diverged for found in (*self.runs(cell), *self.runs(self.baseline))):
            return None  # a difference that has no bound fits no line
        points = [
            (math.log2(rung.parameters), gap)
            for rung in self.rungs
            for gap in _gaps(rung, cell, self.baseline).values()
        ]
        return _line(points)

    def _by_seed(self, cell: str) -> Difference | None:
        gaps = [_gaps(rung, cell, self.baseline) for rung in self.rungs]
        x = [math.log2(rung.parameters) for rung in self.rungs]
        shared = sorted(set.intersection(*map(set, gaps)))
        slopes = [Line(x, [gap[seed] for gap in gaps], seeds=1).slope.value for seed in shared]
        return mean_of(slopes) if slopes else None

    def _power(self, cell: str) -> Line | None:
        points = []
        for found in self.runs(cell):
            size = found.average("parameters")
            if not size or found.diverged or any(value <= 0 for value in found.values.values()):
                return None
            points += [(math.log(size), math.log(value)) for value in found.values.values()]
        return _line(points)

    def _step(self, one: Rung, other: Rung) -> RankStep:
        first, second = _means(one), _means(other)
        both = [name for name in self.cells if name in first and name in second]
        tau = math.nan
        if len(both) > 1:
            ranks = [[means[name] for name in both] for means in (first, second)]
            tau = float(np.asarray(stats.kendalltau(*ranks))[0])
        swaps, pairs, sure = [], 0, 0
        for a, b in itertools.combinations(both, 2):
            (at_one, sure_one), (at_other, sure_other) = _side(one.outcome, a, b), _side(other.outcome, a, b)
            if not at_one or not at_other:
                continue
            pairs += 1
            is_decided = sure_one and sure_other
            if at_one == at_other:
                sure += is_decided
            else:
                swaps.append(Swap(*((a, b) if at_one < 0 else (b, a)), is_decided))
        return RankStep(one.name, other.name, tau if math.isfinite(tau) else None, pairs, sure, tuple(swaps))


def ladder_of(outcomes: dict[str, Outcome], names: Sequence[str]) -> Ladder | None:
    """The ladder of these experiments; None if none of them has a result of its baseline."""
    found = Ladder([outcomes[name] for name in names if name in outcomes])
    return found if found.rungs else None


def _gaps(rung: Rung, cell: str, baseline: str) -> dict[int, float]:
    """Seed → cell − baseline, on the scale of differences."""
    own, other = rung.outcome.cells[cell].scaled, rung.outcome.cells[baseline].scaled
    return {seed: own[seed] - other[seed] for seed in sorted(set(own) & set(other))}


def _curves(rung: Rung, cell: str) -> dict[int, dict[int, float]]:
    """Training tokens → seed → value at that evaluation, on the scale of differences."""
    experiment, found = rung.outcome.experiment, {}
    for seed, record in rung.outcome.cells[cell].records.items():
        curve = record.curves.get(f"validation_{experiment.metric}", ())
        for step, value in curve if record.status == "finished" else ():
            tokens = round(record.run.tokens * step / record.run.steps)
            found.setdefault(tokens, {})[seed] = to_scale(value, experiment.scale)
    return found


def _means(rung: Rung) -> dict[str, float]:
    """Cell → mean of the metric."""
    return {name: cell.spread.mean for name, cell in rung.outcome.cells.items() if cell.spread}


def _line(points: Sequence[tuple[float, float]]) -> Line | None:
    """The line through points of three sizes or more. Seeds are counted where there are fewest."""
    x = [point[0] for point in points]
    if len(set(x)) < MIN_LADDER_SIZES:
        return None
    return Line(x, [point[1] for point in points], min(x.count(size) for size in set(x)))


def _side(outcome: Outcome, a: str, b: str) -> tuple[int, bool]:
    """(−1 if a is better, 1 if b is, 0 if unknown; whether the interval excludes zero)."""
    difference = outcome.compare(a, b)
    if difference is None or difference.value == 0:
        return 0, False
    worse = outcome.worsening(difference).value > 0
    return (1 if worse else -1), outcome.standing_of(difference) in ("ahead", "behind")
