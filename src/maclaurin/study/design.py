"""The design of a study: it has experiments, an experiment has cells and seeds, a cell is one config."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from maclaurin.errors import InputError
from maclaurin.study.claims import AnyClaim
from maclaurin.study.metrics import (
    METRICS_OF_TEST_DATA,
    TASK,
    Metric,
    metric_named,
    require_recorded,
    task_of,
)
from maclaurin.study.shapley import Waterfall
from maclaurin.wording import listed_names

Settings = Mapping[str, Any]

#: cells of one experiment are compared, so these keys must be the same for all of them
DATA_KEYS = ("data", "tokenizer", "limit_documents", "test_fraction", "validation_fraction")
#: seeds of tuning runs; no final run has one of them
TUNING_SEED = 1000
PACKAGE = str(Path(__file__).parent)


def _where() -> str:
    """File and line of the calling code, for later error messages."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((PACKAGE, "<")):
            return f"{name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


@final
@dataclass(frozen=True)
class Cell:
    """One point of a grid: its name in tables, the config keys it sets, its level on each axis."""

    name: str
    settings: Settings
    levels: Mapping[str, str] = field(default_factory=dict)
    where: str = field(default_factory=_where, compare=False, repr=False, kw_only=True)


@final
@dataclass(frozen=True)
class Tune:
    """Each cell gets its own learning rate, chosen on validation data.

    rates    the first grid, each rate twice the one before; extended while the best rate is at its edge
    factors  the first grid of factors of the rate for the output projections of attention (`output_lr`), such
             as (0.25, 0.5, 1); searched at the best rate, then both until every neighbour is worse. Empty:
             the factor is not chosen
    metric   the number to choose by
    seeds    seeds of the tuning runs; the final runs have others
    confirm  further seeds for the two best settings, to decide between them by the mean
    most     limit on rates tried at one factor, and factors at one rate, if the best stays at the edge
    """

    rates: tuple[float, ...]
    factors: tuple[float, ...] = ()
    metric: str = "validation_loss"
    seeds: tuple[int, ...] = (TUNING_SEED,)
    confirm: tuple[int, ...] = ()
    most: int = 9

    def __post_init__(self) -> None:
        if metric_named(self.metric).name.startswith(TASK):
            raise InputError(
                f"tune cannot choose by {self.metric!r}: learning rates are chosen on validation data, and "
                "only the final runs have tasks. Use validation_loss."
            )
        if self.metric in METRICS_OF_TEST_DATA:
            raise InputError(
                f"tune cannot choose by {self.metric!r}: tuning runs do not use the test data. Use "
                f"validation_{self.metric}."
            )
        _check_seeds(self.seeds + self.confirm, "tune")
        if len(self.rates) < 2:
            raise InputError(
                f"tune needs a grid of at least two learning rates, got {self.rates!r}: with one rate there "
                "is nothing to choose. Set lr instead, or give rates=(1e-3, 2e-3, 4e-3)."
            )
        _check_grid(self.rates, "learning rates", "(1e-3, 2e-3, 4e-3)", self.most)
        if self.factors:
            self._check_factors()

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """Seeds of tuning runs, which no final run has."""
        return self.seeds + self.confirm

    @property
    def least_trials(self) -> int:
        """Number of runs in the first grids, a lower bound for the search."""
        return (len(self.rates) + max(0, len(self.factors) - 1)) * len(self.seeds)

    @property
    def keys(self) -> dict[str, str]:
        """Keys of the config that are chosen, and what they are called in errors."""
        factor = {"output_lr": "the factor of the output projection"} if self.factors else {}
        return {"lr": "the learning rate", **factor}

    def _check_factors(self) -> None:
        if len(self.factors) < 2:
            raise InputError(
                f"tune needs a grid of at least two factors, got {self.factors!r}: with one there is nothing "
                "to choose. Set output_lr instead, or give factors=(0.25, 0.5, 1)."
            )
        _check_grid(self.factors, "factors of the output projection", "(0.25, 0.5, 1)", self.most)
        if 1.0 not in self.factors:
            raise InputError(
                f"the grid of factors must contain 1, at which the rates are searched, got {self.factors!r}."
            )


