"""The page of a memory: bytes against perplexity and recall for every measured plan, and the heads.

It is made from the record of a conversion, or from other results with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from maclaurin.conversion.conversion_record import MemoryChoice
from maclaurin.report.figure import PALETTE, Figure, Sheet, has_charts
from maclaurin.report.formatting import Column, Entry, Table, plain
from maclaurin.report.page import (
    NO_CHARTS,
    Article,
    Block,
    Drawn,
    Fold,
    Numbering,
    Section,
    Tabled,
    Text,
    render,
)
from maclaurin.spec.head_groups import LayerAttention

#: ways to spend memory, in the order of the legend
METHODS = (
    "full softmax", "every key in some heads", "long windows for some heads", "window + kept", "window",
    "tail", "every key in some layers", "kvpress",
)  # fmt: skip
BYTES = (
    "Each mark is one way to spend memory. Bytes are those of the cache at the length the budget is given "
    "for, keys and values in bf16. Marks at the same bytes can be compared; lower is better on the left, "
    "higher on the right."
)
PRESSED = (
    "Methods of kvpress not marked “limited while reading”, and ours marked “pressed”, compress after the "
    "whole prompt was read with full attention. That is the easier task: the others also read the prompt in "
    "small memory."
)
HEADS = (
    "Retrieval heads attend to facts far back. A head's score is the mean of two measures, each divided by "
    "its largest value: the attention that a question pays to the asked fact, and how much the log-odds of "
    "the right answer fall when this head alone is limited to a window."
)


@final
@dataclass(frozen=True)
class Point:
    """One use of memory, with its perplexity and recall.

    recall      share of right answers, or log-odds if answers were not counted
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
    """The contents of a page."""

    title: str
    facts: str
    findings: tuple[str, ...]
    points: tuple[Point, ...]
    recall_title: str
    source: str
    #: score of each head as a retrieval head, and its memory, [layers][heads]
    scores: list[list[float]] = field(default_factory=list)
    memories: list[list[str]] = field(default_factory=list)

    def html(self) -> str:
        """The whole page in one file."""
        article = Article(
            kind="memory",
            title=self.title,
            question="What does a byte of memory buy?",
            lead=(Text(self.facts),),
            findings=self.findings,
            sections=tuple(_sections(self)),
        )
        return render(self.title, [article], "", (self.source,))


def _sections(page: MemoryPage) -> Iterator[Section]:
    number, can_draw = Numbering(), has_charts()

    def figure(draw: Callable[[MemoryPage], Figure], title: str, note: str) -> Block:
        return Drawn(draw(page), title, note, number("Figure")) if can_draw else NO_CHARTS

    note = "Recall comes with its 95 % interval where answers were counted."
    blocks = [
        Text(BYTES),
        figure(bytes_figure, "Perplexity and recall against megabytes", note),
        Tabled(_methods_table(page), "All measured ways to spend memory", number("Table")),
    ]
    if any("pressed" in p.name or p.method == "kvpress" for p in page.points):
        blocks.append(Text(PRESSED, "note"))
    yield Section("bytes", "Bytes against perplexity and recall", tuple(blocks))
    if page.scores:
        note = "Framed heads keep every key."
        drawn = figure(_heads_figure, "Score of each key-value head as a retrieval head", note)
        every = Tabled(_heads_table(page), "One row per key-value head, named layer.head")
        blocks = (Text(HEADS), drawn, Fold("Every head as a table", (every,)))
        yield Section("heads", "Retrieval heads", blocks)


# ------------------------------------------------------------------------------- from JSON


def page_of_choice(source: str, chosen: MemoryChoice, attention: Sequence[str]) -> MemoryPage:
    """The page of a memory that was chosen for the model `source`, with the attention of every layer."""
    budget, best, original = chosen.budget, chosen.plan, chosen.original
    points = [
        Point("full softmax", "exp/sum", budget.original, math.exp(original.loss), original.log_odds),
        *(
            Point(m.kind, m.name, m.bytes, math.exp(m.loss), m.log_odds)
            for m in (*chosen.measured, *chosen.other_budgets)
        ),
    ]
    taken = next(m for m in chosen.measured if m.name == best.name)
    ratio = math.exp(taken.loss - original.loss)
    findings = (
        f"Chosen: {best.name}, {best.bytes:,} bytes, {best.bytes / budget.original:.1%} of the "
        f"original's at {budget.at:,} tokens.",
        f"Perplexity on calibration text {ratio:.4f} times the original's; log-odds of right answers "
        f"{taken.log_odds:+.2f}, the original {original.log_odds:+.2f}.",
    )
    return MemoryPage(
        title=source,
        facts=f"A budget of {budget.bytes:,} bytes at {budget.at:,} tokens"
        + (", never growing." if budget.constant else "."),
        findings=findings,
        points=tuple(points),
        recall_title="log-odds of the right answer",
        source="conversion.json",
        scores=chosen.heads["score"],
        memories=memories_of(attention, len(chosen.heads["score"][0])),
    )


