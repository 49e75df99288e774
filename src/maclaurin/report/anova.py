"""Analysis of variance of a factorial: how much each part matters, alone and in combination.

    y = seed + Σ main effects + Σ two-way interactions (+ higher ones) + noise

Sums of squares are of type II, by least squares: an effect is what it explains beyond all effects that do not
contain it. In a complete design these are the textbook values and the shares add up to one; if cells are
missing the definition is the same, but shares need not add up. Noise is the residual of the block model (one
mean per cell, one shift per seed), pooled over all cells. An effect's F is its mean square over that of the
noise.

Pooled noise is too small for contrasts of the cells that vary most, so F alone decides nothing. Each effect
has a second test that pools nothing: a contrast of two levels on each of its axes, averaged over the other
axes, has one value per seed, and is tested by Student's t over the seeds. The smallest p of the contrasts of
an effect is multiplied by their number (Bonferroni). Both p are corrected for the number of effects of the
experiment (Holm), and an effect is decided if both are below 0.05.

A run that diverged has no value. Effects over the other runs alone would leave out a bad result, so with a
diverged run no effect has a p.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, special

from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import CONFIDENCE, Difference, holm, mean_of, spreads_differ, two_sided

Term = tuple[str, ...]
#: axis → two of its levels, compared as second − first
Pairs = Mapping[str, tuple[str, str]]
Vector = NDArray[np.float64]
ANYWHERE: Mapping[str, str] = MappingProxyType({})


@final
class Fit:
    """y = Xβ + noise by least squares. Columns are indicators, so X does not have full column rank."""

    def __init__(self, x: Vector, y: Vector) -> None:
        inverse, rank = linalg.pinv(x, return_rank=True)
        self.rank = int(rank)
        self.df = len(y) - self.rank
        self._coefficients = np.asarray(inverse) @ y
        self.residuals = y - x @ self._coefficients
        self.residual_sum = float(np.sum(self.residuals**2))

    def value(self, c: Vector) -> float:
        """cᵀβ̂."""
        return float(c @ self._coefficients)


def indicators(labels: list[str], levels: tuple[str, ...]) -> Vector:
    """One column per level, 1 where the label is that level."""
    return np.array([[float(label == level) for level in levels] for label in labels]).reshape(
        len(labels), len(levels)
    )


@final
@dataclass(frozen=True)
class Effect:
    """One line of the table; what cannot be tested is None.

    p           of F, corrected (Holm)
    p_by_seed   of its contrasts seed by seed, corrected for their number and for that of the effects
    """

    term: Term
    df: int
    sum: float
    share: float
    f: float | None = None
    p: float | None = None
    p_by_seed: float | None = None

    @property
    def name(self) -> str:
        """kernel × norm."""
        return " × ".join(self.term)

    @property
    def supported(self) -> bool:
        """Whether both tests are significant."""
        ps = (self.p, self.p_by_seed)
        return all(p is not None and p < 1 - CONFIDENCE for p in ps)


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

    @property
    def diverged(self) -> tuple[str, ...]:
        """Cells with a run that diverged."""
        return tuple(cell.name for cell in self.outcome.cells.values() if cell.diverged)

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
        found = [replace(self._effect(term), p_by_seed=self._p_by_seed([term])) for term in self._tested]
        if len(self.axes) > 2:
            higher = self._compare(("higher interactions",), self._fit(*self._tested), self._whole)
            sizes = range(3, len(self.axes) + 1)
            terms = [term for size in sizes for term in itertools.combinations(self.axes, size)]
            found.append(replace(higher, p_by_seed=self._p_by_seed(terms)))
        if self.diverged:
            found = [replace(effect, p=None, p_by_seed=None) for effect in found]
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

    def seed_contrast(self, pairs: Pairs, at: Mapping[str, str] = ANYWHERE) -> Difference | None:
        """The change from the first to the second level of each pair, seed by seed.

        One pair is a difference of two levels. Two pairs are an interaction: (row₁ − row₀ at column₁) −
        (row₁ − row₀ at column₀). It is averaged over the axes that neither `pairs` nor `at` names, where all
        corners exist. None if no seed has all cells, or nowhere all corners exist.
        """
        chosen = {**{axis: (level,) for axis, level in at.items()}, **pairs}
        others = [axis for axis in self.axes if axis not in chosen]
        rests = itertools.product(*(self.levels[axis] for axis in others))
        everywhere = [self._corners(chosen, dict(zip(others, rest, strict=True))) for rest in rests]
        places = [
            corners for corners in everywhere if all(place in self._complete_cells for place, _ in corners)
        ]
        if not places or not self._complete_seeds:
            return None
        values = [
            sum(sign * found[place] for corners in places for place, sign in corners) / len(places)
            for found in self._complete_seeds
        ]
        return mean_of(values)

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

    @functools.cached_property
    def _complete_cells(self) -> set[tuple[str, ...]]:
        """Levels of the cells with at least one value."""
        return {tuple(levels[axis] for axis in self.axes) for _, _, levels, _ in self._points}

    @functools.cached_property
    def _complete_seeds(self) -> list[dict[tuple[str, ...], float]]:
        """Levels → value, for each seed that has a value in all of these cells."""
        seeds: dict[str, dict[tuple[str, ...], float]] = {}
        for _, seed, levels, value in self._points:
            seeds.setdefault(seed, {})[tuple(levels[axis] for axis in self.axes)] = value
        return [found for found in seeds.values() if found.keys() == self._complete_cells]

    def _corners(
        self, chosen: Mapping[str, tuple[str, ...]], rest: Mapping[str, str]
    ) -> list[tuple[tuple[str, ...], int]]:
        """Levels of every corner, and its sign: −1 for each first level of a pair."""
        found = []
        for levels in itertools.product(*chosen.values()):
            place = {**rest, **dict(zip(chosen, levels, strict=True))}
            pairs = zip(levels, chosen.values(), strict=True)
            firsts = sum(len(pair) == 2 and level == pair[0] for level, pair in pairs)
            found.append((tuple(place[axis] for axis in self.axes), (-1) ** firsts))
        return found

    def pairs_of(self, term: Term) -> Iterator[dict[str, tuple[str, str]]]:
        """Every choice of two levels on each axis of a term."""
        choices = [list(itertools.combinations(self.levels[axis], 2)) for axis in term]
        for chosen in itertools.product(*choices):
            yield dict(zip(term, chosen, strict=True))

    def _p_by_seed(self, terms: list[Term]) -> float | None:
        """The smallest p of the contrasts of these terms, times their number; None if none can be tested."""
        found = [self.seed_contrast(pairs) for term in terms for pairs in self.pairs_of(term)]
        ps = [two_sided(contrast) for contrast in found if contrast is not None and contrast.is_tested]
        return min(1.0, len(ps) * min(ps)) if ps else None

    def _marginal_weights(self, axis: str, level: str) -> Vector:
        """Weights of one level in the model of main effects, averaged over all other axes and the seed."""
        parts = [_even(self._seed_columns.shape[1])]
        for other in self.axes:
            levels = self.levels[other]
            parts.append(_one(levels, level) if other == axis else _even(len(levels)))
        return np.concatenate(parts)


def _even(count: int) -> Vector:
    return np.full(count, 1.0 / count)


def _one(levels: tuple[str, ...], level: str) -> Vector:
    return np.array([float(name == level) for name in levels])


def _corrected(effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
    """Both p of each effect after Holm's correction for the number of effects; one without a p counts too."""
    by_f = holm([1.0 if effect.p is None else effect.p for effect in effects])
    by_seed = holm([1.0 if effect.p_by_seed is None else effect.p_by_seed for effect in effects])
    return tuple(
        replace(
            effect,
            p=None if effect.p is None else by_f[place],
            p_by_seed=None if effect.p_by_seed is None else by_seed[place],
        )
        for place, effect in enumerate(effects)
    )
