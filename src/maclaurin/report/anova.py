"""Analysis of variance of a factorial: how much each part matters, alone and in combination.

    y = seed + Σ main effects + Σ two-way interactions (+ higher ones) + noise

Sums of squares are of type II, by least squares: an effect is what it explains beyond all effects that do not
contain it. In a complete design these are the textbook values and the shares add up to one; if cells are
missing the definition is the same, but shares need not add up. Noise is the residual of the block model (one
mean per cell, one shift per seed), pooled over all cells. An effect's F is its mean square over that of the
noise, and its p is corrected for the number of effects tested (Holm).

Contrasts that are used in sentences have intervals at a level divided by their number (Bonferroni). If runs
are missing, a contrast is meaningful only if it lies in the row space of the design, which
`Fit.can_estimate` checks; statsmodels gives a number for every contrast.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, special

from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import CONFIDENCE, Difference, holm, spreads_differ

Term = tuple[str, ...]
Vector = NDArray[np.float64]


@final
class Fit:
    """y = Xβ + noise by least squares. Columns are indicators, so X does not have full column rank."""

    def __init__(self, x: Vector, y: Vector) -> None:
        inverse, rank = linalg.pinv(x, return_rank=True)
        self._x, self._inverse, self.rank = x, np.asarray(inverse), int(rank)
        self.df = len(y) - self.rank
        self._coefficients = self._inverse @ y
        self.residuals = y - x @ self._coefficients
        self.residual_sum = float(np.sum(self.residuals**2))

    def can_estimate(self, c: Vector) -> bool:
        """Whether cᵀβ is the same for every β that fits: c lies in the row space of X."""
        return bool(np.allclose(c, (c @ self._inverse) @ self._x, atol=1e-7))

    def value(self, c: Vector) -> float:
        """cᵀβ̂."""
        return float(c @ self._coefficients)

    def variance_factor(self, c: Vector) -> float:
        """Var(cᵀβ̂)/σ²."""
        return float(np.sum((c @ self._inverse) ** 2))


def indicators(labels: list[str], levels: tuple[str, ...]) -> Vector:
    """One column per level, 1 where the label is that level."""
    return np.array([[float(label == level) for level in levels] for label in labels]).reshape(
        len(labels), len(levels)
    )


@final
@dataclass(frozen=True)
class Effect:
    """One line of the table. f and p are None if there is no noise to compare with; p is corrected (Holm)."""

    term: Term
    df: int
    sum: float
    share: float
    f: float | None = None
    p: float | None = None

    @property
    def name(self) -> str:
        """kernel × norm."""
        return " × ".join(self.term)

    @property
    def supported(self) -> bool:
        """Whether it is significant: noise alone would rarely look like it."""
        return self.p is not None and self.p < 1 - CONFIDENCE


@final
class Factorial:
    """The analysis of one experiment with two or more axes."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.axes = outcome.experiment.axes
        self._points = [
            (cell.name, str(seed), dict(cell.levels), value)
            for cell in outcome.cells.values()
            for seed, value in cell.scaled.items()
            if all(axis in cell.levels for axis in self.axes)
        ]
        values = np.array([value for *_, value in self._points])
        self._y = values - values.mean() if len(values) else values

    @functools.cached_property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """Axis → its levels, in the order of the cells."""
        cells = [cell.levels for cell in self.outcome.cells.values() if cell.records]
        return {axis: tuple(dict.fromkeys(c[axis] for c in cells if axis in c)) for axis in self.axes}

    @functools.cached_property
    def combinations(self) -> dict[tuple[str, ...], str]:
        """Levels on all axes → the cell there."""
        cells = [cell for cell in self.outcome.cells.values() if cell.records]
        return {tuple(cell.levels.get(axis, "") for axis in self.axes): cell.name for cell in cells}

    @functools.cached_property
    def is_balanced(self) -> bool:
        """Every combination of levels exists and finished with every seed."""
        everything = math.prod(len(levels) for levels in self.levels.values())
        seeds = {seed for _, seed, *_ in self._points}
        return len(self._points) == everything * len(seeds) > 0

    @functools.cached_property
    def noise_df(self) -> int:
        """Degrees of freedom of the noise."""
        return self._whole.df if len(self._y) else 0

    @functools.cached_property
    def noise(self) -> float | None:
        """Variance of the noise."""
        if self.noise_df < 1:
            return None
        rounding = 1e-9 * max(abs(value) for *_, value in self._points)
        return max(self._whole.residual_sum / self.noise_df, rounding**2, 1e-300)

    @functools.cached_property
    def spreads_differ(self) -> bool:
        """Whether cells differ too much in spread over seeds to be pooled (Bartlett's test at 5 %)."""
        if self.noise_df < 1:
            return False
        residuals: dict[str, list[float]] = {}
        for (cell, *_), residual in zip(self._points, self._whole.residuals, strict=True):
            residuals.setdefault(cell, []).append(float(residual))
        p = spreads_differ(list(residuals.values()))
        return p is not None and p < 1 - CONFIDENCE

    @functools.cached_property
    def total(self) -> float:
        """Sum of squares about the mean."""
        return float(np.sum(self._y**2))

    @functools.cached_property
    def effects(self) -> tuple[Effect, ...]:
        """Main effects, two-way interactions, then the rest: higher ones together, seed, noise."""
        if not len(self._y) or self.total == 0:
            return ()
        found = [self._effect(term) for term in self._tested]
        if len(self.axes) > 2:
            found.append(self._compare(("higher interactions",), self._fit(*self._tested), self._whole))
        return _corrected(tuple(effect for effect in found if effect.df > 0))

    @functools.cached_property
    def left_over(self) -> tuple[Effect, ...]:
        """The lines that are not effects of parts: seed and noise."""
        if not len(self._y) or self.total == 0:
            return ()
        seed = self._compare(("seed",), Fit(self._cell_columns, self._y), self._whole)
        rest = self._whole.residual_sum
        return replace(seed, f=None, p=None), Effect(("noise",), self.noise_df, rest, rest / self.total)

    @property
    def inestimable(self) -> tuple[str, ...]:
        """Effects that the finished runs cannot separate from others."""
        known = {effect.term for effect in self.effects}
        return tuple(" × ".join(term) for term in self._tested if term not in known)

    def marginal(self, axis: str) -> dict[str, float]:
        """Level → its least-squares mean, averaged over the other axes."""
        fit = self._fit(*((a,) for a in self.axes))
        centre = float(np.mean([value for *_, value in self._points]))
        return {level: centre + fit.value(self._marginal_weights(axis, level)) for level in self.levels[axis]}

    def between(self, axis: str, level: str, other: str) -> Difference | None:
        """Level − other of one axis, averaged over the others."""
        weights = self._marginal_weights(axis, level) - self._marginal_weights(axis, other)
        return self._contrast(self._fit(*((a,) for a in self.axes)), weights)

    def interaction_contrast(
        self, term: Term, rows: tuple[str, str], columns: tuple[str, str]
    ) -> Difference | None:
        """(row₁ − row₀ at column₁) − (row₁ − row₀ at column₀)."""
        weights = sum(
            sign * self._pair_weights(term, row, column)
            for row, column, sign in (
                (rows[1], columns[1], 1),
                (rows[0], columns[1], -1),
                (rows[1], columns[0], -1),
                (rows[0], columns[0], 1),
            )
        )
        return self._contrast(self._fit(*self._tested), np.asarray(weights))

    def step(self, term: Term, rows: tuple[str, str], column: str) -> float | None:
        """row₁ − row₀ at one column, averaged over the other axes; None if it cannot be estimated."""
        fit = self._fit(*self._tested)
        weights = self._pair_weights(term, rows[1], column) - self._pair_weights(term, rows[0], column)
        return fit.value(weights) if fit.can_estimate(weights) else None

    def mean_at(self, levels: dict[str, str]) -> tuple[float | None, int, int]:
        """Mean over the cells with these levels, number of cells with a result, and number planned."""
        names = [
            name
            for place, name in self.combinations.items()
            if all(place[self.axes.index(axis)] == level for axis, level in levels.items())
        ]
        means = [s.mean for name in names if (s := self.outcome.cells[name].spread) is not None]
        return (float(np.mean(means)) if means else None), len(means), len(names)

    # ------------------------------------------------------------------------------- least squares

    @property
    def _tested(self) -> tuple[Term, ...]:
        return (*((axis,) for axis in self.axes), *itertools.combinations(self.axes, 2))

    @functools.cached_property
    def _seed_columns(self) -> Vector:
        seeds = [seed for _, seed, *_ in self._points]
        return indicators(seeds, tuple(dict.fromkeys(seeds)))

    @functools.cached_property
    def _cell_columns(self) -> Vector:
        cells = [cell for cell, *_ in self._points]
        return indicators(cells, tuple(dict.fromkeys(cells)))

    @functools.cached_property
    def _whole(self) -> Fit:
        return Fit(np.hstack([self._seed_columns, self._cell_columns]), self._y)

    def _fit(self, *terms: Term) -> Fit:
        """Seeds, then one block of columns per term."""
        columns = [self._seed_columns]
        for term in terms:
            labels = ["\0".join(levels[axis] for axis in term) for _, _, levels, _ in self._points]
            columns.append(indicators(labels, self._places(term)))
        return Fit(np.hstack(columns), self._y)

    def _places(self, term: Term) -> tuple[str, ...]:
        return tuple("\0".join(place) for place in itertools.product(*(self.levels[axis] for axis in term)))

    def _effect(self, term: Term) -> Effect:
        others = [t for t in self._tested if not set(term) <= set(t)]
        return self._compare(term, self._fit(*others), self._fit(*others, term))

    def _compare(self, term: Term, without: Fit, within: Fit) -> Effect:
        df = within.rank - without.rank
        gained = max(0.0, without.residual_sum - within.residual_sum)
        if df < 1 or not self.noise:
            return Effect(term, df, gained, gained / self.total)
        f = gained / df / self.noise
        return Effect(term, df, gained, gained / self.total, f, float(special.fdtrc(df, self.noise_df, f)))

    def _contrast(self, fit: Fit, weights: Vector) -> Difference | None:
        if self.noise is None or not fit.can_estimate(weights):
            return None
        error = math.sqrt(self.noise * fit.variance_factor(weights))
        return Difference(fit.value(weights), error, self.noise_df, len(self._y))

    def _marginal_weights(self, axis: str, level: str) -> Vector:
        """Weights of one level in the model of main effects, averaged over all other axes and the seed."""
        parts = [_even(self._seed_columns.shape[1])]
        for other in self.axes:
            levels = self.levels[other]
            parts.append(_one(levels, level) if other == axis else _even(len(levels)))
        return np.concatenate(parts)

    def _pair_weights(self, term: Term, row: str, column: str) -> Vector:
        """Weights of two levels in the model of main effects and two-way interactions."""
        fixed = dict(zip(term, (row, column), strict=True))
        parts = [_even(self._seed_columns.shape[1])]
        for effect in self._tested:
            weights = np.ones(1)
            for axis in effect:
                levels = self.levels[axis]
                own = _one(levels, fixed[axis]) if axis in fixed else _even(len(levels))
                weights = np.outer(weights, own).ravel()
            parts.append(weights)
        return np.concatenate(parts)


def _even(count: int) -> Vector:
    return np.full(count, 1.0 / count)


def _one(levels: tuple[str, ...], level: str) -> Vector:
    return np.array([float(name == level) for name in levels])


def _corrected(effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
    """Each p after Holm's correction for the number of effects tested."""
    tested = [effect for effect in effects if effect.p is not None]
    found = dict(zip((e.term for e in tested), holm([e.p or 0.0 for e in tested]), strict=True))
    return tuple(replace(effect, p=found.get(effect.term)) for effect in effects)
