"""What the page's scripts draw, as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from maclaurin.inspection.schema import About, HeadRecord, Histogram, Inspection
from maclaurin.inspection.sharpness import SHARP_ORDER, error_at

#: orders whose error can be shown on the map, where they were tried
SHOWN_ERRORS = (2, 4, 8)


def heat_data(inspection: Inspection) -> dict[str, Any]:
    """Every head with all measures, and how each measure is shown."""
    measures = _measures(inspection)
    sharpest = max(inspection.heads, key=lambda head: error_at(head, SHARP_ORDER, "mean"))
    return {
        "layers": inspection.model.layers,
        "heads": inspection.model.heads,
        "highest": inspection.highest_order,
        "tolerance": inspection.tolerance,
        "chosen": [sharpest.layer, sharpest.head],
        "measures": [{key: value for key, value in each.items() if key != "of"} for each in measures],
        "cells": [_cell(head, measures) for head in inspection.heads],
    }


def order_chart(inspection: Inspection) -> dict[str, Any] | None:
    """Perplexity against order, about zero and about the mean, for the report's own script."""
    series, names = [], {"zero": "about zero", "mean": "about the row mean"}
    for place, (about, name) in enumerate(reversed(names.items())):
        points = [
            (row.order, row.perplexity)
            for row in inspection.perplexity
            if row.kind == "order" and row.about == about and _drawable(row.perplexity)
        ]
        if points:
            panel = {"mean": points, "seeds": []}
            series.append({"name": name, "colour": place, "dash": 0, "on": True, "panels": [panel]})
    own = inspection.own_perplexity()
    if not series:
        return None
    rule = {"name": "as it came", "value": own, "low": None, "high": None}
    axes = {
        "title": "perplexity against order",
        "x": "order",
        "y": "perplexity",
        "ylog": True,
        "late": False,
        "rules": [rule] if _drawable(own) else [],
    }
    return {"kind": "lines", "markers": True, "panels": [axes], "series": series}


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _measures(inspection: Inspection) -> list[dict[str, Any]]:
    highest = inspection.highest_order

    def needed(about: About) -> Callable[[HeadRecord], int | None]:
        return lambda head: head.order_needed(about, inspection.tolerance)

    def error(order: int) -> Callable[[HeadRecord], float | None]:
        return lambda head: head.error_about_mean[order]

    percent = f"{100 * inspection.tolerance:g} %"
    found: list[dict[str, Any]] = [
        {"title": f"order for {percent} error, about the row mean", "kind": "order", "of": needed("mean")},
        {"title": f"order for {percent} error, about zero", "kind": "order", "of": needed("zero")},
    ]
    found += [
        {"title": f"error at order {order}, about the row mean", "kind": "error", "of": error(order)}
        for order in SHOWN_ERRORS
        if order <= highest
    ]
    found += [
        {"title": "dominant order of the numerator", "kind": "whole", "of": lambda h: h.dominant_order},
        {"title": "mean score", "kind": "number", "of": lambda h: h.scores.mean},
        {"title": "deviation of all scores", "kind": "number", "of": lambda h: h.scores.deviation},
        {"title": "deviation within a row", "kind": "number", "of": lambda h: h.row_deviation},
        {"title": "least score", "kind": "number", "of": lambda h: h.scores.least},
        {"title": "largest score", "kind": "number", "of": lambda h: h.scores.largest},
        {"title": "sink mass", "kind": "share", "of": lambda h: h.sink_mass},
        {"title": "effective rank, order-1 state", "kind": "number", "of": lambda h: h.effective_rank_1},
        {"title": "effective rank, order-2 state", "kind": "number", "of": lambda h: h.effective_rank_2},
    ]
    return found


def _cell(head: HeadRecord, measures: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "at": [head.layer, head.head, head.kv_head],
        "values": [measure["of"](head) for measure in measures],
        "zero": head.error_about_zero,
        "mean": head.error_about_mean,
        "terms": head.terms,
        "scores": _bars(head.score_histogram),
        "rows": _bars(head.row_mean_histogram),
    }


def _bars(histogram: Histogram) -> dict[str, Any]:
    """Shares instead of counts."""
    total = max(sum(histogram.counts), 1)
    counts = [count / total for count in histogram.counts]
    return {"start": histogram.start, "width": histogram.width, "shares": counts}