@final
@dataclass(frozen=True)
class Carried:
    """Each cell gets a learning rate that follows from those tuned at other sizes: rate ∝ width^−p.

    For sizes at which a search costs too much. Rates stay in factors of two. The factor of the output
    projections, if it was tuned, is that of the last tuned experiment: what it makes up for is the size of a
    head's output, and heads have the same size in a ladder.

    tuned     names of experiments with the same cells and tune=Tune(…), the smallest size first; the rates
              come from the last one
    exponent  p; None: the one that suits most cells, from the rates of the first and the last of `tuned`
    tests     factors of the carried rate that are trained with the tuning seeds, 1 among them: the page says
              for which cells another is better. Empty: the rule is not tested here
    seeds     seeds of those runs
    halvings  how often a cell may be trained again at half the rate because a final run diverged; the page
              says where that happened
    """

    tuned: tuple[str, ...]
    exponent: float | None = None
    tests: tuple[float, ...] = (0.5, 1.0, 2.0)
    seeds: tuple[int, ...] = (TUNING_SEED,)
    halvings: int = 0

    def __post_init__(self) -> None:
        if self.halvings < 0:
            raise InputError(f"halvings is 0 or a count such as 2, got {self.halvings}.")
        if isinstance(self.tuned, str) or not self.tuned:
            raise InputError(f'tuned takes a tuple of names such as ("5m", "17m"), got {self.tuned!r}.')
        if self.exponent is None and len(self.tuned) < 2:
            raise InputError(
                f"rates of {listed_names(self.tuned)} alone do not say how they change with the width: name "
                "a second tuned experiment, or give exponent=1 for half the rate at twice the width."
            )
        if self.exponent is not None and not math.isfinite(self.exponent):
            raise InputError(f"exponent is a finite number such as 1, got {self.exponent!r}.")
        _check_seeds(self.seeds, "the test of carried rates")
        is_positive = all(math.isfinite(value) and value > 0 for value in self.tests)
        if self.tests and not (is_positive and 1.0 in self.tests and len(set(self.tests)) == len(self.tests)):
            raise InputError(
                "tests are different positive factors of the carried rate with 1 among them, such as "
                f"(0.5, 1, 2), got {self.tests!r}."
            )

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """Seeds of the runs that test the rule, which no final run has."""
        return self.seeds

    @property
    def least_trials(self) -> int:
        """Number of runs that test the rule for one cell."""
        return len(self.tests) * len(self.seeds)

    @property
    def keys(self) -> dict[str, str]:
        """Keys of the config that follow from the rule, and what they are called in errors."""
        return {"lr": "the learning rate", "output_lr": "the factor of the output projection"}


def _check_grid(values: tuple[float, ...], what: str, example: str, most: int) -> None:
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise InputError(f"{what} are positive numbers, got {values!r}.")
    steps = [high / low for low, high in itertools.pairwise(values)]
    if not all(math.isclose(step, 2.0, rel_tol=1e-6) for step in steps):
        raise InputError(f"tune takes a grid of {what} in factors of two, such as {example}, got {values!r}.")
    if most < len(values):
        raise InputError(f"most={most} allows fewer {what} than the grid of {len(values)}.")


@final
@dataclass(frozen=True)
class Tasks:
    """Offline tasks of `maclaurin eval` that the trained models of an experiment are tested on.

    names   without the prefix maclaurin_: lines_32, induction_16
    items   largest number of items of each task
    seed    seed of the items, which are the same for every cell and every training seed
    """

    names: tuple[str, ...]
    items: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not self.names:
            raise InputError(f'tasks takes a tuple of names such as ("lines_32",), got {self.names!r}.')
        if len(set(self.names)) < len(self.names):
            raise InputError(f"tasks names one task twice: {', '.join(self.names)}.")
        if self.items < 1 or self.seed < 0:
            raise InputError(
                f"tasks takes at least one item and a seed from 0 on, got {self.items} and {self.seed}."
            )


