"""What the page's script draws, as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from maclaurin.report.analysis import families, full_kernels
from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.study.record import FormsRecord, RunRecord

Chart = dict[str, Any]
Points = list[tuple[float, float]]

#: colours of the palette in page.css, beside the ink that the baseline is drawn in
COLOURS = 7
#: with more cells than this, curves start with a few switched on
MOST_CURVES = 14


def style(outcome: Outcome) -> dict[str, dict[str, int]]:
    """Cell → its colour and dash, the same in every chart of an experiment; the baseline has colour −1."""
    others = [name for name in outcome.cells if name != outcome.experiment.baseline]
    looks = {name: {"colour": i % COLOURS, "dash": i // COLOURS} for i, name in enumerate(others)}
    return {**looks, outcome.experiment.baseline: {"colour": -1, "dash": 0}}


def dots(outcome: Outcome) -> Chart:
    """Mean and interval of each cell, and each seed."""
    looks, rows = style(outcome), []
    for name in outcome.best_first():
        cell, mean = outcome.cells[name], outcome.means[name]
        if not cell.has_result:
            continue
        rows.append(
            {
                "name": name,
                **looks[name],
                "mean": mean and mean.value,
                "low": mean and mean.low,
                "high": mean and mean.high,
                "seeds": [{"seed": seed, "value": value} for seed, value in cell.values.items()],
                "diverged": len(cell.diverged),
                "standing": outcome.standing(name),
            }
        )
    baseline = outcome.means[outcome.experiment.baseline]
    return {"kind": "dots", "x": outcome.metric, "rows": rows, "rule": baseline and baseline.value}


def curves(outcome: Outcome) -> Chart | None:
    """Test and training curves: a thick mean over thin seeds."""
    accuracy = outcome.higher_is_better
    kinds = [
        (
            f"test {'accuracy' if accuracy else 'loss'}",
            lambda run: [(p[0], p[2 if accuracy else 1]) for p in run.test_curve],
        ),
        ("training loss", lambda run: [(p[0], p[1]) for p in run.train_curve]),
    ]
    looks, series = style(outcome), []
    shown = _shown_first(outcome)
    for name in outcome.best_first():
        panels = [_panel(outcome.cells[name], points) for _, points in kinds]
        if any(panel["seeds"] for panel in panels):
            series.append({"name": name, **looks[name], "on": name in shown, "panels": panels})
    panels = [
        {"title": title, "x": "step", "y": title, "late": not (accuracy and place == 0)}
        for place, (title, _) in enumerate(kinds)
        if any(line["panels"][place]["seeds"] for line in series)
    ]
    if not panels:
        return None
    kept = [i for i, (title, _) in enumerate(kinds) if title in {panel["title"] for panel in panels}]
    for line in series:
        line["panels"] = [line["panels"][place] for place in kept]
    return {"kind": "lines", "panels": panels, "series": series}


def positions(outcome: Outcome) -> Chart | None:
    """Loss by position in the text."""
    looks, series = style(outcome), []
    shown = _shown_first(outcome)
    for name in outcome.best_first():
        panel = _panel(outcome.cells[name], lambda run: [(p[0] + 1, p[1]) for p in run.loss_by_position])
        if panel["seeds"]:
            series.append({"name": name, **looks[name], "on": name in shown, "panels": [panel]})
    if not series:
        return None
    axes = {"title": "loss by position", "x": "position", "y": "test loss", "xlog": True, "late": False}
    return {"kind": "lines", "panels": [axes], "series": series}


def orders(outcome: Outcome) -> Chart | None:
    """The metric against the order, and against the bytes of the state."""
    groups = families(outcome)
    if not groups:
        return None
    series = []
    for place, family in enumerate(groups):
        panels = [
            {"mean": [p for cell in family.cells if (p := _point(outcome, cell, x))], "seeds": []}
            for x in ("order", "state_bytes")
        ]
        look = {"colour": place % COLOURS, "dash": place // COLOURS}
        series.append({"name": family.name, **look, "on": True, "panels": panels})
    rules = []
    for cell in full_kernels(outcome):
        mean = outcome.means[cell.name]
        if mean is not None:
            rules.append({"name": cell.name, "value": mean.value, "low": mean.low, "high": mean.high})
    common = {"y": outcome.metric, "late": False, "rules": rules}
    panels = [
        {"title": f"{outcome.metric} against order", "x": "order", **common},
        {
            "title": f"{outcome.metric} against state",
            "x": "bytes of state",
            "xlog": True,
            "bytes": True,
            **common,
        },
    ]
    return {"kind": "lines", "markers": True, "panels": panels, "series": series}


def series_error(forms: FormsRecord) -> Chart | None:
    """Error of the series against its order."""
    points = sorted(
        (row["order"], row["error"])
        for row in forms.series
        if row.get("error") is not None and math.isfinite(row["error"]) and row["error"] > 0
    )
    if len(points) < 2:
        return None
    axes = {
        "title": "the series and softmax",
        "x": "order",
        "y": "relative error",
        "ylog": True,
        "late": False,
    }
    line = {
        "name": "taylor(N)/sum",
        "colour": -1,
        "dash": 0,
        "on": True,
        "panels": [{"mean": points, "seeds": []}],
    }
    return {"kind": "lines", "markers": True, "panels": [axes], "series": [line]}


def _shown_first(outcome: Outcome) -> set[str]:
    names = outcome.best_first()
    if len(names) <= MOST_CURVES:
        return set(names)
    with_runs = [name for name in names if outcome.cells[name].has_result]
    return {outcome.experiment.baseline, *with_runs[: MOST_CURVES - 8], *with_runs[-2:]}


def _panel(cell: CellOutcome, points: Any) -> dict[str, Any]:
    runs = [(run, _clean(points(run))) for run in cell.runs]
    lines = [(run, line) for run, line in runs if line]
    seeds = [{"seed": r.seed, "points": line, "diverged": r.status == "diverged"} for r, line in lines]
    return {"mean": _mean_curve(lines), "seeds": seeds}


def _clean(points: Iterable[Sequence[float]]) -> Points:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _mean_curve(lines: list[tuple[RunRecord, Points]]) -> Points:
    """Where every finished run has a value; runs that broke off have no part in it."""
    whole = [dict(line) for run, line in lines if run.status == "finished"]
    whole = whole or [dict(line) for _, line in lines]
    if not whole:
        return []
    steps = sorted(set.intersection(*(set(line) for line in whole)))
    return [(step, sum(line[step] for line in whole) / len(whole)) for step in steps]


def _point(outcome: Outcome, cell: CellOutcome, x: str) -> list[float | None] | None:
    place, mean = getattr(cell, x), outcome.means[cell.name]
    if place is None or mean is None or (x == "state_bytes" and place <= 0):
        return None
    return [place, mean.value, mean.low, mean.high]
