"""The outcome of an experiment: its cells, and how two of them compare.

A run that diverged counts as the worst result, not as a missing one: if one cell diverged and the other did
not, the difference has no bound on the bad side.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, final

from maclaurin.report.statistics import Difference, Spread, margin_on_scale, paired, rounding_of, to_scale
from maclaurin.study.metrics import task_of
from maclaurin.study.run_record import CellRecord, ExperimentRecord, RunRecord, Speed, StudyRecord

Standing = Literal["baseline", "behind", "ahead", "undecided", "one seed", "not run"]


@final
@dataclass(frozen=True)
class CellOutcome:
    """The runs of one cell by seed, their values, and the seeds without a value.

    values     on the metric's own scale
    scaled     on the scale of differences
    rounding   what counting whole answers hides of each, as a standard deviation; 0 for other metrics
    """

    name: str
    levels: Mapping[str, str]
    records: Mapping[int, RunRecord]
    values: Mapping[int, float]
    scaled: Mapping[int, float]
    rounding: Mapping[int, float]
    diverged: tuple[int, ...]
    crashed: tuple[int, ...]
    speed: Speed | None = None

    @property
    def first(self) -> RunRecord | None:
        """Any of its runs, as they differ only in the seed; None if there is none."""
        return next(iter(self.records.values()), None)

    @property
    def attention(self) -> tuple[str, ...]:
        """Its notations, one per layer or one for all."""
        return self.first.run.attention if self.first else ()

    @property
    def order(self) -> int | None:
        """Highest power of the score in its kernel."""
        return self.first.order if self.first else None

    @property
    def state_bytes(self) -> int | None:
        """Size of its recurrent state."""
        return self.first.state_bytes if self.first else None

    @property
    def memory_bytes(self) -> int | None:
        """Bytes kept after a row of the trained length: the state, or keys and values; None if unknown."""
        if self.first is None:
            return None
        return self.first.state_bytes if self.first.memory_bytes is None else self.first.memory_bytes

    @property
    def tokens_per_second(self) -> float | None:
        """Training speed alone on a machine; None if it was measured neither so nor by a run on its own."""
        if self.speed is not None:
            return self.speed.tokens_per_second
        alone = [record for record in self.finished() if record.provenance.get("runs_at_once") == 1]
        known = [speed for record in alone if (speed := record.value("tokens_per_second")) is not None]
        return sum(known) / len(known) if known else None

    @property
    def has_result(self) -> bool:
        """Whether any run finished or diverged."""
        return bool(self.values or self.diverged)

    @functools.cached_property
    def spread(self) -> Spread | None:
        """Mean and standard deviation over the seeds that finished."""
        return Spread.of(list(self.values.values()))

    def finished(self) -> list[RunRecord]:
        """Runs that reached their last step."""
        return [record for record in self.records.values() if record.status == "finished"]

    def average(self, metric: str) -> float | None:
        """Mean of a recorded number over its finished runs."""
        known = [value for record in self.finished() if (value := record.value(metric)) is not None]
        return sum(known) / len(known) if known else None


@final
class Outcome:
    """One experiment and its runs."""

    def __init__(self, study: StudyRecord, experiment: ExperimentRecord) -> None:
        self.experiment = experiment
        self.cells = {cell.name: self._cell(cell, study.runs) for cell in experiment.cells}
        self.baseline = self.cells[experiment.baseline]

    @property
    def higher_is_better(self) -> bool:
        """True for accuracies, False for losses."""
        return self.experiment.higher_is_better

    @property
    def metric(self) -> str:
        """The title of the metric."""
        return self.experiment.metric_title

    @property
    def difference_unit(self) -> str:
        """The unit of differences; empty if it is the unit of the metric."""
        return {"logit": "log-odds", "log": "ln"}.get(self.experiment.scale, "")

    @property
    def records(self) -> tuple[RunRecord, ...]:
        """Every run of the experiment."""
        return tuple(record for cell in self.cells.values() for record in cell.records.values())

    @property
    def most_seeds(self) -> int:
        """The largest number of seeds of a cell."""
        return max((len(cell.values) for cell in self.cells.values()), default=0)

    @functools.cached_property
    def differences(self) -> dict[str, Difference | None]:
        """Cell → its difference to the baseline."""
        return {name: self.compare(name, self.experiment.baseline) for name in self.cells}

    def compare(self, cell: str, other: str) -> Difference | None:
        """Metric of cell − other, seed by seed; None if the cells share no seed, or if both diverged."""
        a, b = self.cells[cell], self.cells[other]
        known = paired(a.scaled, b.scaled, self.rounding({cell: 1.0, other: -1.0}))
        if bool(a.diverged) == bool(b.diverged):
            return known if not a.diverged else None
        worse = -1 if self.higher_is_better else 1
        good, bad, side = (b, a, worse) if a.diverged else (a, b, -worse)
        if not good.values:
            return None
        pairs = len(set(good.values) & {*bad.values, *bad.diverged})
        if not bad.values and pairs > 1:  # it diverged with every seed
            return Difference(side * math.inf, 0.0, pairs - 1, pairs, side)
        if known is None:
            return Difference(side * math.inf, None, 0, pairs, side)
        return Difference(known.value, known.error, known.df, known.n, side)

    def rounding(self, weights: Mapping[str, float]) -> float:
        """What counting whole answers hides of a sum over cells, as a standard deviation over seeds."""
        cells = [(weight, self.cells[name].rounding) for name, weight in weights.items()]
        seeds = set.intersection(*(set(found) for _, found in cells)) if cells else set()
        squares = [sum((weight * found[seed]) ** 2 for weight, found in cells) for seed in seeds]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    def worsening(self, difference: Difference) -> Difference:
        """The same difference, with the sign chosen so that more is worse."""
        return -difference if self.higher_is_better else difference

    def margin(self, reference: str, within: float) -> tuple[float, float]:
        """The margin ± within around a cell's mean, on the scale of differences."""
        cell = self.cells[reference]
        if cell.spread is None:
            return -within, within  # it diverged: every difference to it is infinite
        answers = None if cell.first is None else answers_of(cell.first, self.experiment.metric)
        return margin_on_scale(cell.spread.mean, within, self.experiment.scale, answers)

    def standing(self, cell: str) -> Standing:
        """How a cell compares with the baseline."""
        if not self.cells[cell].has_result:
            return "not run"
        if cell == self.experiment.baseline:
            return "baseline"
        return self.standing_of(self.differences[cell])

    def standing_of(self, difference: Difference | None) -> Standing:
        """The standing that follows from the 95 % interval of a difference."""
        if difference is None:
            return "undecided"
        bounds = self.worsening(difference).bounds
        if bounds is None:
            return "one seed" if difference.n < 2 else "undecided"
        if bounds[0] > 0:
            return "behind"
        return "ahead" if bounds[1] < 0 else "undecided"

    def best_first(self) -> list[str]:
        """Cells by their mean, cells that diverged after them, cells without results last."""
        return sorted(self.cells, key=self._rank)

    def _rank(self, name: str) -> tuple[int, float]:
        cell = self.cells[name]
        if not cell.has_result:
            return 2, 0.0
        mean = cell.spread.mean if cell.spread else 0.0
        return (1 if cell.diverged else 0), (-mean if self.higher_is_better else mean)

    def _cell(self, cell: CellRecord, runs: Mapping[str, RunRecord]) -> CellOutcome:
        records = {seed: runs[key] for seed, key in cell.runs.items() if key in runs}
        metric = self.experiment.metric
        values = {
            seed: value
            for seed, record in records.items()
            if record.status == "finished" and (value := record.value(metric)) is not None
        }
        scaled = {seed: self._on_scale(to_scale, value, records[seed]) for seed, value in values.items()}
        rounding = {seed: self._on_scale(rounding_of, value, records[seed]) for seed, value in values.items()}
        return CellOutcome(
            cell.name,
            cell.levels,
            records,
            values,
            scaled,
            rounding,
            diverged=tuple(seed for seed, record in records.items() if record.status == "diverged"),
            crashed=tuple(seed for seed, record in records.items() if record.status == "crashed"),
            speed=cell.speed,
        )

    def _on_scale(
        self, read: Callable[[float, str, float | None], float], value: float, record: RunRecord
    ) -> float:
        return read(value, self.experiment.scale, answers_of(record, self.experiment.metric))


def answers_of(record: RunRecord, metric: str) -> float | None:
    """The number of answers behind an accuracy; None if the run did not record it."""
    if (task := task_of(metric)) is not None:
        return record.provenance.get("tasks", {}).get(task, {}).get("questions")
    prefix = "validation_" if metric.startswith("validation_") else ""
    return record.metrics.get(f"{prefix}scored_tokens")