@final
@dataclass(frozen=True)
class Experiment:
    """Cells compared with each other on one metric, each with every seed.

    name       used in claims and files
    title      one line for the page
    metric     a name from metrics.METRICS such as loss or accuracy, or your own Metric
    common     keys of the training config that all cells share
    cells      what differs
    seeds      the same for every cell: differences are taken seed by seed
    baseline   the cell that others are compared with
    axes       names of the factors of a factorial design, in order; empty if cells are a plain list
    tune       how each cell gets its own learning rate: Tune searches, Carried takes it from other sizes;
               None: lr of the config
    equal      what is the same for all cells: steps; flops: training FLOPs, which determine the steps; state:
               the bytes kept at the trained length, which is checked (choose windows so that they are equal)
    waterfalls decompositions of the gap between two cells; the page draws the contribution of each part
    tasks      what the trained models are tested on; the metric task:lines_32 is the accuracy of one
    at_once    at most this many of its runs are trained at a time, because each needs much memory
    """

    name: str
    title: str
    metric: str | Metric
    common: Settings
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    baseline: str
    axes: tuple[str, ...] = ()
    tune: Tune | Carried | None = None
    equal: Literal["steps", "flops", "state"] = "steps"
    waterfalls: tuple[Waterfall, ...] = ()
    tasks: Tasks | None = None
    at_once: int | None = None
    where: str = field(default_factory=_where, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        require_recorded(self.measure)
        self._check_task()
        self._check_cells()
        _check_seeds(self.seeds, f"experiment {self.name!r}")
        if self.equal not in ("steps", "flops", "state"):
            raise InputError(f"experiment {self.name!r}: equal is steps, flops or state, got {self.equal!r}.")
        if self.at_once is not None and self.at_once < 1:
            raise InputError(f"experiment {self.name!r}: at_once is 1 or more, got {self.at_once}.")
        if self.tune is not None:
            self._check_tuning(self.tune)

    @property
    def measure(self) -> Metric:
        """The metric, with its direction and scale."""
        return metric_named(self.metric) if isinstance(self.metric, str) else self.metric

    def settings(self, cell: Cell) -> dict[str, Any]:
        """Keys of the config of one cell, without a seed."""
        return {**self.common, **cell.settings}

    def points(self) -> Iterator[tuple[Cell, int]]:
        """Every cell with every seed, ordered seed by seed so that complete comparisons finish early."""
        for seed, cell in itertools.product(self.seeds, self.cells):
            yield cell, seed

    def with_chosen(self, chosen: Mapping[str, Settings]) -> Experiment:
        """The same experiment with the chosen settings of each cell set and nothing to tune."""
        cells = tuple(
            dataclasses.replace(cell, settings={**cell.settings, **chosen[cell.name]}) for cell in self.cells
        )
        return dataclasses.replace(self, cells=cells, tune=None)

    def _check_task(self) -> None:
        task, asked = task_of(self.measure.name), self.tasks.names if self.tasks else ()
        if task is not None and task not in asked:
            raise InputError(
                f"experiment {self.name!r} compares {self.measure.name!r}, but its "
                f"tasks are {', '.join(asked) or 'none'}: add tasks=Tasks(({task!r},))."
            )

    def _check_cells(self) -> None:
        names = [cell.name for cell in self.cells]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"experiment {self.name!r} has two cells called {listed_names(twice)}.")
        if self.baseline not in names:
            raise InputError(
                f"experiment {self.name!r} compares with {self.baseline!r}, which is not one of its cells: "
                f"{listed_names(names)}."
            )
        for cell in self.cells:
            missing = [axis for axis in self.axes if axis not in cell.levels]
            if missing:
                raise InputError(f"cell {cell.name!r} has no level on the axes {', '.join(missing)}.")
        for way in self.waterfalls:
            unknown = sorted(set(way.cells) - set(names))
            if unknown:
                raise InputError(
                    f"waterfall {way.title!r} uses {listed_names(unknown)}, but experiment {self.name!r} "
                    f"has no such cell; it has {listed_names(names)}."
                )
        for key in DATA_KEYS:
            found = {str(self.settings(cell).get(key)) for cell in self.cells}
            if len(found) > 1:
                raise InputError(
                    f"experiment {self.name!r} has cells with different {key} ({', '.join(sorted(found))}), "
                    "whose results cannot be compared: make one experiment of each."
                )

    def _check_tuning(self, tune: Tune | Carried) -> None:
        both = sorted(set(self.seeds) & set(tune.all_seeds))
        if both:
            raise InputError(
                f"experiment {self.name!r} uses seed {both[0]} for tuning and for its result: the final runs "
                "need seeds that nothing was chosen with."
            )
        if isinstance(tune, Carried) and tune.halvings and self.tasks is not None:
            raise InputError(
                f"experiment {self.name!r} has tasks, which need the models of its final runs, and halvings="
                f"{tune.halvings}, which trains final runs before: remove halvings, or ask the tasks in "
                "another experiment."
            )
        for key, what in tune.keys.items():
            fixed = [cell.name for cell in self.cells if key in cell.settings]
            if key in self.common or fixed:
                place = f"cell {fixed[0]!r}" if fixed else "common"
                raise InputError(
                    f"experiment {self.name!r} tunes {what}, but {place} sets {key}: remove one of them."
                )


