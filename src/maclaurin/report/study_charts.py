"""Every chart of a study."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import altair as alt

from maclaurin.report.anova import Factorial
from maclaurin.report.contributions import Contributions
from maclaurin.report.figure import INK, PALETTE, Figure, Row, Sheet, View
from maclaurin.report.formatting import plain
from maclaurin.report.ladder import UNDECIDED, Ladder
from maclaurin.report.learning_rates import has_factors, setting_means
from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.report.statistics import Difference, Spread
from maclaurin.report.study_tables import decimals_of
from maclaurin.report.verdict import difference_text
from maclaurin.study.run_record import FormsRecord, RunRecord

Points = list[tuple[float, float]]

PANEL = 330
HEIGHT = 230
ROW_HEIGHT = 20
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])
#: share of the first steps that the axis leaves out because of their steep descent
EARLY = 0.2
#: a point further away than this many times the width of most others is drawn at the edge of the axis
FAR = 3.0
#: how far the axis of a share goes beyond 0 and 1, so that points there are not cut
EDGE = 0.02
#: largest number of drawn points of a training curve
MOST_POINTS = 80


# ---------------------------------------------------------------------------------- small parts


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


def _picked() -> tuple[alt.Parameter, Any]:
    """Clicking a name in the legend fades the others."""
    pick = alt.selection_point(name="pick", fields=["name"], bind="legend")
    return pick, alt.when(pick)


def _core(points: Sequence[float]) -> tuple[float, float]:
    """The range of the points, without those far outside the middle two thirds."""
    known = sorted(point for point in points if math.isfinite(point))
    if not known:
        return 0.0, 1.0
    low, high = known[len(known) // 6], known[-1 - len(known) // 6]
    reach = FAR * (high - low) or math.inf
    kept = [point for point in known if low - reach <= point <= high + reach]
    return kept[0], kept[-1]


def _bar(low: float, high: float) -> Row:
    """Ends of an error bar. A bar of length zero is left out, as vl-convert cannot draw it as PDF."""
    return {"low": low, "high": high} if f"{low:.5g}" != f"{high:.5g}" else {"low": None, "high": None}


def _spread_bar(spread: Spread) -> Row:
    """One standard deviation up and down."""
    deviation = spread.deviation or 0.0
    return _bar(spread.mean - deviation, spread.mean + deviation)


def _padded(low: float, high: float, share: float = 0.06) -> list[float]:
    pad = share * (high - low) or abs(high) * 0.05 or 0.05
    return [low - pad, high + pad]


def _is_share(outcome: Outcome) -> bool:
    """Whether the metric lies between 0 and 1."""
    return outcome.experiment.scale == "logit"


def _value_domain(outcome: Outcome, values: Sequence[float]) -> list[float]:
    """The axis for values of the metric; that of a share ends just beyond 0 and 1."""
    low, high = _padded(*_range(values))
    return [max(low, -EDGE), min(high, 1 + EDGE)] if _is_share(outcome) else [low, high]


# ------------------------------------------------------------------------------------- the cells


def cells(outcome: Outcome) -> Figure | None:
    """Mean, standard deviation and seeds of each cell; its difference to the baseline with its interval."""
    names = [name for name in outcome.best_first() if outcome.cells[name].has_result]
    if not any(outcome.cells[name].values for name in names):
        return None
    sheet, size = Sheet(), {"width": PANEL - 20, "height": alt.Step(ROW_HEIGHT)}
    left = _means(sheet, outcome, names).properties(**size)
    right = _differences(sheet, outcome, names)
    return sheet.figure(left if right is None else alt.hconcat(left, right.properties(**size), spacing=18))


def _means(sheet: Sheet, outcome: Outcome, names: list[str]) -> View:
    spreads = [(name, spread) for name in names if (spread := outcome.cells[name].spread)]
    seeds = [
        {"name": name, "value": value} for name, _ in spreads for value in outcome.cells[name].values.values()
    ]
    domain = _padded(*_core([row["value"] for row in seeds]))
    if _is_share(outcome):
        domain = [max(domain[0], -EDGE), min(domain[1], 1 + EDGE)]
    means = [
        {
            "name": name,
            "value": min(max(spread.mean, domain[0]), domain[1]),
            **_spread_bar(spread),
            "mean": plain(spread.mean),
            "deviation": plain(spread.deviation),
            "seeds": ", ".join(plain(value) for value in outcome.cells[name].values.values()),
            "outside": not domain[0] <= spread.mean <= domain[1],
        }
        for name, spread in spreads
    ]
    scale = alt.Scale(domain=domain, zero=False, nice=False)
    x = alt.X("value:Q", scale=scale, title=f"{outcome.metric}: mean ± standard deviation, seeds as ticks")
    y = alt.Y("name:N", sort=names, title=None)
    colour = look_of(outcome).colour(legend=False)
    tooltip = [f"{key}:N" for key in ("name", "mean", "deviation", "seeds")]
    base = sheet.add(means)
    layers = [
        sheet.add(seeds).mark_tick(thickness=1.5, opacity=0.55, size=11, clip=True).encode(x, y, colour),
        base.mark_rule(strokeWidth=2, clip=True).encode(
            alt.X("low:Q", scale=scale, title=""), alt.X2("high:Q"), y, colour
        ),
        base.transform_filter("!datum.outside")
        .mark_circle(size=60, opacity=1)
        .encode(x, y, colour, tooltip=tooltip),
        base.transform_filter("datum.outside")
        .mark_text(fontSize=12, dx=-4)
        .encode(x, y, colour, text=alt.value("▸"), tooltip=tooltip),
    ]
    if outcome.baseline.spread is not None:
        layers.insert(0, _rule(sheet, outcome.baseline.spread.mean).encode(x))
    return alt.layer(*layers)


def _rule(sheet: Sheet, value: float) -> alt.Chart:
    """A dashed line across the chart."""
    chart = sheet.add([{"value": value, "y": value}])
    return chart.mark_rule(strokeDash=[4, 3], color=alt.ExprRef("ink"), opacity=0.7)


def _differences(sheet: Sheet, outcome: Outcome, names: list[str]) -> View | None:
    found = [
        (name, difference)
        for name in names
        if name != outcome.experiment.baseline
        and (difference := outcome.differences[name]) is not None
        and math.isfinite(difference.value)
    ]
    if not found:
        return None
    low, high = _core([0.0, *(difference.value for _, difference in found)])
    ends = [bounds for _, difference in found if (bounds := difference.bounds)]
    reach = 0.5 * (high - low)
    domain = _padded(
        min(low, max(min((b[0] for b in ends), default=low), low - reach)),
        max(high, min(max((b[1] for b in ends), default=high), high + reach)),
    )
    rows = [_difference_row(outcome, name, difference, domain) for name, difference in found]
    unit = f" ({outcome.difference_unit})" if outcome.difference_unit else ""
    title = f"minus {outcome.experiment.baseline}{unit}: mean difference, 95 % interval"
    scale = alt.Scale(domain=domain, zero=False, nice=False)
    hidden = alt.Axis(labels=False, ticks=False)
    y = alt.Y("name:N", sort=names, title=None, axis=hidden, scale=alt.Scale(domain=names))
    x = alt.X("value:Q", scale=scale, title=title)
    colour = look_of(outcome).colour(legend=False)
    base = sheet.add(rows)
    cuts = [
        base.transform_filter(f"datum.{end} !== null")
        .mark_text(fontSize=12, dx=shift)
        .encode(alt.X(f"{end}:Q", scale=scale, title=""), y, colour, text=alt.value(sign))
        for end, sign, shift in (("cut_low", "◂", 3), ("cut_high", "▸", -3))
    ]
    return alt.layer(
        _rule(sheet, 0.0).encode(x),
        base.mark_rule(strokeWidth=2, clip=True).encode(
            alt.X("low:Q", scale=scale, title=""), alt.X2("high:Q"), y, colour
        ),
        *cuts,
        base.transform_filter("!datum.outside")
        .mark_circle(size=60, opacity=1)
        .encode(x, y, colour, tooltip=[f"{key}:N" for key in ("name", "difference", "standing")]),
    )


def _difference_row(outcome: Outcome, name: str, difference: Difference, domain: list[float]) -> Row:
    """A row of the chart, clipped at the edges of the axis."""
    low, high = difference.bounds or (math.nan, math.nan)
    return {
        "name": name,
        "value": difference.value,
        **_bar(max(low, domain[0]), min(high, domain[1])),
        "cut_low": domain[0] if low < domain[0] else None,
        "cut_high": domain[1] if high > domain[1] else None,
        "difference": difference_text(difference),
        "standing": outcome.standing(name),
        "outside": not domain[0] <= difference.value <= domain[1],
    }


# ------------------------------------------------------------------------------------ the curves


def curves(outcome: Outcome) -> Figure | None:
    """Evaluations and training loss against the step: means, with seeds as thin lines."""
    sheet, panels = Sheet(), []
    held_out = _held_out(outcome)
    if held_out is not None:
        name, title = held_out
        panels.append(_curve_panel(sheet, outcome, name, title))
    if any("train_loss" in record.curves for record in outcome.records):
        panels.append(_curve_panel(sheet, outcome, "train_loss", "training loss", first=not panels))
    if not panels:
        return None
    shared = alt.hconcat(*panels, spacing=24).resolve_scale(color="shared", strokeDash="shared")
    return sheet.figure(shared)


def _held_out(outcome: Outcome) -> tuple[str, str] | None:
    """(curve, title) of the evaluations during training: on validation data if any, else on test data."""
    kind = "accuracy" if outcome.experiment.metric.endswith("accuracy") else "loss"
    names = {name for record in outcome.records for name in record.curves}
    for name, title in ((f"validation_{kind}", f"validation {kind}"), (kind, f"test {kind}")):
        if name in names:
            return name, title
    return None


def _curve_panel(sheet: Sheet, outcome: Outcome, curve: str, title: str, *, first: bool = True) -> View:
    return _lines(
        sheet,
        outcome,
        lambda _, record: _some([(float(step), value) for step, value in record.curves.get(curve, ())]),
        x=alt.X("x:Q", title="step", scale=alt.Scale(nice=False)),
        y=title,
        late="accuracy" not in curve,
        seeds=curve != "train_loss",
        first=first,
    )


def _some(points: Points) -> Points:
    """At most MOST_POINTS points of a curve: means of equal parts."""
    length = math.ceil(len(points) / MOST_POINTS)
    parts = [points[i : i + length] for i in range(0, len(points), length or 1)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def positions(outcome: Outcome) -> Figure | None:
    """Loss by position in the text, with gaps where nothing is scored."""
    scored = [x + 1 for record in outcome.records for x, y in record.loss_by_position if y is not None]
    if not scored:
        return None
    sheet = Sheet()
    domain = [0.97 * min(scored), 1.03 * max(scored)]
    view = _lines(
        sheet,
        outcome,
        lambda _, record: [(float(x + 1), math.nan if y is None else y) for x, y in record.loss_by_position],
        x=alt.X("x:Q", title="position", scale=alt.Scale(type="log", base=2, domain=domain, nice=False)),
        y="test loss",
        late=False,
        seeds=False,
        width=2 * PANEL,
    )
    return sheet.figure(view)


def compute(outcome: Outcome) -> Figure | None:
    """Evaluations against training FLOPs, if the cost of a step differs between cells."""
    held_out = _held_out(outcome)
    known = [cost for cell in outcome.cells.values() if (cost := cell.average("training_flops"))]
    if held_out is None or len(known) < 2 or max(known) / min(known) < 1.02:
        return None
    name, title = held_out

    def points(cell: CellOutcome, record: RunRecord) -> Points:
        flops = cell.average("training_flops")
        found = record.curves.get(name, ())
        return [(flops * step / record.run.steps, value) for step, value in found] if flops else []

    sheet = Sheet()
    scale = alt.Scale(type="log", nice=False)
    view = _lines(
        sheet,
        outcome,
        points,
        x=alt.X("x:Q", title="training FLOPs", scale=scale, axis=alt.Axis(format=".0e", tickCount=6)),
        y=title,
        late="accuracy" not in name,
        seeds=False,
        width=2 * PANEL,
    )
    return sheet.figure(view)


def _lines(
    sheet: Sheet,
    outcome: Outcome,
    points: Callable[[CellOutcome, RunRecord], Points],
    *,
    x: alt.X,
    y: str,
    late: bool,
    seeds: bool,
    width: int = PANEL,
    first: bool = True,
) -> View:
    """One line per cell; `late` fits the axis to the steps after the steep first fifth.

    Of several panels only the first defines the selection in the legend.
    """
    means: list[Row] = []
    single: list[Row] = []
    for name, cell in outcome.cells.items():
        lines = [(seed, record, points(cell, record)) for seed, record in cell.records.items()]
        means += [{"name": name, "x": a, "y": b} for a, b in _mean_curve(lines)]
        if seeds and len(lines) > 1:
            single += [{"name": name, "seed": s, "x": a, "y": b} for s, _, line in lines for a, b in line]
    finite = [(row["x"], row["y"]) for row in means if math.isfinite(row["y"])]
    domain = _late_domain(finite) if late else _padded(*_range([value for _, value in finite]))
    if "accuracy" in y:
        domain = [max(domain[0], -EDGE), min(domain[1], 1 + EDGE)]
    look, (pick, when) = look_of(outcome), _picked()
    up = alt.Y("y:Q", title=y, scale=alt.Scale(domain=domain, zero=False, nice=False))
    base = sheet.add(means)
    has_gaps = len(finite) < len(means)
    line = base.mark_line(clip=True, strokeWidth=2, point={"size": 14} if has_gaps else False).encode(
        x, up, look.colour(), look.dash(), opacity=when.then(alt.value(1)).otherwise(alt.value(0.08))
    )
    layers = [
        line.add_params(pick) if first else line,
        base.mark_point(clip=True, opacity=0, size=60, filled=True, aria=False).encode(
            x, up, look.colour(), tooltip=["name:N", "x:Q", alt.Tooltip("y:Q", format=".4f", title=y)]
        ),
    ]
    if single:
        fade = when.then(alt.value(0.35)).otherwise(alt.value(0.02))
        thin = sheet.add(single).mark_line(clip=True, strokeWidth=0.8)
        layers.insert(0, thin.encode(x, up, look.colour(), detail="seed:N", opacity=fade))
    return alt.layer(*layers).properties(width=width, height=HEIGHT)


def _mean_curve(lines: Sequence[tuple[int, RunRecord, Points]]) -> Points:
    """The mean at steps where every finished run has a value; unfinished runs are left out."""
    there = [(record, dict(line)) for _, record, line in lines if line]
    whole = [line for record, line in there if record.status == "finished"] or [line for _, line in there]
    if not whole:
        return []
    steps = sorted(set.intersection(*(set(line) for line in whole)))
    return [(step, sum(line[step] for line in whole) / len(whole)) for step in steps]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _extent(rows: Sequence[Row]) -> list[float]:
    """Points and the ends of their bars."""
    return [row[key] for row in rows for key in ("low", "y", "high") if row[key] is not None]


def _late_domain(points: Points) -> list[float]:
    """The range of the values after the first fifth of the steps."""
    first, last = _range([x for x, _ in points])
    return _padded(*_range([y for x, y in points if x >= first + EARLY * (last - first)]))


# ------------------------------------------------------------------------------------ the orders


@final
@dataclass(frozen=True)
class Family:
    """Cells that differ in their order only; one line of the chart of orders."""

    name: str
    cells: tuple[CellOutcome, ...]


def families(outcome: Outcome) -> list[Family]:
    """Cells with a finite order, grouped by the rest of their notation; empty with fewer than two orders."""
    ordered = [cell for cell in outcome.cells.values() if cell.order is not None and cell.values]
    if len({cell.order for cell in ordered}) < 2:
        return []
    groups: dict[str, list[CellOutcome]] = {}
    for cell in ordered:
        pattern = re.sub(r"\b(taylor|power|hermite)\((\d+)", r"\1(N", ", ".join(cell.attention))
        groups.setdefault(pattern, []).append(cell)
    return [Family(name, tuple(sorted(found, key=lambda c: c.order or 0))) for name, found in groups.items()]


def orders(outcome: Outcome) -> Figure | None:
    """The metric against the order, and against the bytes of the state."""
    groups = families(outcome)
    if not groups:
        return None
    rows = [
        {
            "name": group.name,
            "cell": cell.name,
            "order": cell.order,
            "state": cell.state_bytes if cell.state_bytes else None,
            "y": cell.spread.mean,
        }
        for group in groups
        for cell in group.cells
        if cell.spread is not None
    ]
    seeds = [{**row, "y": value} for row in rows for value in outcome.cells[row["cell"]].values.values()]
    sheet, look = Sheet(), Look(tuple(group.name for group in groups))
    baseline = outcome.baseline
    full = baseline.spread.mean if baseline.order is None and baseline.spread is not None else None
    values = [*(row["y"] for row in seeds), *([full] if full is not None else [])]
    up = alt.Scale(domain=_value_domain(outcome, values), zero=False, nice=False)
    linear, log = alt.Scale(padding=8, nice=False), alt.Scale(type="log", padding=8, nice=False)
    axes = {
        "order": alt.X("order:Q", title="order", scale=linear, axis=alt.Axis(tickMinStep=1)),
        "state": alt.X(
            "state:Q",
            title="bytes of state; softmax: keys and values at the trained length",
            scale=log,
            axis=alt.Axis(format="~s", tickCount=5),
        ),
    }
    panels = []
    for field, x in axes.items():
        base, points = (sheet.add(row for row in group if row[field] is not None) for group in (rows, seeds))
        panel = _order_panel(base, points, look, outcome, field, x, up)
        if full is not None:
            panel = alt.layer(panel, *_named_rule(sheet, full, outcome.experiment.baseline, up))
            if field == "state" and baseline.memory_bytes:
                point = sheet.add([{"state": baseline.memory_bytes, "y": full}])
                mark = point.mark_point(size=80, shape="diamond", filled=True, color=alt.ExprRef("ink"))
                panel = alt.layer(panel, mark.encode(x, alt.Y("y:Q", scale=up)))
        panels.append(panel.properties(width=PANEL - 10, height=HEIGHT))
    shared = alt.hconcat(*panels, spacing=24).resolve_scale(color="shared", strokeDash="shared")
    return sheet.figure(shared)


def memory(outcome: Outcome) -> Figure | None:
    """The metric against the bytes kept at the trained length: states, and keys and values of softmax."""
    cells = [cell for cell in outcome.cells.values() if cell.memory_bytes and cell.spread is not None]
    if len({cell.memory_bytes for cell in cells}) < 3:
        return None
    rows = [
        {"name": cell.name, "x": cell.memory_bytes, "y": cell.spread.mean if cell.spread else math.nan}
        for cell in cells
    ]
    seeds = [
        {"name": cell.name, "x": cell.memory_bytes, "y": value}
        for cell in cells
        for value in cell.values.values()
    ]
    sheet, look, (pick, when) = Sheet(), look_of(outcome), _picked()
    x = alt.X(
        "x:Q",
        title="bytes kept at the trained length",
        scale=alt.Scale(type="log", padding=12, nice=False),
        axis=alt.Axis(format="~s", tickCount=6),
    )
    scale = alt.Scale(domain=_value_domain(outcome, [row["y"] for row in seeds]), zero=False, nice=False)
    y = alt.Y("y:Q", title=outcome.metric, scale=scale)
    seen = when.then(alt.value(1)).otherwise(alt.value(0.08))
    tooltip = ["name:N", alt.Tooltip("x:Q", format=","), alt.Tooltip("y:Q", format=".4f")]
    view = alt.layer(
        sheet.add(seeds).mark_point(size=16).encode(x, y, look.colour(), opacity=seen),
        sheet.add(rows)
        .mark_circle(size=70)
        .encode(x, y, look.colour(), tooltip=tooltip, opacity=seen)
        .add_params(pick),
    )
    return sheet.figure(view.properties(width=2 * PANEL, height=HEIGHT + 20))


def _order_panel(
    base: alt.Chart, seeds: alt.Chart, look: Look, outcome: Outcome, field: str, x: alt.X, up: alt.Scale
) -> View:
    y, colour = alt.Y("y:Q", title=outcome.metric, scale=up), look.colour()
    tooltip = ["cell:N", alt.Tooltip(f"{field}:Q", format=","), alt.Tooltip("y:Q", format=".4f")]
    return alt.layer(
        base.mark_line(strokeWidth=1.8).encode(x, y, colour, look.dash()),
        seeds.mark_point(size=16, opacity=0.6).encode(x, y, colour),
        base.mark_circle(size=55, opacity=1).encode(x, y, colour, tooltip=tooltip),
    )


def _named_rule(sheet: Sheet, value: float, name: str, scale: alt.Scale) -> tuple[View, View]:
    """A dashed line with its name."""
    y = alt.Y("y:Q", scale=scale)
    label = sheet.add([{"y": value, "label": name}]).mark_text(
        align="left", baseline="bottom", dx=3, dy=-2, fontSize=10, color=alt.ExprRef("ink")
    )
    return _rule(sheet, value).encode(y), label.encode(y, x=alt.value(0), text="label:N")


def series_error(forms: FormsRecord) -> Figure | None:
    """Error of the series against its order."""
    rows = [
        {"order": row["order"], "error": row["error"]}
        for row in forms.series
        if row.get("error") is not None and math.isfinite(row["error"]) and row["error"] > 0
    ]
    if len(rows) < 2:
        return None
    sheet, ink = Sheet(), alt.ExprRef("ink")
    axis = alt.Axis(format=".0e", tickCount=6)
    base = sheet.add(rows).encode(
        alt.X("order:Q", title="order"),
        alt.Y("error:Q", title="relative error", scale=alt.Scale(type="log"), axis=axis),
    )
    tooltip = ["order:Q", alt.Tooltip("error:Q", format=".2e")]
    view = alt.layer(
        base.mark_line(color=ink, strokeWidth=1.8),
        base.mark_circle(color=ink, size=55, opacity=1).encode(tooltip=tooltip),
    )
    return sheet.figure(view.properties(width=PANEL + 60, height=HEIGHT - 20))


# ------------------------------------------------------------------------------------ the others


def learning_rates(outcome: Outcome) -> Figure | None:
    """The tuning runs: the value against the learning rate, with the chosen rate filled.

    Where factors for the output projections were chosen too, a second panel has the value against the factor
    at the chosen rate, and thin lines in the first are the rates at other factors.
    """
    tuning = outcome.experiment.tuning
    if tuning is None:
        return None
    rows = [
        {
            "name": name,
            "rate": rate,
            "factor": factor,
            "y": value,
            "chosen": rate == cell.rate and factor == (cell.factor or 1.0),
            "own_factor": factor == (cell.factor or 1.0),
            "own_rate": rate == cell.rate,
        }
        for name, cell in tuning.cells.items()
        for (rate, factor), value in setting_means(cell).items()
        if math.isfinite(value)
    ]
    if not rows:
        return None
    values = [row["y"] for row in rows]
    chosen = [row["y"] for row in rows if row["chosen"]] or values
    reach = max(max(chosen) - min(chosen), 0.05 * abs(min(chosen)))
    domain = _padded(max(min(values), min(chosen) - reach), min(max(values), max(chosen) + reach))
    title = tuning.metric.replace("_", " ")
    y = alt.Y("y:Q", title=title, scale=alt.Scale(domain=domain, zero=False, nice=False))
    sheet, look, (pick, when) = Sheet(), look_of(outcome), _picked()
    seen = when.then(alt.value(1)).otherwise(alt.value(0.08))
    faint = when.then(alt.value(0.35)).otherwise(alt.value(0.04))
    tooltip = [
        "name:N",
        alt.Tooltip("rate:Q", format=".3~g"),
        *([alt.Tooltip("factor:Q", format=".3~g", title="output factor")] if has_factors(tuning) else []),
        alt.Tooltip("y:Q", format=".4f", title=title),
    ]
    base = sheet.add(rows)

    def panel(axis: str, words: str, own: str) -> View:
        x = alt.X(
            f"{axis}:Q",
            title=words,
            scale=alt.Scale(type="log", base=2, nice=False, padding=8),
            axis=alt.Axis(values=sorted({row[axis] for row in rows}), format=".2~g"),
        )
        line = base.transform_filter(f"datum.{own}")
        return alt.layer(
            line.mark_line(clip=True, strokeWidth=1.6).encode(x, y, look.colour(), look.dash(), opacity=seen),
            line.mark_point(clip=True, size=25).encode(x, y, look.colour(), tooltip=tooltip, opacity=seen),
            base.transform_filter("datum.chosen")
            .mark_circle(clip=True, size=90)
            .encode(x, y, look.colour(), tooltip=tooltip, opacity=seen),
        )

    rates = panel("rate", "learning rate", "own_factor")
    if not has_factors(tuning):
        return sheet.figure(rates.add_params(pick).properties(width=2 * PANEL, height=HEIGHT + 20))
    others = (
        base.transform_filter("!datum.own_factor")
        .mark_line(clip=True, strokeWidth=0.8, point={"size": 12})
        .encode(alt.X("rate:Q"), y, look.colour(), detail="factor:N", tooltip=tooltip, opacity=faint)
    )
    panels = (
        alt.layer(rates, others).add_params(pick),
        panel("factor", "rate of the output projection over the learning rate", "own_rate"),
    )
    size = {"width": PANEL, "height": HEIGHT + 20}
    return sheet.figure(alt.hconcat(*(view.properties(**size) for view in panels), spacing=30))


def heatmaps(factorial: Factorial) -> Figure | None:
    """Mean of the metric for each pair of axes; deeper is better."""
    sheet = Sheet()
    pairs = itertools.combinations(factorial.axes, 2)
    found = [view for pair in pairs if (view := _heatmap(sheet, factorial, *pair))]
    return sheet.figure(alt.concat(*found, columns=2, spacing=30)) if found else None


def _heatmap(sheet: Sheet, factorial: Factorial, rows: str, columns: str) -> View | None:
    outcome, found = factorial.outcome, []
    for row, column in itertools.product(factorial.levels[rows], factorial.levels[columns]):
        mean, there, planned = factorial.mean_at({rows: row, columns: column})
        if mean is not None:
            text = plain(mean, decimals_of(outcome)) + ("" if there == planned else f" ({there}/{planned})")
            found.append({"row": row, "column": column, "mean": mean, "text": text})
    if not found:
        return None
    low, high = _range([cell["mean"] for cell in found])
    for cell in found:
        share = 0.5 if high == low else (cell["mean"] - low) / (high - low)
        cell["good"] = share if outcome.higher_is_better else 1 - share
    angled = alt.Axis(labelAngle=-25)
    x = alt.X("column:N", title=columns, sort=list(factorial.levels[columns]), axis=angled)
    y = alt.Y("row:N", title=rows, sort=list(factorial.levels[rows]))
    shade = alt.Color("good:Q", legend=None, scale=alt.Scale(scheme="blues", domain=[-0.15, 1.25]))
    label = alt.when("datum.good > 0.75").then(alt.value("white")).otherwise(alt.value(INK))
    base = sheet.add(found).encode(x, y)
    return alt.layer(
        base.mark_rect().encode(shade, tooltip=["row:N", "column:N", "text:N"]),
        base.mark_text(fontSize=10).encode(text="text:N", color=label),
    ).properties(width=alt.Step(64), height=alt.Step(26), title=f"{rows} × {columns}")


def waterfall(found: Contributions) -> Figure:
    """From the first cell to the last: a bar with its interval for each part, from where the last ended."""
    way, outcome = found.waterfall, found.outcome
    rows, at = [], found.start
    for part in found.parts:
        after, bounds = at + part.size.value, part.size.bounds
        helps = part.size.value * (1 if outcome.higher_is_better else -1) > 0
        rows.append(
            {
                "name": part.switch,
                "from": at,
                "to": after,
                **_bar(*((at + bounds[0], at + bounds[1]) if bounds else (after, after))),
                "kind": "undecided" if not part.supported else "better" if helps else "worse",
                "brings": difference_text(part.size),
            }
        )
        at = after
    ends = [
        {"name": way.start, "to": found.start, "brings": _end_text(found, way.start)},
        {"name": way.end, "to": at, "brings": _end_text(found, way.end)},
    ]
    names = [way.start, *(row["name"] for row in rows), way.end]
    low, high = _range(
        [row[key] for row in [*rows, *ends] for key in ("to", "low", "high") if row.get(key) is not None]
    )
    scale = alt.Scale(domain=_padded(low, high), zero=False, nice=False)
    unit = f" ({outcome.difference_unit})" if outcome.difference_unit else ""
    y = alt.Y("name:N", sort=names, title=None, scale=alt.Scale(domain=names))
    x = alt.X("to:Q", scale=scale, title=f"{outcome.metric}{unit}")
    kinds = ["better", "worse", "undecided"]
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[alt.ExprRef(name) for name in ("c2", "c1", "c4")]),
        legend=alt.Legend(orient="bottom", title=None),
    )
    sheet, tooltip = Sheet(), ["name:N", "brings:N"]
    bars, points = sheet.add(rows), sheet.add(ends)
    ink = alt.ExprRef("ink")
    texts = sheet.add([*ends[:1], *rows, *ends[1:]]).mark_text(align="left", fontSize=10, color=ink)
    view = alt.layer(
        bars.mark_bar(height=ROW_HEIGHT - 7, opacity=0.85).encode(
            alt.X("from:Q", scale=scale, title=f"{outcome.metric}{unit}"),
            alt.X2("to:Q"),
            y,
            colour,
            tooltip=tooltip,
        ),
        bars.mark_rule(strokeWidth=1.5, color=ink).encode(
            alt.X("low:Q", scale=scale, title=""), alt.X2("high:Q"), y
        ),
        points.mark_point(shape="diamond", filled=True, size=90, opacity=1, color=ink).encode(
            x, y, tooltip=tooltip
        ),
    ).properties(width=PANEL + 60, height=alt.Step(ROW_HEIGHT + 4))
    numbers = (
        texts.encode(alt.Y("name:N", sort=names, scale=alt.Scale(domain=names), axis=None), text="brings:N")
        .encode(x=alt.value(4))
        .properties(width=170, height=alt.Step(ROW_HEIGHT + 4), title="contribution, with its 95 % interval")
    )
    return sheet.figure(alt.hconcat(view, numbers, spacing=6))


def _end_text(found: Contributions, cell: str) -> str:
    spread = found.spread(cell)
    return "" if spread is None else f"{plain(spread.mean)} ± {plain(spread.deviation)}"


#: distance of neighbouring cells at one size, in doublings of the parameters: of means, of differences
CLOSE, APART = 0.035, 0.09
#: points of a drawn band
BAND_POINTS = 25


def ladder(found: Ladder) -> Figure:
    """The metric against the size with its fit; the difference to the baseline with its line and band."""
    sheet, look = Sheet(), look_of(found.first)
    left, right = _size_values(sheet, found, look), _size_gaps(sheet, found, look)
    size = {"width": PANEL, "height": HEIGHT + 90}
    both = alt.hconcat(left.properties(**size), right.properties(**size), spacing=24)
    return sheet.figure(both.resolve_scale(color="shared"))


def _beside(size: float, name: str, names: Sequence[str], distance: float) -> float:
    """The size, shifted so that cells at one size do not overlap."""
    return size * 2 ** (distance * (names.index(name) - (len(names) - 1) / 2))


def _size_axis(found: Ladder) -> alt.X:
    sizes = [rung.parameters for rung in found.rungs]
    reach = 2 ** (APART * (len(found.others) / 2 + 1))
    return alt.X(
        "x:Q",
        title="parameters",
        scale=alt.Scale(type="log", domain=[sizes[0] / reach, sizes[-1] * reach], nice=False),
        axis=alt.Axis(values=sizes, format=".2s"),
    )


def _size_values(sheet: Sheet, found: Ladder, look: Look) -> View:
    """Means with their spread on log axes, and the power law through all seeds."""
    rows = [
        {
            "name": name,
            "size": rung.name,
            "x": _beside(rung.parameters, name, found.cells, CLOSE),
            "y": spread.mean,
            **_spread_bar(spread),
        }
        for name in found.cells
        for rung in found.rungs
        if (spread := rung.outcome.cells[name].spread) is not None
    ]
    ends = [found.rungs[0].parameters, found.rungs[-1].parameters]
    lines = [
        {"name": name, "x": x, "y": math.exp(y)}
        for name, line in found.powers.items()
        if line is not None
        for x, (y, _, _) in zip(ends, line.at([math.log(x) for x in ends]), strict=True)
    ]
    values = [*_extent(rows), *(row["y"] for row in lines)]
    kind = "log" if lines and min(values) > 0 else "linear"
    scale = alt.Scale(type=kind, domain=_padded(*_range(values)), zero=False, nice=False)
    x, y = _size_axis(found), alt.Y("y:Q", title=found.first.metric, scale=scale, axis=alt.Axis(tickCount=6))
    low, colour, (pick, when) = alt.Y("low:Q", scale=scale, title=""), look.colour(), _picked()
    seen = when.then(alt.value(1)).otherwise(alt.value(0.08))
    tooltip = ["name:N", "size:N", alt.Tooltip("y:Q", format=".4f")]
    base = sheet.add(rows)
    return alt.layer(
        sheet.add(lines).mark_line(strokeWidth=1.6).encode(x, y, colour, opacity=seen).add_params(pick),
        base.mark_rule(strokeWidth=1.5).encode(x, low, alt.Y2("high:Q"), colour, opacity=seen),
        base.mark_circle(size=55).encode(x, y, colour, opacity=seen, tooltip=tooltip),
    )


def _size_gaps(sheet: Sheet, found: Ladder, look: Look) -> View:
    """Differences to the baseline with their intervals, the line through all seeds, and its band."""
    rows = [
        {
            "name": name,
            "size": rung.name,
            "x": _beside(rung.parameters, name, found.others, APART),
            "y": difference.value,
            **_bar(*(difference.bounds or (difference.value, difference.value))),
            "difference": difference_text(difference),
        }
        for name in found.others
        for rung in found.rungs
        if (difference := rung.outcome.differences[name]) is not None and math.isfinite(difference.value)
    ]
    bands = [row for name in found.others for row in _band(found, name)]
    inner = [0.0, *(row["y"] for row in rows), *_ends(bands)]
    low, high = _range(inner)
    reach = 0.5 * (high - low)
    outer = [value for value in _ends(rows) if low - reach <= value <= high + reach]
    scale = alt.Scale(domain=_padded(*_range([*inner, *outer]), 0.03), zero=False, nice=False)
    unit = f" ({found.first.difference_unit})" if found.first.difference_unit else ""
    x, y = _size_axis(found), alt.Y("y:Q", title=f"minus {found.baseline}{unit}", scale=scale)
    down, up = alt.Y("low:Q", scale=scale, title=""), alt.Y2("high:Q")
    colour, (_, when) = look.colour(), _picked()
    seen = when.then(alt.value(1)).otherwise(alt.value(0.08))
    faint = when.then(alt.value(0.1)).otherwise(alt.value(0.01))
    base, band = sheet.add(rows), sheet.add(bands)
    lines = [
        band.transform_filter(f"{sign}datum.decided")
        .mark_line(strokeWidth=width, strokeDash=dash)
        .encode(x, y, colour, opacity=seen)
        for sign, width, dash in (("", 2.6, [1, 0]), ("!", 1.3, [5, 3]))
    ]
    return alt.layer(
        _rule(sheet, 0.0).encode(y),
        band.mark_area(clip=True).encode(x, down, up, look.colour(), opacity=faint),
        *lines,
        base.mark_rule(strokeWidth=1.5, clip=True).encode(x, down, up, colour, opacity=seen),
        base.mark_circle(size=45).encode(
            x, y, colour, opacity=seen, tooltip=[f"{key}:N" for key in ("name", "size", "difference")]
        ),
    )


def _ends(rows: Sequence[Row]) -> list[float]:
    """Ends of bars and bands."""
    known = (row[end] for row in rows for end in ("low", "high"))
    return [value for value in known if value is not None and math.isfinite(value)]


def _band(found: Ladder, cell: str) -> list[Row]:
    """Points of the line of a cell, with its interval."""
    trend = found.trends[cell]
    if trend.line is None:
        return []
    low, high = trend.ends
    x = [low + (high - low) * place / (BAND_POINTS - 1) for place in range(BAND_POINTS)]
    decided = trend.direction != UNDECIDED
    return [
        {"name": cell, "x": 2**at, "y": y, "low": down, "high": up, "decided": decided}
        for at, (y, down, up) in zip(x, trend.line.at(x), strict=True)
    ]


def across(outcomes: Sequence[Outcome]) -> Figure | None:
    """The same cells over several experiments, if a study has three or more."""
    groups: dict[tuple[str, tuple[str, ...]], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.experiment.metric, tuple(outcome.cells)), []).append(outcome)
    same = max(groups.values(), key=len, default=[])
    rows = [
        {
            "name": name,
            "experiment": outcome.experiment.name,
            "y": spread.mean,
            **_spread_bar(spread),
        }
        for outcome in same
        for name, cell in outcome.cells.items()
        if (spread := cell.spread) is not None
    ]
    if len({row["experiment"] for row in rows}) < 3:
        return None
    sheet, look, (pick, when) = Sheet(), look_of(same[0]), _picked()
    seen = when.then(alt.value(1)).otherwise(alt.value(0.08))
    domain = _padded(*_range(_extent(rows)))
    scale = alt.Scale(domain=domain, zero=False, nice=False)
    order = [outcome.experiment.name for outcome in same]
    x = alt.X("experiment:N", sort=order, title=None, axis=alt.Axis(labelAngle=0))
    y = alt.Y("y:Q", title=same[0].metric, scale=scale)
    low = alt.Y("low:Q", scale=scale, title="")
    tooltip = ["name:N", "experiment:N", alt.Tooltip("y:Q", format=".4f")]
    base = sheet.add(rows)
    view = alt.layer(
        base.mark_line(strokeWidth=1.8)
        .encode(x, y, look.colour(), look.dash(), opacity=seen)
        .add_params(pick),
        base.mark_rule().encode(x, low, alt.Y2("high:Q"), look.colour(), opacity=seen),
        base.mark_circle(size=50).encode(x, y, look.colour(), opacity=seen, tooltip=tooltip),
    )
    return sheet.figure(view.properties(width=2 * PANEL, height=HEIGHT))
