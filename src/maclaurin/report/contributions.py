"""The contribution of each part of a waterfall, with its interval, and which parts need each other.

A contribution is a weighted sum over cells (study/shapley.py). It is computed once per seed, from that seed's
runs in all of these cells, and its interval is Student's t over the seeds. A bootstrap does not work here:
from four seeds it draws at most 35 different samples, and its intervals are too narrow.

Signs are tested two-sided. Holm's method corrects p for all contributions of a page, and separately for all
pairs of parts of a page: every waterfall of every experiment and metric. Sums that could not be tested count
too, so missing data never help.

A run that diverged is a bad result, not a missing one, and a sum over the other seeds would leave it out. So
a sum that needs a cell with a diverged run has neither an interval nor a p.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import CONFIDENCE, Difference, Spread, holm, mean_of, two_sided
from maclaurin.study.shapley import Interaction, Waterfall


@final
@dataclass(frozen=True)
class Contribution:
    """Contribution of one switch, on the scale of differences; p is corrected (Holm), None if untested."""

    switch: str
    size: Difference
    p: float | None = None

    @property
    def supported(self) -> bool:
        """Whether it is significant."""
        return self.p is not None and self.p < 1 - CONFIDENCE


@final
@dataclass(frozen=True)
class PairEffect:
    """How much more the second switch contributes with the first than alone; p is corrected (Holm)."""

    pair: Interaction
    alone: Difference
    beside: Difference
    interaction_contrast: Difference
    p: float | None = None

    @property
    def supported(self) -> bool:
        """Whether it is significant."""
        return self.p is not None and self.p < 1 - CONFIDENCE


@final
class Contributions:
    """One waterfall with the runs of its experiment.

    parts          in the order of the waterfall
    interactions   the largest first
    tested_parts   how many contributions p was corrected for: those of the page
    tested_pairs   the same for pairs of parts
    """

    def __init__(self, outcome: Outcome, waterfall: Waterfall) -> None:
        self.outcome, self.waterfall = outcome, waterfall
        self.parts: tuple[Contribution, ...] = ()
        self.interactions: tuple[PairEffect, ...] = ()
        self.tested_parts, self.tested_pairs = 0, 0
        if self.seeds:
            self.parts = tuple(
                Contribution(name, self._mean(weights)) for name, weights in waterfall.contributions.items()
            )
            self.interactions = self._interactions()

    @functools.cached_property
    def needed(self) -> tuple[str, ...]:
        """The cells that the numbers depend on; a cell on no admissible order is left out."""
        way = self.waterfall
        sums = [
            *way.contributions.values(),
            *(w for pair in way.interactions for w in (pair.alone, pair.beside)),
        ]
        return tuple(dict.fromkeys([way.start, way.end, *(cell for weights in sums for cell in weights)]))

    @functools.cached_property
    def diverged(self) -> dict[str, tuple[int, ...]]:
        """Needed cell → its seeds that diverged."""
        cells = {name: self.outcome.cells[name].diverged for name in self.needed}
        return {name: seeds for name, seeds in cells.items() if seeds}

    @functools.cached_property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that finished in every needed cell."""
        return self._seeds_of(self.needed)

    @property
    def incomplete(self) -> dict[int, list[str]]:
        """Seed that is left out → its cells that neither finished nor diverged."""
        left_out = [seed for seed in self.outcome.experiment.seeds if seed not in self._settled]
        return {seed: [cell for cell in self.needed if seed not in self._ended(cell)] for seed in left_out}

    @functools.cached_property
    def start(self) -> float:
        """Mean of the first cell, on the scale of differences."""
        return self._mean({self.waterfall.start: 1.0}).value

    @functools.cached_property
    def gap(self) -> Difference:
        """The last cell minus the first; the contributions add up to it."""
        return self._mean({self.waterfall.end: 1.0, self.waterfall.start: -1.0})

    def spread(self, cell: str) -> Spread | None:
        """Mean and standard deviation of a cell over the same seeds, on the metric's own scale."""
        values = self.outcome.cells[cell].values
        return Spread.of([values[seed] for seed in self._seeds_of([cell])])

    def _interactions(self) -> tuple[PairEffect, ...]:
        found = [
            PairEffect(
                pair,
                self._mean(pair.alone),
                self._mean(pair.beside),
                self._mean(pair.interaction_contrast),
            )
            for pair in self.waterfall.interactions
        ]
        return tuple(sorted(found, key=lambda effect: -abs(effect.interaction_contrast.value)))

    @functools.cached_property
    def _settled(self) -> set[int]:
        """Seeds with a result, finished or diverged, in every needed cell."""
        return set.intersection(*(self._ended(cell) for cell in self.needed))

    def _ended(self, cell: str) -> set[int]:
        found = self.outcome.cells[cell]
        return {*found.scaled, *found.diverged}

    def _seeds_of(self, cells: Iterable[str]) -> tuple[int, ...]:
        """Seeds that finished in these cells and have a result in every needed cell."""
        finished = [self.outcome.cells[cell].scaled for cell in cells]
        return tuple(seed for seed in sorted(self._settled) if all(seed in values for values in finished))

    def _mean(self, weights: Mapping[str, float]) -> Difference:
        """The sum over cells, seed by seed; a sum over a cell that diverged has no interval."""
        scaled = {cell: self.outcome.cells[cell].scaled for cell in weights}
        seeds = self._seeds_of(weights)
        sums = [sum(w * scaled[cell][seed] for cell, w in weights.items()) for seed in seeds]
        found = mean_of(sums, self.outcome.rounding(weights))
        return replace(found, error=None) if self.diverged.keys() & weights.keys() else found


def contributions(outcome: Outcome) -> list[Contributions]:
    """Every waterfall of an experiment in which at least one run finished or diverged; p is not known yet."""
    found = [Contributions(outcome, waterfall) for waterfall in outcome.experiment.waterfalls]
    return [each for each in found if each.seeds or each.diverged]


def correct_over_page(found: Sequence[Contributions]) -> None:
    """Set every p, corrected for all contributions and for all pairs of these waterfalls."""
    parts = _corrected([part.size for each in found for part in each.parts])
    pairs = _corrected([pair.interaction_contrast for each in found for pair in each.interactions])
    part_ps, pair_ps = iter(parts), iter(pairs)
    for each in found:
        each.parts = tuple(replace(part, p=next(part_ps)) for part in each.parts)
        each.interactions = tuple(replace(pair, p=next(pair_ps)) for pair in each.interactions)
        each.tested_parts, each.tested_pairs = len(parts), len(pairs)


def _corrected(differences: Sequence[Difference]) -> list[float | None]:
    """Two-sided p of each difference against zero, corrected for their number; None if untestable."""
    ps = holm([two_sided(difference) for difference in differences])
    return [p if each.is_tested else None for p, each in zip(ps, differences, strict=True)]
