"""Figures for a paper, as SVG and PDF. The only file of the report that needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from maclaurin.report import charts
from maclaurin.report.analysis import Analysis
from maclaurin.report.anova import Factorial
from maclaurin.report.numbers import plain
from maclaurin.report.outcome import Outcome
from maclaurin.report.sections import slug
from maclaurin.report.tables import decimals_of

#: Okabe and Ito's palette as in page.css, for white paper
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b8579b", "#c88a00", "#3a9bd9", "#7a6a00")
INK = "#1b1f24"
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,
    "svg.hashsalt": "maclaurin",
}
WIDTH = 6.5


def draw_all(analyses: list[Analysis], folder: Path) -> None:
    """Every figure of every study, named after study, experiment and what it shows."""
    folder.mkdir(parents=True)
    with matplotlib.rc_context(STYLE):
        studies = [analysis.study.name for analysis in analyses]
        for place, analysis in enumerate(analyses):
            twice = studies.count(studies[place]) > 1
            study = f"{studies[place]} {place + 1}" if twice else studies[place]
            for name, figure in _figures(analysis):
                stem = folder / slug(f"{study} {name}")
                figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
                figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None})


def _figures(analysis: Analysis) -> Iterator[tuple[str, Figure]]:
    forms = analysis.study.forms
    if forms is not None and (chart := charts.series_error(forms)):
        yield "series", _lines(chart)
    for name, outcome in analysis.outcomes.items():
        if outcome.fit.cells:
            yield f"{name} parts", _dots(outcome)
        for title, chart in (
            ("curves", charts.curves(outcome)),
            ("orders", charts.orders(outcome)),
            ("positions", charts.positions(outcome)),
        ):
            if chart is not None:
                yield f"{name} {title}", _lines(chart)
        if (factorial := analysis.factorials.get(name)) is not None:
            yield f"{name} interactions", _heatmaps(factorial)


def _colour(look: dict[str, Any]) -> str:
    return INK if look["colour"] < 0 else PALETTE[look["colour"]]


def _dots(outcome: Outcome) -> Figure:
    rows = charts.dots(outcome)["rows"]
    figure = Figure(figsize=(WIDTH, 0.7 + 0.22 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        colour = _colour(row)
        values = [seed["value"] for seed in row["seeds"]]
        axes.plot(values, [place] * len(values), "|", color=colour, alpha=0.5)
        if row["mean"] is not None:
            axes.plot(row["mean"], place, "o", color=colour, markersize=4)
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place, place], "-", color=colour)
        if row["diverged"]:
            note = f"{row['diverged']} diverged"
            axes.annotate(note, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=7)
    rule = charts.dots(outcome)["rule"]
    if rule is not None:
        axes.axvline(rule, color=INK, linewidth=0.7, linestyle="--", zorder=0)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(outcome.metric)
    return figure


def _lines(chart: charts.Chart) -> Figure:
    panels, lines = chart["panels"], chart["series"]
    named = len(lines) > 1
    height = 2.7 + (0.16 * -(-len(lines) // 4) if named else 0)
    figure = Figure(figsize=(WIDTH if len(panels) > 1 else WIDTH * 0.7, height), layout="constrained")
    for place, axis in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for line in lines:
            _line(axes, line, line["panels"][place], chart.get("markers", False))
        for rule in axis.get("rules", ()):
            axes.axhline(rule["value"], color=INK, linewidth=0.9, linestyle="--", zorder=0)
            edge = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 7}
            axes.annotate(rule["name"], (0.02, rule["value"]), **edge)
        if axis.get("xlog"):
            axes.set_xscale("log", base=2)
        if axis.get("ylog"):
            axes.set_yscale("log")
        if axis.get("late"):
            _zoom(axes, lines, place)
        axes.set_xlabel(axis["x"])
        axes.set_ylabel(axis["y"])
    if named:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=4)
    return figure


def _line(axes: Any, line: dict[str, Any], panel: dict[str, Any], markers: bool) -> None:
    colour, dash = _colour(line), DASHES[line["dash"] % len(DASHES)]
    for seed in panel["seeds"]:
        if len(panel["seeds"]) > 1 or not panel["mean"]:
            axes.plot(*zip(*seed["points"], strict=True), color=colour, linewidth=0.5, alpha=0.35)
    mean = panel["mean"]
    marker = MARKERS[line["colour"]] if markers or len(mean) == 1 else ""
    xs, ys = [point[0] for point in mean], [point[1] for point in mean]
    axes.plot(xs, ys, color=colour, linestyle=dash, marker=marker, markersize=4, label=line["name"])
    for point in mean:
        if len(point) > 2 and point[2] is not None:
            axes.plot([point[0]] * 2, point[2:4], color=colour, linewidth=1)


def _zoom(axes: Any, lines: list[dict[str, Any]], place: int) -> None:
    """The part of the curves that differs: what lies after the first fifth of the steps."""
    points = [point for line in lines for point in line["panels"][place]["mean"]]
    if not points:
        return
    first, last = min(p[0] for p in points), max(p[0] for p in points)
    values = [p[1] for p in points if p[0] >= first + 0.2 * (last - first)]
    pad = 0.05 * (max(values) - min(values)) or 0.05
    axes.set_ylim(min(values) - pad, max(values) + pad)


def _heatmaps(factorial: Factorial) -> Figure:
    pairs = [(a, b) for i, a in enumerate(factorial.axes) for b in factorial.axes[i + 1 :]]
    tallest = max(len(factorial.levels[a]) for a, _ in pairs)
    width = min(WIDTH, 0.8 + 0.75 * sum(len(factorial.levels[b]) + 1.2 for _, b in pairs))
    figure = Figure(figsize=(width, 1.0 + 0.35 * tallest), layout="constrained")
    decimals = decimals_of(factorial.outcome)
    for place, (rows, columns) in enumerate(pairs):
        axes = figure.add_subplot(1, len(pairs), place + 1)
        means = np.array(
            [
                [factorial.mean_at({rows: r, columns: c})[0] for c in factorial.levels[columns]]
                for r in factorial.levels[rows]
            ],
            dtype=float,
        )
        better = "Blues" if factorial.outcome.higher_is_better else "Blues_r"
        low, high = np.nanmin(means), np.nanmax(means)
        axes.imshow(means, cmap=better, vmin=low - 0.2 * (high - low), vmax=high + 0.2 * (high - low))
        for (i, j), value in np.ndenumerate(means):
            shade = (value - low) / ((high - low) or 1)
            dark = shade > 0.7 if factorial.outcome.higher_is_better else shade < 0.3
            text = plain(float(value), decimals)
            axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color="white" if dark else INK)
        axes.set_xticks(range(means.shape[1]), factorial.levels[columns], rotation=30, ha="right")
        axes.set_yticks(range(means.shape[0]), factorial.levels[rows])
        axes.grid(visible=False)
        axes.set_title(f"{rows} × {columns}")
    return figure
