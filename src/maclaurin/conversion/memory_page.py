"""The page of a memory: bytes against perplexity and recall for every way that was measured, and the heads.

It is made from plain data: the conversion.json of `maclaurin convert --memory`, or the memory.json of
benchmarks/memory.py with the results of benchmarks/kvpress_comparison.py beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from maclaurin.inspection.single_file_page import (
    PALETTE,
    Cell,
    Column,
    Figure,
    Table,
    chart_spec,
    has_charts,
    render,
    vega_scripts,
)

PAGE = "memory.html"
#: ways to spend memory, in the order of the legend
METHODS = (
    "full softmax", "whole heads", "long windows for some heads", "window + kept", "window", "tail",
    "whole layers", "kvpress",
)  # fmt: skip


@final
@dataclass(frozen=True)
class Point:
    """One way to spend memory, and what it buys.

    recall      share of right answers, or log-odds where that was not counted
    low, high   the interval of the share
    """

    method: str
    name: str
    bytes: int
    perplexity: float | None = None
    recall: float | None = None
    low: float | None = None
    high: float | None = None


@final
@dataclass(frozen=True)
class MemoryPage:
    """What a page is about."""

    title: str
    facts: str
    findings: tuple[str, ...]
    points: tuple[Point, ...]
    recall_title: str
    source: str
    #: how much each head remembers, [layers][heads], and what each has
    scores: list[list[float]] = field(default_factory=list)
    memories: list[list[str]] = field(default_factory=list)

    def html(self) -> str:
        """The whole page in one file."""
        figures = [_bytes_figure(self), _heads_figure(self)] if has_charts() else [None, None]
        return render(
            "maclaurin.conversion",
            "memory.html.j2",
            title=self.title,
            facts=self.facts,
            findings=self.findings,
            bytes_figure=figures[0],
            heads_figure=figures[1],
            methods=_methods_table(self),
            heads_table=_heads_table(self),
            has_presses=any("pressed" in p.name or p.method == "kvpress" for p in self.points),
            source=self.source,
            vega=vega_scripts([figure.spec for figure in figures if figure is not None]),
        )


# ------------------------------------------------------------------------------- from what was written


def page_of_conversion(written: Mapping[str, Any]) -> MemoryPage:
    """The page of a conversion.json with a chosen memory."""
    chosen = written["chosen"]
    budget, best = chosen["budget"], chosen["plan"]
    original = chosen["original"]
    points = [
        Point(
            "full softmax", "exp/sum", budget["original"], math.exp(original["loss"]), original["log_odds"]
        ),
        *(
            Point(method_of(m["name"]), m["name"], m["bytes"], math.exp(m["loss"]), m["log_odds"])
            for m in chosen["measured"]
        ),
    ]
    taken = next(m for m in chosen["measured"] if m["name"] == best["name"])
    ratio = math.exp(taken["loss"] - original["loss"])
    findings = (
        f"Taken: {best['name']}, {best['bytes']:,} bytes, {best['bytes'] / budget['original']:.1%} of the "
        f"original's at {budget['at']:,} tokens.",
        f"Perplexity on calibration text {ratio:.4f} times the original's; log-odds of right answers "
        f"{taken['log_odds']:+.2f}, the original {original['log_odds']:+.2f}.",
    )
    return MemoryPage(
        title=str(written["source"]),
        facts=f"A budget of {budget['bytes']:,} bytes at {budget['at']:,} tokens"
        + (", never growing." if budget["constant"] else "."),
        findings=findings,
        points=tuple(points),
        recall_title="log-odds of the right answer",
        source="conversion.json",
        scores=chosen["heads"]["score"],
        memories=_memories(written["attention"], len(chosen["heads"]["score"][0])),
    )


def page_of_bench(
    found: Mapping[str, Any],
    goal: str,
    *,
    distance: int = 4096,
    length: int = 8192,
    source: str = "memory.json",
) -> MemoryPage:
    """One goal of benchmarks/memory.py: every arm with its bytes, at one distance and one length."""
    chosen = found["chosen"][goal]
    budget = chosen["budget"]
    points = []
    for name, arm in found["arms"].items():
        of_goal = (
            name == "original" or name == goal or name.startswith(f"{goal}:") or name == f"{goal}, trained"
        )
        if not of_goal:
            continue
        recall = arm.get(f"recall {distance}", {})
        size = budget["original"] if name == "original" else arm.get("bytes", chosen["plan"]["bytes"])
        label = chosen["plan"]["name"] if name == goal else name.removeprefix(f"{goal}: ")
        points.append(
            Point(
                "full softmax" if name == "original" else method_of(label),
                label,
                size,
                arm.get(f"perplexity {length}"),
                recall.get("accuracy"),
                recall.get("low"),
                recall.get("high"),
            )
        )
    findings = tuple(line for line in found.get("summary", ()) if line.startswith((goal, "original")))
    return MemoryPage(
        title=f"SmolLM2-135M, {goal}",
        facts=f"{budget['bytes']:,} bytes at {budget['at']:,} tokens; recall at {distance:,}, perplexity at "
        f"{length:,} tokens, on text and questions that nothing was calibrated on.",
        findings=findings,
        points=tuple(points),
        recall_title=f"recall from {distance:,} tokens ago",
        source=source,
        scores=chosen["heads"]["score"],
        memories=_memories(chosen["attention"], len(chosen["heads"]["score"][0])),
    )


def page_of_presses(written: Mapping[str, Any], source: str = "kvpress.json") -> MemoryPage:
    """The results of benchmarks/kvpress_comparison.py: methods of kvpress and ours at the same bytes."""
    whole = written["bytes"]
    points = [
        Point(
            row["kind"],
            name,
            round(row["share"] * whole),
            row["perplexity"],
            row["accuracy"],
            row["low"],
            row["high"],
        )
        for name, row in written["methods"].items()
    ]
    best = max((p for p in points if p.method == "kvpress"), key=lambda p: p.recall or 0.0)
    return MemoryPage(
        title="SmolLM2-135M beside kvpress",
        facts=f"{written['questions']} questions after {written['tokens']:,} tokens, and perplexity of "
        "what follows so much of a novel.",
        findings=(f"The best method of kvpress in recall is {best.name}: {best.recall:.3f}.",),
        points=tuple(points),
        recall_title=f"recall from {written['distance']:,} tokens ago",
        source=source,
    )


def method_of(name: str) -> str:
    """The kind of a plan, by its name."""
    if "whole layers" in name:
        return "whole layers"
    if "heads" in name:
        return "whole heads" if "exp/sum" in name or "whole heads" in name else "long windows for some heads"
    if "taylor" in name or "tail" in name:
        return "tail"
    return "window + kept" if "kept" in name or "exact keys" in name else "window"


def _memories(attention: Sequence[str], heads: int) -> list[list[str]]:
    from maclaurin.spec.head_groups import LayerAttention

    found = []
    for text in attention:
        by_head = {h: str(g.spec) for g in LayerAttention.read(text, heads).groups for h in g.heads}
        found.append([by_head[head] for head in range(heads)])
    return found


# ------------------------------------------------------------------------------------ charts and tables


def _bytes_figure(page: MemoryPage) -> Figure:
    """Two panels with the same bytes."""
    import altair as alt

    data = alt.InlineData(
        values=[
            {
                "method": p.method, "name": p.name, "MB": p.bytes / 1e6, "perplexity": p.perplexity,
                "recall": p.recall, "low": p.low, "high": p.high,
            }
            for p in page.points
        ]
    )  # fmt: skip
    present = [method for method in METHODS if any(p.method == method for p in page.points)]
    colour = alt.Color(
        "method:N",
        scale=alt.Scale(domain=present, range=[*PALETTE, "#777777"][: len(present)]),
        legend=alt.Legend(title=None, orient="bottom", columns=4),
    )
    x = alt.X("MB:Q", title="megabytes", scale=alt.Scale(type="log", nice=False, padding=12))

    def panel(field: str, title: str) -> Any:
        tips = [
            alt.Tooltip("name:N", title="memory"),
            alt.Tooltip("MB:Q", title="megabytes", format=".1f"),
            alt.Tooltip("perplexity:Q", format=".3f"),
            alt.Tooltip("recall:Q", format=".3f"),
        ]
        y = alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=False, padding=10))
        marks = alt.Chart(data, width=330, height=300).mark_point(filled=True, size=90, opacity=0.85)
        marks = marks.transform_filter(f"isValid(datum.{field})").encode(x=x, y=y, color=colour, tooltip=tips)
        if field != "recall" or all(p.low is None for p in page.points):
            return marks
        bars = alt.Chart(data).mark_rule(opacity=0.35).transform_filter("isValid(datum.low)")
        return bars.encode(x=x, y=alt.Y("low:Q", title=title), y2="high:Q", color=colour) + marks

    both = alt.hconcat(panel("perplexity", "perplexity"), panel("recall", page.recall_title))
    return Figure(
        "bytes", "Left: perplexity. Right: recall, with its 95 % interval where counted.", chart_spec(both)
    )


def _heads_figure(page: MemoryPage) -> Figure | None:
    if not page.scores:
        return None
    import altair as alt

    values = [
        {"layer": layer, "head": head, "score": score, "memory": page.memories[layer][head],
         "whole": page.memories[layer][head] == "exp/sum"}
        for layer, row in enumerate(page.scores)
        for head, score in enumerate(row)
    ]  # fmt: skip
    layers, heads = len(page.scores), len(page.scores[0])
    chart = (
        alt.Chart(alt.InlineData(values=values), width=max(300, 20 * layers), height=max(60, 26 * heads))
        .mark_rect()
        .encode(
            x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("head:O", title="key-value head"),
            color=alt.Color("score:Q", scale=alt.Scale(scheme="blues"), legend=alt.Legend(title="score")),
            stroke=alt.condition("datum.whole", alt.value(PALETTE[1]), alt.value(None)),
            strokeWidth=alt.condition("datum.whole", alt.value(2.5), alt.value(0)),
            tooltip=["layer:O", "head:O", alt.Tooltip("score:Q", format=".2f"), "memory:N"],
        )
    )
    caption = "How much each key-value head remembers; framed: it keeps every key."
    return Figure("heads", caption, chart_spec(chart))


def _methods_table(page: MemoryPage) -> Table:
    columns = (
        Column("memory"),
        Column("kind"),
        Column("megabytes"),
        Column("perplexity"),
        Column(page.recall_title),
    )
    rows = [
        (
            Cell(p.name),
            Cell(p.method),
            Cell(f"{p.bytes / 1e6:.1f}", p.bytes),
            Cell("–" if p.perplexity is None else f"{p.perplexity:.2f}", p.perplexity),
            Cell(
                "–" if p.recall is None else f"{p.recall:.3f}",
                p.recall,
                "" if p.low is None else f"{p.low:.2f} … {p.high:.2f}",
            ),
        )
        for p in page.points
    ]
    return Table("ways to spend memory", columns, tuple(rows))


def _heads_table(page: MemoryPage) -> Table:
    columns = (Column("head", "layer.head"), Column("score"), Column("memory"))
    rows = [
        (
            Cell(f"{layer}.{head}", layer * 1000 + head),
            Cell(f"{score:.3f}", score),
            Cell(page.memories[layer][head]),
        )
        for layer, row in enumerate(page.scores)
        for head, score in enumerate(row)
    ]
    return Table("heads", columns, tuple(rows))
