"""The contribution of each part of a waterfall, with its interval, and which parts need each other.

A contribution is a weighted sum over cells (study/shapley.py). It is computed once per seed, from that seed's
runs in all of these cells, and its interval is Student's t over the seeds. A bootstrap does not work here:
from four seeds it draws at most 35 different samples, and its intervals are too narrow.

Signs of contributions and of interactions are tested two-sided, each family corrected by Holm's method.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import CONFIDENCE, Difference, Spread, holm, mean_of, two_sided
from maclaurin.study.shapley import Interaction, Waterfall


@final
@dataclass(frozen=True)
class Contribution:
    """Contribution of one switch, on the scale of differences; p is corrected (Holm), None with one seed."""

    switch: str
    size: Difference
    p: float | None

    @property
    def supported(self) -> bool:
        """Whether its sign is sure."""
        return self.p is not None and self.p < 1 - CONFIDENCE


@final
@dataclass(frozen=True)
class PairEffect:
    """How much more the second switch contributes with the first than alone; p is corrected (Holm)."""

    pair: Interaction
    alone: Difference
    beside: Difference
    interaction_contrast: Difference
    p: float | None

    @property
    def supported(self) -> bool:
        """Whether its sign is sure."""
        return self.p is not None and self.p < 1 - CONFIDENCE


@final
class Contributions:
    """One waterfall with the runs of its experiment."""

    def __init__(self, outcome: Outcome, waterfall: Waterfall) -> None:
        self.outcome, self.waterfall = outcome, waterfall

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
    def seeds(self) -> tuple[int, ...]:
        """Seeds that finished in every needed cell."""
        finished = [set(self.outcome.cells[cell].scaled) for cell in self.needed]
        return tuple(sorted(set.intersection(*finished)))

    @property
    def incomplete(self) -> dict[int, list[str]]:
        """Seed that is left out → its cells without a result."""
        left_out = [seed for seed in self.outcome.experiment.seeds if seed not in self.seeds]
        return {
            seed: [cell for cell in self.needed if seed not in self.outcome.cells[cell].scaled]
            for seed in left_out
        }

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
        return Spread.of([self.outcome.cells[cell].values[seed] for seed in self.seeds])

    @functools.cached_property
    def parts(self) -> tuple[Contribution, ...]:
        """In the order of the waterfall."""
        sizes = {name: self._mean(weights) for name, weights in self.waterfall.contributions.items()}
        ps = _corrected(list(sizes.values()))
        return tuple(Contribution(name, size, p) for (name, size), p in zip(sizes.items(), ps, strict=True))

    @functools.cached_property
    def interactions(self) -> tuple[PairEffect, ...]:
        """The largest first."""
        pairs = self.waterfall.interactions
        contrasts = [self._mean(pair.interaction_contrast) for pair in pairs]
        found = [
            PairEffect(pair, self._mean(pair.alone), self._mean(pair.beside), contrast, p)
            for pair, contrast, p in zip(pairs, contrasts, _corrected(contrasts), strict=True)
        ]
        return tuple(sorted(found, key=lambda effect: -abs(effect.interaction_contrast.value)))

    def _mean(self, weights: Mapping[str, float]) -> Difference:
        scaled = {cell: self.outcome.cells[cell].scaled for cell in weights}
        return mean_of([sum(w * scaled[cell][seed] for cell, w in weights.items()) for seed in self.seeds])


def contributions(outcome: Outcome) -> list[Contributions]:
    """Every waterfall of an experiment that at least one seed has finished."""
    found = [Contributions(outcome, waterfall) for waterfall in outcome.experiment.waterfalls]
    return [each for each in found if each.seeds]


def _corrected(differences: Sequence[Difference]) -> list[float | None]:
    """Two-sided p of each difference against zero, corrected for their number; None if untestable."""
    if not all(difference.is_tested for difference in differences):
        return [None] * len(differences)
    return list(holm([two_sided(difference) for difference in differences]))
