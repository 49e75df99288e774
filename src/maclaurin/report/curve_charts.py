"""Charts of curves: the loss during training, by training FLOPs, and by position in the text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import altair as alt

from maclaurin.report.chart_elements import EDGE, HEIGHT, PANEL, Points, look_of, low_and_high, padded, picked
from maclaurin.report.figure import Figure, Row, Sheet, View
from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.study.run_record import RunRecord

#: share of the first steps that the axis leaves out because of their steep descent
EARLY = 0.2

#: largest number of drawn points of a training curve
MOST_POINTS = 80


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
    domain = _late_domain(finite) if late else padded(*low_and_high([value for _, value in finite]))
    if "accuracy" in y:
        domain = [max(domain[0], -EDGE), min(domain[1], 1 + EDGE)]
    look, (pick, when) = look_of(outcome), picked()
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


def _late_domain(points: Points) -> list[float]:
    """The range of the values after the first fifth of the steps."""
    first, last = low_and_high([x for x, _ in points])
    return padded(*low_and_high([y for x, y in points if x >= first + EARLY * (last - first)]))
