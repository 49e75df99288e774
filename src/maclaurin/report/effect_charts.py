"""Charts of what parts contribute: means for each pair of parts, and the way from one cell to another."""

from __future__ import annotations

import itertools

import altair as alt

from maclaurin.report.anova import Factorial
from maclaurin.report.cell_tables import decimals_of
from maclaurin.report.chart_elements import PANEL, ROW_HEIGHT, bar, low_and_high, padded
from maclaurin.report.contributions import Contributions
from maclaurin.report.figure import INK, Figure, Sheet, View
from maclaurin.report.formatting import plain
from maclaurin.report.verdict import difference_text


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
    low, high = low_and_high([cell["mean"] for cell in found])
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
                **bar(*((at + bounds[0], at + bounds[1]) if bounds else (after, after))),
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
    low, high = low_and_high(
        [row[key] for row in [*rows, *ends] for key in ("to", "low", "high") if row.get(key) is not None]
    )
    scale = alt.Scale(domain=padded(low, high), zero=False, nice=False)
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
