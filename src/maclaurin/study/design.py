"""What is asked: study = experiments, experiment = cells × seeds, cell = one point of the grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from maclaurin.errors import InputError
from maclaurin.study.claim import Claim

Settings = Mapping[str, Any]
Metric = Literal["test_loss", "accuracy"]


@final
@dataclass(frozen=True)
class Cell:
    """One point of a grid: its name in tables, its level on each axis, the keys it sets in a run's config."""

    name: str
    settings: Settings
    levels: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Experiment:
    """Cells compared with each other on one metric, each with every seed.

    name       used in claims and files
    title      one line for the page
    metric     test_loss (lower is better) or accuracy (higher is better)
    common     keys of the training config that all cells share
    cells      what differs
    seeds      the same seeds for every cell: differences are taken seed by seed
    baseline   the cell others are compared with
    axes       names of the factors of a factorial design, in order; empty where cells are a plain list
    """

    name: str
    title: str
    metric: Metric
    common: Settings
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    baseline: str
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"experiment {self.name!r} has two cells called {', '.join(twice)}.")
        if self.baseline not in names:
            raise InputError(
                f"experiment {self.name!r} compares with {self.baseline!r}, which is none of its cells: "
                f"{', '.join(names)}."
            )
        for cell in self.cells:
            missing = [axis for axis in self.axes if axis not in cell.levels]
            if missing:
                raise InputError(f"cell {cell.name!r} has no level on the axes {', '.join(missing)}.")

    def points(self) -> Iterator[tuple[Cell, int, dict[str, Any]]]:
        """(cell, seed, keys of the run's config), seed by seed, so that whole comparisons finish early."""
        for seed, cell in itertools.product(self.seeds, self.cells):
            yield cell, seed, {**self.common, **cell.settings, "seed": seed}


@final
@dataclass(frozen=True)
class Study:
    """A question and the runs that answer it.

    budget   what it takes, in words, as its README says
    claims   what the paper (or we) say should be seen; the report puts the runs beside each
    """

    name: str
    title: str
    question: str
    budget: str
    experiments: tuple[Experiment, ...]
    claims: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        names = [experiment.name for experiment in self.experiments]
        if len(set(names)) != len(names):
            raise InputError(f"study {self.name!r} has two experiments of one name: {', '.join(names)}.")
        cells = {e.name: {cell.name for cell in e.cells} for e in self.experiments}
        for claim in self.claims:
            unknown = sorted(set(claim.cells) - cells.get(claim.experiment, set()))
            if unknown:
                raise InputError(
                    f"a claim of study {self.name!r} speaks of {', '.join(unknown)} in experiment "
                    f"{claim.experiment!r}, which has no such cells."
                )


def cells_of(attention: Mapping[str, str], **settings: Any) -> tuple[Cell, ...]:
    """One cell per name → notation."""
    return tuple(Cell(name, {"attention": (text,), **settings}) for name, text in attention.items())


def grid(
    axes: Mapping[str, Mapping[str, str]],
    attention: Callable[[Mapping[str, str]], str],
    keep: Callable[[Mapping[str, str]], bool] = lambda levels: True,
) -> tuple[Cell, ...]:
    """The full factorial: one cell per combination of levels.

    `axes` maps axis → level → piece of notation; `attention` joins the pieces of one combination (axis →
    piece) into a notation; `keep` says which combinations (axis → level) exist.
    """
    cells = []
    for combination in itertools.product(*(tuple(levels) for levels in axes.values())):
        levels = dict(zip(axes, combination, strict=True))
        if keep(levels):
            pieces = {axis: axes[axis][level] for axis, level in levels.items()}
            cells.append(Cell(" ".join(combination), {"attention": (attention(pieces),)}, levels))
    return tuple(cells)