@final
@dataclass(frozen=True)
class Study:
    """A question and the runs that answer it.

    budget    its cost, in words, as in its README
    claims    expected results, the paper's or your own; the report tests each on the runs
    imports   modules, or files next to study.py, that define your own parts; every worker loads them
    ladder    names of experiments with the same cells at three sizes or more: the page fits lines over size
    file      the file that defines it
    """

    name: str
    title: str
    question: str
    budget: str
    experiments: tuple[Experiment, ...]
    claims: tuple[AnyClaim, ...] = ()
    imports: tuple[str, ...] = ()
    ladder: tuple[str, ...] = ()
    file: Path | None = field(default=None, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.experiments:
            raise InputError(f"study {self.name!r} has no experiment.")
        names = [experiment.name for experiment in self.experiments]
        if len(set(names)) != len(names):
            raise InputError(
                f"study {self.name!r} has two experiments with the same name: {', '.join(names)}."
            )
        cells = {e.name: {cell.name for cell in e.cells} for e in self.experiments}
        for claim in self.claims:
            if claim.experiment not in cells:
                raise InputError(
                    f"the claim {claim.says!r} is about experiment {claim.experiment!r}; study {self.name!r} "
                    f"has {', '.join(names)}."
                )
            unknown = sorted(set(claim.cells) - cells[claim.experiment])
            if unknown:
                raise InputError(
                    f"the claim {claim.says!r} is about {listed_names(unknown)}, but experiment "
                    f"{claim.experiment!r} has no such cell; it has "
                    f"{listed_names(sorted(cells[claim.experiment]))}."
                )
        for experiment in self.experiments:
            if isinstance(experiment.tune, Carried):
                self._check_carried(experiment, experiment.tune)
        if self.ladder:
            self._check_ladder()

    def _check_carried(self, experiment: Experiment, carried: Carried) -> None:
        """Raise unless the experiments that the rates come from are searched and have the same cells."""
        known = {e.name: e for e in self.experiments}
        for name in carried.tuned:
            if name not in known or not isinstance(known[name].tune, Tune):
                searched = [e.name for e in self.experiments if isinstance(e.tune, Tune)]
                raise InputError(
                    f"experiment {experiment.name!r} takes its learning rates from {name!r}, which is no "
                    f"experiment of study {self.name!r} with tune=Tune(…); those are "
                    f"{', '.join(searched) or 'none'}."
                )
            there = {cell.name: known[name].settings(cell).get("attention") for cell in known[name].cells}
            for cell in experiment.cells:
                if there.get(cell.name) != experiment.settings(cell).get("attention"):
                    raise InputError(
                        f"experiment {experiment.name!r} takes its learning rates from {name!r}, which has "
                        f"no cell {cell.name!r} with the same attention."
                    )

    def _check_ladder(self) -> None:
        """Raise unless the ladder names three experiments or more that compare the same cells."""
        known = {experiment.name: experiment for experiment in self.experiments}
        if isinstance(self.ladder, str):
            raise InputError(f'ladder takes a tuple of names such as ("5m", "17m"), got {self.ladder!r}.')
        unknown = [name for name in self.ladder if name not in known]
        if unknown:
            raise InputError(
                f"the ladder of study {self.name!r} names {', '.join(unknown)}, but the study has no such "
                f"experiment; it has {', '.join(known)}."
            )
        if len(set(self.ladder)) < max(len(self.ladder), MIN_LADDER_SIZES):
            raise InputError(
                f"a ladder needs {MIN_LADDER_SIZES} different experiments or more, got "
                f"{', '.join(self.ladder)}: a line through two points always fits."
            )
        first, *others = (known[name] for name in self.ladder)
        for other in others:
            differing = [what for what, read in SAME_ON_A_LADDER.items() if read(first) != read(other)]
            if differing:
                raise InputError(
                    f"the ladder of study {self.name!r} joins {first.name!r} and {other.name!r}, which "
                    f"differ in their {' and '.join(differing)}: experiments of a ladder compare the same "
                    "cells on the same metric, only their size differs."
                )

    @property
    def run_count(self) -> int:
        """Number of distinct runs: experiments that differ only in their metric share runs."""
        return len(
            {
                repr((sorted(e.settings(cell).items()), seed, e.tune, e.equal, e.tasks))
                for e in self.experiments
                for cell, seed in e.points()
            }
        )


#: two points always fit a line
MIN_LADDER_SIZES = 3
#: what all experiments of a ladder share
SAME_ON_A_LADDER: dict[str, Callable[[Experiment], object]] = {
    "cells": lambda e: {cell.name: e.settings(cell).get("attention") for cell in e.cells},
    "metric": lambda e: e.measure,
    "baseline": lambda e: e.baseline,
}


def _check_seeds(seeds: tuple[int, ...], place: str) -> None:
    if not seeds:
        raise InputError(
            f"{place} has seeds=(), so there is nothing to train: give some, such as seeds=(0, 1, 2)."
        )
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if twice:
        raise InputError(
            f"{place} has seed {twice[0]} twice: the same run again adds nothing. Use different seeds."
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
    piece) into a notation; `keep` selects combinations (axis → level), all by default.
    """
    cells = []
    for combination in itertools.product(*(tuple(levels) for levels in axes.values())):
        levels = dict(zip(axes, combination, strict=True))
        if keep(levels):
            pieces = {axis: axes[axis][level] for axis, level in levels.items()}
            cells.append(Cell(" ".join(combination), {"attention": (attention(pieces),)}, levels))
    return tuple(cells)
