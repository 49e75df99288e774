"""The learning rates of an experiment: the best of those tried, and the cost of a rate that is off.

Rates are tried in factors of two. A parabola through the best rate and its neighbours, over log₂ of the rate,
says how wide the range of good rates is and what half a step of the grid costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from maclaurin.report.outcome import Outcome
from maclaurin.study.run_record import CellTuning, Tuning

#: a rate is good if its value is within this share of the lowest
GOOD = 0.01


def tuning_sign(tuning: Tuning) -> float:
    """1 if a lower value of the metric is better, −1 if a higher one is."""
    return -1.0 if tuning.metric.endswith("accuracy") else 1.0


def best_rate(cell: CellTuning, sign: float) -> float | None:
    """The best of the rates tried, the cell's own if another is as good; None if none was tried."""
    values = trial_means(cell, sign)
    return min(values, key=lambda rate: (sign * values[rate], rate != cell.rate), default=None)


def has_factors(tuning: Tuning) -> bool:
    """Whether factors of the rate for the output projections were chosen too."""
    return any(cell.factor is not None for cell in tuning.cells.values())


def setting_means(cell: CellTuning, sign: float) -> dict[tuple[float, float], float]:
    """(rate, factor) → mean value over the tuning seeds; infinitely bad if a run diverged."""
    found: dict[tuple[float, float], list[float]] = {}
    for trial in cell.trials:
        value = sign * math.inf if trial.value is None else trial.value
        found.setdefault((trial.rate, trial.factor), []).append(value)
    return {setting: sum(values) / len(values) for setting, values in sorted(found.items())}


def trial_means(cell: CellTuning, sign: float) -> dict[float, float]:
    """Rate → mean over the tuning seeds, at the factor of the cell; infinitely bad if a run diverged."""
    own = 1.0 if cell.factor is None else cell.factor
    return {rate: value for (rate, factor), value in setting_means(cell, sign).items() if factor == own}


@final
@dataclass(frozen=True)
class Parabola:
    """curvature · (x − centre)² + lowest through three rates, x = log₂ of the rate; less is better.

    middle   x of the best rate; its neighbours are at middle ± 1
    """

    middle: float
    centre: float
    curvature: float
    lowest: float

    @property
    def half_step(self) -> float:
        """What being half a grid step (a factor of √2) away from the best rate costs."""
        return self.curvature / 4

    @property
    def is_wide(self) -> bool:
        """Whether the good range is wider than the three rates, so that its ends are not known."""
        return self._ends != self._clipped

    @property
    def good_range(self) -> tuple[float, float]:
        """(smallest, largest) rate whose value is within 1 % of the lowest, not beyond the three rates."""
        low, high = self._clipped
        return 2**low, 2**high

    @property
    def _ends(self) -> tuple[float, float]:
        half = math.sqrt(GOOD * abs(self.lowest) / self.curvature)
        return self.centre - half, self.centre + half

    @property
    def _clipped(self) -> tuple[float, float]:
        low, high = self._ends
        return max(low, self.middle - 1), min(high, self.middle + 1)


def parabola_at(values: dict[float, float], best: float | None, sign: float) -> Parabola | None:
    """The parabola through the best rate and its neighbours; None if a neighbour is missing or diverged."""
    if best is None or best not in values:
        return None
    near = [
        next((r for r in values if math.isclose(r, wanted)), None) for wanted in (best / 2, best, best * 2)
    ]
    below, here, above = (math.inf if rate is None else sign * values[rate] for rate in near)
    curvature, slope = (below + above) / 2 - here, (above - below) / 2
    if not math.isfinite(curvature) or curvature <= 0:
        return None
    middle = math.log2(best)
    return Parabola(middle, middle - slope / curvature / 2, curvature, here - slope**2 / curvature / 4)


def tuned_steps(outcome: Outcome, name: str) -> int | None:
    """The steps at which the rate of a cell was tuned, if its runs took another number of steps."""
    tuning, found = outcome.experiment.tuning, outcome.cells.get(name)
    if tuning is None or name not in tuning.cells or found is None or found.first is None:
        return None
    run = found.first.run
    steps = {
        round(trial.tokens * run.steps / run.tokens)  # tokens per step are the same
        for trial in tuning.cells[name].trials
        if trial.tokens is not None
    }
    return max(steps) if steps and steps != {run.steps} else None
