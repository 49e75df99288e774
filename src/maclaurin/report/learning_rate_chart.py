"""The chart of the tuning runs."""

from __future__ import annotations

import math

import altair as alt

from maclaurin.report.chart_elements import HEIGHT, PANEL, look_of, padded, picked
from maclaurin.report.figure import Figure, Sheet, View
from maclaurin.report.learning_rates import has_factors, setting_means, tuning_sign
from maclaurin.report.outcome import Outcome


def learning_rates(outcome: Outcome) -> Figure | None:
    """The tuning runs: the value against the learning rate, with the chosen rate filled.

    Where factors for the output projections were chosen too, a second panel has the value against the factor
    at the chosen rate, and thin lines in the first are the rates at other factors.
    """
    tuning = outcome.experiment.tuning
    if tuning is None:
        return None
    sign = tuning_sign(tuning)
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
        for (rate, factor), value in setting_means(cell, sign).items()
        if math.isfinite(value)
    ]
    if not rows:
        return None
    values = [row["y"] for row in rows]
    chosen = [row["y"] for row in rows if row["chosen"]] or values
    reach = max(max(chosen) - min(chosen), 0.05 * abs(min(chosen)))
    domain = padded(max(min(values), min(chosen) - reach), min(max(values), max(chosen) + reach))
    title = tuning.metric.replace("_", " ")
    y = alt.Y("y:Q", title=title, scale=alt.Scale(domain=domain, zero=False, nice=False))
    sheet, look, (pick, when) = Sheet(), look_of(outcome), picked()
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
