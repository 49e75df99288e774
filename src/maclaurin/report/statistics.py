"""Few seeds, many cells: what may be said of a mean and of a difference.

Every cell is run with the same seeds, so a seed is a block (the same data in the same order):

    y_cs = μ_c + β_s + ε_cs,   ε ~ N(0, σ²)

Two or three seeds say little of one cell's σ, but all cells together say much: σ² is the residual variance
of this model over all finished runs of the experiment, with (cells − 1)(seeds − 1) degrees of freedom where
every run finished and N − rank(X) otherwise. With it, 95 % intervals from Student's t:

    of a mean         ȳ_c ± t σ/√n            β_s, which all cells share, is taken out
    of a difference   ȳ_c − ȳ_b ± t σ√(2/n)   seed by seed; here β_s cancels

Where runs are missing, ȳ is the least-squares mean: what the cell would have averaged over all seeds.

Pooling must not hide a cell that jumps about. A cell whose own residuals are far larger than the others'
(an F-test of its share against the rest, at 1 % over all cells) is *restless*: it leaves the pool, and its
intervals come from its own seeds alone, with n − 1 degrees of freedom.

One seed gives a number and no interval.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from maclaurin.report.distributions import f_tail, t_quantile
from maclaurin.report.least_squares import Fit, Vector, indicators

CONFIDENCE = 0.95
RESTLESS = 0.01

#: (cell, seed) → the metric
Values = Mapping[tuple[str, int], float]


@final
@dataclass(frozen=True)
class Estimate:
    """A number from n seeds, with its interval where there is one."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def has_interval(self) -> bool:
        """Whether anything may be concluded from it."""
        return self.low is not None and self.high is not None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def half_width(self) -> float | None:
        """Half the interval, where it is finite."""
        if self.low is None or self.high is None or math.isinf(self.high - self.low):
            return None
        return (self.high - self.low) / 2


def around(value: float, error: float, df: int, n: int, level: float = CONFIDENCE) -> Estimate:
    """Value ± t·error; no interval from one seed or without degrees of freedom."""
    if n < 2 or df < 1:
        return Estimate(value, None, None, n)
    half = t_quantile(0.5 + level / 2, df) * error
    return Estimate(value, value - half, value + half, n)


@final
class BlockFit:
    """The block model fitted to the finished runs of one experiment."""

    def __init__(self, values: Values) -> None:
        self.values = dict(values)
        self.cells = tuple(dict.fromkeys(cell for cell, _ in values))
        self.seeds = tuple(sorted({seed for _, seed in values}))
        self._middle = float(np.mean(list(values.values()))) if values else 0.0

    def of(self, cell: str) -> dict[int, float]:
        """Seed → value of one cell."""
        return {seed: value for (name, seed), value in self.values.items() if name == cell}

    @functools.cached_property
    def restless(self) -> frozenset[str]:
        """Cells that vary far more between seeds than the others do."""
        found: set[str] = set()
        while worst := self._most_restless(found):
            found.add(worst)
        return frozenset(found)

    @functools.cached_property
    def df(self) -> int:
        """Degrees of freedom of sigma; 0 where nothing can be said."""
        return self._pool.df

    @functools.cached_property
    def sigma(self) -> float | None:
        """Standard deviation of the noise, pooled over all cells that are not restless."""
        return math.sqrt(self._variance(self._pool)) if self.df else None

    def mean(self, cell: str) -> Estimate | None:
        """Mean of one cell over the seeds; None where no run finished."""
        own = list(self.of(cell).values())
        if not own:
            return None
        plain = Estimate(float(np.mean(own)), None, None, len(own))
        if cell in self.restless:
            return around(plain.value, self._own_error(own), len(own) - 1, len(own))
        weights = self._seed_weights() + self._cell_weights(cell)
        if self.sigma is None or not self._pool.can_tell(weights):
            return plain
        error = self.sigma * math.sqrt(self._pool.variance_factor(weights))
        return around(self._pool.value(weights) + self._middle, error, self.df, len(own))

    def difference(self, cell: str, other: str) -> Estimate | None:
        """Mean of cell − other, seed by seed; None where the runs cannot tell."""
        first, second = self.of(cell), self.of(other)
        shared = [first[seed] - second[seed] for seed in self.seeds if seed in first and seed in second]
        plain = Estimate(float(np.mean(shared)), None, None, len(shared)) if shared else None
        if cell == other or not first or not second:
            return plain
        if {cell, other} & self.restless:
            return plain and around(plain.value, self._own_error(shared), len(shared) - 1, len(shared))
        weights = self._cell_weights(cell) - self._cell_weights(other)
        if self.sigma is None or not self._pool.can_tell(weights):
            return plain
        error = self.sigma * math.sqrt(self._pool.variance_factor(weights))
        return around(self._pool.value(weights), error, self.df, min(len(first), len(second)))

    @functools.cached_property
    def _pool(self) -> Fit:
        return self._fit_without(self.restless)

    @functools.cached_property
    def _floor(self) -> float:
        """Variance below which a difference is rounding."""
        return (1e-9 * max((abs(v) for v in self.values.values()), default=0.0)) ** 2

    def _variance(self, fit: Fit) -> float:
        return max(fit.residual_sum / fit.df, self._floor)

    def _own_error(self, numbers: list[float]) -> float:
        if len(numbers) < 2:
            return math.nan
        return math.sqrt(max(float(np.var(numbers, ddof=1)), self._floor) / len(numbers))

    def _fit_without(self, left_out: frozenset[str] | set[str]) -> Fit:
        kept = [(cell, seed) for cell, seed in self.values if cell not in left_out]
        x = np.hstack(
            [
                indicators([cell for cell, _ in kept], self.cells),
                indicators([str(seed) for _, seed in kept], tuple(map(str, self.seeds))),
            ]
        )
        return Fit(x, np.array([self.values[key] - self._middle for key in kept]))

    def _most_restless(self, already: set[str]) -> str | None:
        """The cell whose residuals are least like the others', if that is no accident."""
        everything = self._fit_without(already)
        candidates = [cell for cell in self.cells if cell not in already]
        surest, found = RESTLESS / max(1, len(self.cells)), None
        for cell in candidates:
            rest = self._fit_without(already | {cell})
            own_df = everything.df - rest.df
            if own_df < 1 or rest.df < 2:
                continue
            own = max(0.0, everything.residual_sum - rest.residual_sum) / own_df
            chance = f_tail(own / max(self._variance(rest), 1e-300), own_df, rest.df)
            if chance < surest:
                surest, found = chance, cell
        return found

    def _cell_weights(self, cell: str) -> Vector:
        return np.array([float(name == cell) for name in self.cells] + [0.0] * len(self.seeds))

    def _seed_weights(self) -> Vector:
        return np.array([0.0] * len(self.cells) + [1 / len(self.seeds)] * len(self.seeds))
