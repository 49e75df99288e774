"""A study with everything a report says about it worked out once."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import final

from maclaurin.report.anova import Factorial
from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.report.verdict import Judgement, judge
from maclaurin.study.record import StudyRecord


@final
@dataclass(frozen=True, eq=False)
class Analysis:
    """Outcomes by experiment, factorials where there are axes, a judgement per claim."""

    study: StudyRecord

    @functools.cached_property
    def outcomes(self) -> dict[str, Outcome]:
        """Experiment → what became of it."""
        return {e.name: Outcome(e, self.study.runs) for e in self.study.experiments}

    @functools.cached_property
    def factorials(self) -> dict[str, Factorial]:
        """Experiments with two axes or more."""
        return {
            n: Factorial(o) for n, o in self.outcomes.items() if len(o.experiment.axes) >= 2 and o.fit.cells
        }

    @functools.cached_property
    def judgements(self) -> list[Judgement]:
        """One per claim, in the study's order."""
        return [judge(claim, self.outcomes) for claim in self.study.claims]


@final
@dataclass(frozen=True)
class Family:
    """Cells that differ in their order only; one line of the chart of orders."""

    name: str
    cells: tuple[CellOutcome, ...]


def families(outcome: Outcome) -> list[Family]:
    """The cells that hold a finite order, by what they share; empty where there are fewer than two orders."""
    ordered = [cell for cell in outcome.cells.values() if cell.order is not None and cell.values]
    if len({cell.order for cell in ordered}) < 2:
        return []
    groups: dict[str, list[CellOutcome]] = {}
    for cell in ordered:
        groups.setdefault(_family_name(outcome, cell), []).append(cell)
    return [
        Family(name, tuple(sorted(cells, key=lambda cell: cell.order or 0))) for name, cells in groups.items()
    ]


def full_kernels(outcome: Outcome) -> list[CellOutcome]:
    """The baseline's attention in every setting, where it holds all orders: the lines others approach."""
    baseline = outcome.cells.get(outcome.experiment.baseline)
    if baseline is None or baseline.order is not None:
        return []
    return [c for c in outcome.cells.values() if c.values and c.attention == baseline.attention]


def _family_name(outcome: Outcome, cell: CellOutcome) -> str:
    pattern = re.sub(r"\b(taylor|power|hermite)\((\d+)", r"\1(N", ", ".join(cell.attention))
    settings = [cell.levels[axis] for axis in _other_axes(outcome) if axis in cell.levels]
    return " · ".join([pattern, *settings])


def _other_axes(outcome: Outcome) -> list[str]:
    """Axes whose level is not settled by the attention, such as the number of pairs to recall."""
    found = []
    for axis in outcome.experiment.axes:
        levels: dict[tuple[str, ...], set[str]] = {}
        for cell in outcome.cells.values():
            if cell.runs:
                levels.setdefault(cell.attention, set()).add(cell.levels.get(axis, ""))
        if any(len(names) > 1 for names in levels.values()):
            found.append(axis)
    return found
