"""Charts of orders: the metric against the order of the series, and the error of the series itself."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import final

import altair as alt

from maclaurin.report.chart_elements import HEIGHT, PANEL, Look, rule, value_domain
from maclaurin.report.figure import Figure, Sheet, View
from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.study.run_record import FormsRecord


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
    up = alt.Scale(domain=value_domain(outcome, values), zero=False, nice=False)
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
    return rule(sheet, value).encode(y), label.encode(y, x=alt.value(0), text="label:N")


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
