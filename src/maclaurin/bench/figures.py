"""Time and memory against T, the length from which the linear form is faster, and the roofline; as SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from maclaurin.bench.bench_record import BenchRecord, CaseRecord, Figures
from maclaurin.report.figure import DASHES, INK, MARKERS, PALETTE, STYLE, WIDTH

#: T → a value
Curve = dict[int, float]
PARALLEL, CHUNKED = "taylor(2)/sum, all pairs", "taylor(2)/sum, linear time"


def draw_figures(record: BenchRecord, folder: Path) -> tuple[list[Path], list[str]]:
    """The files that were written, and messages about figures that could not be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    written, missing = [], []
    with matplotlib.rc_context(STYLE):
        for name, draw in _FIGURES.items():
            figure = draw(record)
            if figure is None:
                missing.append(f"{name}.svg is not drawn: the cases it shows were not measured.")
                continue
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            written.append(path)
    return written, missing


def crossing(quadratic: Curve, linear: Curve) -> float | None:
    """The T from which the linear curve stays below the quadratic one; None if it never does.

    Between measured lengths, both are interpolated as powers of T: straight lines in logarithms.
    """
    lengths = sorted(set(quadratic) & set(linear))
    gaps = [(t, math.log(linear[t] / quadratic[t])) for t in lengths]
    if not gaps or gaps[-1][1] >= 0:
        return None
    for (t, gap), (later, later_gap) in reversed(list(itertools.pairwise(gaps))):
        if gap >= 0:
            return t * (later / t) ** (gap / (gap - later_gap))
    return None


def curves_of(record: BenchRecord, value: Callable[[Figures], float | None]) -> dict[str, Curve]:
    """A curve against T for every case of the sweep."""
    curves: dict[str, Curve] = {}
    for case in record.cases:
        if not case.in_sweep:
            continue
        named = [(_name_of(case), case.own)]
        if case.spec == "exp/sum":
            named += [(peer.name, peer) for peer in case.peers.values()]
        for name, figures in named:
            if (found := value(figures)) is not None:
                curves.setdefault(name, {})[case.size.tokens] = found
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _name_of(case: CaseRecord) -> str:
    return {"parallel": PARALLEL, "chunked": CHUNKED}.get(case.asked_form, case.spec)


def _place_of(name: str) -> int:
    """Order of the curves, and so their colours, in every figure; peers come last."""
    known = (CHUNKED, PARALLEL, "exp/sum")
    return known.index(name) if name in known else len(known)


# ------------------------------------------------------------------------------------ the four figures


def _time(record: BenchRecord) -> Figure | None:
    curves = curves_of(record, lambda figures: figures.forward_backward_ms)
    return _against_length(curves, "forward+backward, ms") if curves else None


def _memory(record: BenchRecord) -> Figure | None:
    curves = curves_of(record, _megabytes)
    return _against_length(curves, "extra memory, MB") if curves else None


def _megabytes(figures: Figures) -> float | None:
    return None if figures.peak_bytes is None else figures.peak_bytes / 1e6


def _crossover(record: BenchRecord) -> Figure | None:
    """Time of the quadratic form over that of the linear one; above 1 the linear form is faster."""
    curves = curves_of(record, lambda figures: figures.forward_backward_ms)
    linear = curves.pop(CHUNKED, {})
    ratios = {name: {t: curve[t] / linear[t] for t in curve if t in linear} for name, curve in curves.items()}
    ratios = {name: ratio for name, ratio in ratios.items() if ratio}
    if not ratios:
        return None
    crossings = {name: crossing(curves[name], linear) for name in ratios}
    labels = {name: f"{name}: even at T = {at:,.0f}" for name, at in crossings.items() if at is not None}
    figure = _against_length(ratios, "time / time in linear form", labels)
    figure.axes[0].axhline(1, color=INK, linewidth=0.9, linestyle="--", zorder=0)
    return figure


def _against_length(
    curves: dict[str, Curve], what: str, labels: Mapping[str, str] = MappingProxyType({})
) -> Figure:
    figure = Figure(figsize=(WIDTH * 0.7, 3.0), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        place = _place_of(name)
        look: dict[str, Any] = {"color": PALETTE[place], "linestyle": DASHES[place], "marker": MARKERS[place]}
        axes.plot(list(curve), list(curve.values()), markersize=4, label=labels.get(name, name), **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if all(v > 0 for curve in curves.values() for v in curve.values()) else "symlog")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set_xlabel("T")
    axes.set_ylabel(what)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _roofline(record: BenchRecord) -> Figure | None:
    points = list(_points(record))
    if record.roofs is None or not points:
        return None
    figure = Figure(figsize=(WIDTH * 0.8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    low, high = (pick(x for _, x, _ in points) for pick in (min, max))
    edges = [low / 2, record.roofs.matmul_flops_per_s / record.roofs.copy_bytes_per_s, high * 2]
    roof = [min(x * record.roofs.copy_bytes_per_s, record.roofs.matmul_flops_per_s) for x in sorted(edges)]
    axes.plot(sorted(edges), roof, color=INK, label="copy and matrix product of this machine")
    for place, group in enumerate(dict.fromkeys(group for group, _, _ in points)):
        xs, ys = ([p[axis] for p in points if p[0] == group] for axis in (1, 2))
        look: dict[str, Any] = {"color": PALETTE[place % len(PALETTE)], "linestyle": ""}
        axes.plot(xs, ys, marker=MARKERS[place % len(MARKERS)], markersize=4, label=group, **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte that must be moved, forward")
    axes.set_ylabel("operations per second")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _points(record: BenchRecord) -> Iterator[tuple[str, float, float]]:
    """Group, intensity and rate of every case that was measured."""
    for case in record.cases:
        ms = case.own.graph_ms or case.own.forward_ms
        if ms is not None and case.flops and case.moved_bytes:
            yield case.group, case.flops / case.moved_bytes, case.flops / (1e-3 * ms)


_FIGURES: dict[str, Callable[[BenchRecord], Figure | None]] = {
    "time": _time,
    "memory": _memory,
    "crossover": _crossover,
    "roofline": _roofline,
}
