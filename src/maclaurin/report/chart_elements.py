"""What all charts of a study share: sizes, the look of each name, bars and axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import altair as alt

from maclaurin.report.figure import PALETTE, Row, Sheet
from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import Spread

Points = list[tuple[float, float]]

#: width and height of a chart, and the height of a row of bars
PANEL = 330
HEIGHT = 230
ROW_HEIGHT = 20
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])

#: how far the axis of a share goes beyond 0 and 1, so that points there are not cut
EDGE = 0.02


@final
@dataclass(frozen=True)
class Look:
    """Colour and dash of each name, the same in every chart of an experiment; ink for the baseline."""

    names: tuple[str, ...]
    baseline: str | None = None

    def colour(self, *, legend: bool = True) -> alt.Color:
        """The colour of each name; the palette repeats."""
        places = {name: place % len(PALETTE) for place, name in enumerate(self._others)}
        wanted = [alt.ExprRef("ink" if n == self.baseline else f"c{places[n]}") for n in self.names]
        scale = alt.Scale(domain=list(self.names), range=wanted)
        return alt.Color("name:N", legend=self._legend() if legend else None, scale=scale)

    def dash(self) -> alt.StrokeDash:
        """The dash of each name; a repeated palette is dashed."""
        rounds = {name: place // len(PALETTE) for place, name in enumerate(self._others)}
        wanted = [DASHES[rounds.get(name, 0) % len(DASHES)] for name in self.names]
        scale = alt.Scale(domain=list(self.names), range=wanted)
        return alt.StrokeDash("name:N", legend=self._legend(), scale=scale)

    @property
    def _others(self) -> list[str]:
        return [name for name in self.names if name != self.baseline]

    def _legend(self) -> alt.Legend | None:
        """The legend below the chart, if there is more than one name."""
        if len(self.names) < 2:
            return None
        return alt.Legend(
            orient="bottom", columns=5, symbolLimit=0, title=None, symbolType="stroke", symbolOpacity=1,
            symbolStrokeWidth=2.5,
        )  # fmt: skip


def look_of(outcome: Outcome) -> Look:
    """The look of the cells of an experiment."""
    return Look(tuple(outcome.cells), outcome.experiment.baseline)


def picked() -> tuple[alt.Parameter, Any]:
    """Clicking a name in the legend fades the others."""
    pick = alt.selection_point(name="pick", fields=["name"], bind="legend")
    return pick, alt.when(pick)


def bar(low: float, high: float) -> Row:
    """Ends of an error bar. A bar of length zero is left out, as vl-convert cannot draw it as PDF."""
    return {"low": low, "high": high} if f"{low:.5g}" != f"{high:.5g}" else {"low": None, "high": None}


def spread_bar(spread: Spread) -> Row:
    """One standard deviation up and down."""
    deviation = spread.deviation or 0.0
    return bar(spread.mean - deviation, spread.mean + deviation)


def padded(low: float, high: float, share: float = 0.06) -> list[float]:
    """An axis that goes a little beyond both ends."""
    pad = share * (high - low) or abs(high) * 0.05 or 0.05
    return [low - pad, high + pad]


def low_and_high(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest value; 0 and 1 if there is none."""
    return (min(values), max(values)) if values else (0.0, 1.0)


def extent(rows: Sequence[Row]) -> list[float]:
    """Points and the ends of their bars."""
    return [row[key] for row in rows for key in ("low", "y", "high") if row[key] is not None]


def is_share(outcome: Outcome) -> bool:
    """Whether the metric lies between 0 and 1."""
    return outcome.experiment.scale == "logit"


def value_domain(outcome: Outcome, values: Sequence[float]) -> list[float]:
    """The axis for values of the metric; that of a share ends just beyond 0 and 1."""
    low, high = padded(*low_and_high(values))
    return [max(low, -EDGE), min(high, 1 + EDGE)] if is_share(outcome) else [low, high]


def rule(sheet: Sheet, value: float) -> alt.Chart:
    """A dashed line across the chart."""
    chart = sheet.add([{"value": value, "y": value}])
    return chart.mark_rule(strokeDash=[4, 3], color=alt.ExprRef("ink"), opacity=0.7)
