"""The chart of a ladder of sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt

from maclaurin.report.chart_elements import (
    HEIGHT,
    PANEL,
    Look,
    bar,
    extent,
    look_of,
    low_and_high,
    padded,
    picked,
    rule,
    spread_bar,
)
from maclaurin.report.figure import Figure, Row, Sheet, View
from maclaurin.report.ladder import UNDECIDED, Ladder
from maclaurin.report.verdict import difference_text

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
            **spread_bar(spread),
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
    values = [*extent(rows), *(row["y"] for row in lines)]
    kind = "log" if lines and min(values) > 0 else "linear"
    scale = alt.Scale(type=kind, domain=padded(*low_and_high(values)), zero=False, nice=False)
    x, y = _size_axis(found), alt.Y("y:Q", title=found.first.metric, scale=scale, axis=alt.Axis(tickCount=6))
    low, colour, (pick, when) = alt.Y("low:Q", scale=scale, title=""), look.colour(), picked()
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
            **bar(*(difference.bounds or (difference.value, difference.value))),
            "difference": difference_text(difference),
        }
        for name in found.others
        for rung in found.rungs
        if (difference := rung.outcome.differences[name]) is not None and math.isfinite(difference.value)
    ]
    bands = [row for name in found.others for row in _band(found, name)]
    inner = [0.0, *(row["y"] for row in rows), *_ends(bands)]
    low, high = low_and_high(inner)
    reach = 0.5 * (high - low)
    outer = [value for value in _ends(rows) if low - reach <= value <= high + reach]
    scale = alt.Scale(domain=padded(*low_and_high([*inner, *outer]), 0.03), zero=False, nice=False)
    unit = f" ({found.first.difference_unit})" if found.first.difference_unit else ""
    x, y = _size_axis(found), alt.Y("y:Q", title=f"minus {found.baseline}{unit}", scale=scale)
    down, up = alt.Y("low:Q", scale=scale, title=""), alt.Y2("high:Q")
    colour, (_, when) = look.colour(), picked()
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
        rule(sheet, 0.0).encode(y),
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
