"""Charts of the cells of an experiment: means and differences, memory, several experiments side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt

from maclaurin.report.chart_elements import (
    EDGE,
    HEIGHT,
    PANEL,
    ROW_HEIGHT,
    bar,
    extent,
    is_share,
    look_of,
    low_and_high,
    padded,
    picked,
    rule,
    spread_bar,
    value_domain,
)
from maclaurin.report.figure import Figure, Row, Sheet, View
from maclaurin.report.formatting import plain
from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import Difference
from maclaurin.report.verdict import difference_text

#: a point further away than this many times the width of most others is drawn at the edge of the axis
FAR = 3.0


def cells(outcome: Outcome) -> Figure | None:
    """Mean, standard deviation and seeds of each cell; its difference to the baseline with its interval."""
    names = [name for name in outcome.best_first() if outcome.cells[name].has_result]
    if not any(outcome.cells[name].values for name in names):
        return None
    sheet, size = Sheet(), {"width": PANEL - 20, "height": alt.Step(ROW_HEIGHT)}
    left = _means(sheet, outcome, names).properties(**size)
    right = _differences(sheet, outcome, names)
    return sheet.figure(left if right is None else alt.hconcat(left, right.properties(**size), spacing=18))


def _core(points: Sequence[float]) -> tuple[float, float]:
    """The range of the points, without those far outside the middle two thirds."""
    known = sorted(point for point in points if math.isfinite(point))
    if not known:
        return 0.0, 1.0
    low, high = known[len(known) // 6], known[-1 - len(known) // 6]
    reach = FAR * (high - low) or math.inf
    kept = [point for point in known if low - reach <= point <= high + reach]
    return kept[0], kept[-1]


def _means(sheet: Sheet, outcome: Outcome, names: list[str]) -> View:
    spreads = [(name, spread) for name in names if (spread := outcome.cells[name].spread)]
    seeds = [
        {"name": name, "value": value} for name, _ in spreads for value in outcome.cells[name].values.values()
    ]
    domain = padded(*_core([row["value"] for row in seeds]))
    if is_share(outcome):
        domain = [max(domain[0], -EDGE), min(domain[1], 1 + EDGE)]
    means = [
        {
            "name": name,
            "value": min(max(spread.mean, domain[0]), domain[1]),
            **spread_bar(spread),
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
        layers.insert(0, rule(sheet, outcome.baseline.spread.mean).encode(x))
    return alt.layer(*layers)


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
    domain = padded(
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
        rule(sheet, 0.0).encode(x),
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
        **bar(max(low, domain[0]), min(high, domain[1])),
        "cut_low": domain[0] if low < domain[0] else None,
        "cut_high": domain[1] if high > domain[1] else None,
        "difference": difference_text(difference),
        "standing": outcome.standing(name),
        "outside": not domain[0] <= difference.value <= domain[1],
    }


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
    sheet, look, (pick, when) = Sheet(), look_of(outcome), picked()
    x = alt.X(
        "x:Q",
        title="bytes kept at the trained length",
        scale=alt.Scale(type="log", padding=12, nice=False),
        axis=alt.Axis(format="~s", tickCount=6),
    )
    scale = alt.Scale(domain=value_domain(outcome, [row["y"] for row in seeds]), zero=False, nice=False)
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
            **spread_bar(spread),
        }
        for outcome in same
        for name, cell in outcome.cells.items()
        if (spread := cell.spread) is not None
    ]
    if len({row["experiment"] for row in rows}) < 3:
        return None
    sheet, look, (pick, when) = Sheet(), look_of(same[0]), picked()
    seen = when.then(alt.value(1)).otherwise(alt.value(0.08))
    domain = padded(*low_and_high(extent(rows)))
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