def memories_of(attention: Sequence[str], heads: int) -> list[list[str]]:
    """The notation of every head, by layer."""
    return [[str(spec) for spec in LayerAttention.read(text, heads).by_head] for text in attention]


# ------------------------------------------------------------------------------------ charts and tables


def bytes_figure(page: MemoryPage) -> Figure:
    """Two panels with the same horizontal axis: bytes."""
    import altair as alt

    sheet = Sheet()
    base = sheet.add(
        {
            "method": p.method, "name": p.name, "MB": p.bytes / 1e6, "perplexity": p.perplexity,
            "recall": p.recall, "low": p.low, "high": p.high,
        }
        for p in page.points
    )  # fmt: skip
    present = [method for method in METHODS if any(p.method == method for p in page.points)]
    colours = [alt.ExprRef("ink"), *(alt.ExprRef(f"c{place}") for place in range(len(PALETTE)))]
    colour = alt.Color(
        "method:N",
        scale=alt.Scale(domain=present, range=colours[: len(present)]),
        legend=alt.Legend(title=None, orient="bottom", columns=4),
    )
    x = alt.X("MB:Q", title="megabytes", scale=alt.Scale(type="log", nice=False, padding=12))
    tips = [
        alt.Tooltip("name:N", title="memory"),
        alt.Tooltip("MB:Q", title="megabytes", format=".1f"),
        alt.Tooltip("perplexity:Q", format=".3f"),
        alt.Tooltip("recall:Q", format=".3f"),
    ]

    def panel(field: str, title: str) -> Any:
        y = alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=False, padding=10))
        marks = base.properties(width=330, height=300).mark_point(filled=True, size=90, opacity=0.85)
        marks = marks.transform_filter(f"isValid(datum.{field})").encode(x=x, y=y, color=colour, tooltip=tips)
        if field != "recall" or all(p.low is None for p in page.points):
            return marks
        bars = base.mark_rule(opacity=0.35).transform_filter("isValid(datum.low)")
        return bars.encode(x=x, y=alt.Y("low:Q", title=title), y2="high:Q", color=colour) + marks

    return sheet.figure(alt.hconcat(panel("perplexity", "perplexity"), panel("recall", page.recall_title)))


def _heads_figure(page: MemoryPage) -> Figure:
    import altair as alt

    sheet, layers, heads = Sheet(), len(page.scores), len(page.scores[0])
    chart = (
        sheet.add(
            {
                "layer": layer, "head": head, "score": score, "memory": page.memories[layer][head],
                "whole": page.memories[layer][head] == "exp/sum",
            }
            for layer, row in enumerate(page.scores)
            for head, score in enumerate(row)
        )
        .mark_rect()
        .encode(
            x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("head:O", title="key-value head"),
            color=alt.Color("score:Q", scale=alt.Scale(scheme="blues"), legend=alt.Legend(title="score")),
            stroke=alt.condition("datum.whole", alt.value(alt.ExprRef("c1")), alt.value(None)),
            strokeWidth=alt.condition("datum.whole", alt.value(2.5), alt.value(0)),
            tooltip=["layer:O", "head:O", alt.Tooltip("score:Q", format=".2f"), "memory:N"],
        )
        .properties(width=max(300, 20 * layers), height=max(60, 26 * heads))
    )  # fmt: skip
    return sheet.figure(chart)


def _methods_table(page: MemoryPage) -> Table:
    columns = (
        Column("memory", "prose"),
        Column("kind"),
        Column("megabytes", "number"),
        Column("perplexity", "number"),
        Column(page.recall_title, "number"),
    )
    rows = [
        (
            Entry(p.name),
            Entry(p.method),
            Entry(f"{p.bytes / 1e6:.1f}", p.bytes),
            Entry(plain(p.perplexity, 2), p.perplexity),
            Entry(plain(p.recall), p.recall, "" if p.low is None else f"{p.low:.2f} … {p.high:.2f}"),
        )
        for p in page.points
    ]
    return Table("ways to spend memory", columns, tuple(rows))


def _heads_table(page: MemoryPage) -> Table:
    columns = (Column("head", hint="layer.head"), Column("score", "number"), Column("memory", "code"))
    rows = [
        (
            Entry(f"{layer}.{head}", layer * 1000 + head),
            Entry(f"{score:.3f}", score),
            Entry(page.memories[layer][head]),
        )
        for layer, row in enumerate(page.scores)
        for head, score in enumerate(row)
    ]
    return Table("heads", columns, tuple(rows))
