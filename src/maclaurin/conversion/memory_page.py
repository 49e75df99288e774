"""The page of a memory: bytes against perplexity and recall for every measured plan, and the heads.

It is made from the record of a conversion, or from other results with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from maclaurin.conversion.conversion_record import MeasuredOriginal, MeasuredPlan, MemoryChoice
from maclaurin.evaluation.results import wilson_interval
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
REFERENCES = (
    "References are simple plans that fill the same budget, measured on the same text and the same first "
    "questions. They were not candidates. The plans at the top of the table answered more questions."
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

    recall         share of right answers, or log-odds if answers were not counted
    low, high      the interval of the share
    log_odds       beside the share, if known
    questions      how many were asked, if known
    is_reference   whether it is only there to compare with
    """

    method: str
    name: str
    bytes: int
    perplexity: float | None = None
    recall: float | None = None
    low: float | None = None
    high: float | None = None
    log_odds: float | None = None
    questions: int | None = None
    is_reference: bool = False


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
        return html_of([self], self.title)

    def article(self) -> Article:
        """The page as a part of a longer one."""
        return Article(
            kind="memory",
            title=self.title,
            question="What does a byte of memory buy?",
            lead=(Text(self.facts),),
            findings=self.findings,
            sections=tuple(_sections(self)),
        )


def html_of(pages: Sequence[MemoryPage], title: str) -> str:
    """Several pages in one file."""
    sources = tuple(dict.fromkeys(page.source for page in pages))
    return render(title, [page.article() for page in pages], "", sources)


def _sections(page: MemoryPage) -> Iterator[Section]:
    number, can_draw = Numbering(), has_charts()

    def figure(draw: Callable[[MemoryPage], Figure], title: str, note: str) -> Block:
        return Drawn(draw(page), title, note, number("Figure")) if can_draw else NO_CHARTS

    note = "Recall comes with its 95 % interval (Wilson's) where answers were counted."
    blocks = [
        Text(BYTES),
        figure(bytes_figure, "Perplexity and recall against megabytes", note),
        Tabled(_methods_table(page), "All measured ways to spend memory", number("Table")),
    ]
    if any(p.is_reference for p in page.points):
        blocks.append(Text(REFERENCES, "note"))
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
    taken = next(m for m in chosen.measured if m.name == best.name)
    ratio = math.exp(taken.loss - original.loss)
    return MemoryPage(
        title=source,
        facts=f"A budget of {budget.bytes:,} bytes at {budget.at:,} tokens"
        + (", never growing." if budget.constant else "."),
        findings=(
            f"Chosen: {best.name}, {best.bytes:,} bytes, {best.bytes / budget.original:.1%} of the "
            f"original's at {budget.at:,} tokens.",
            f"Perplexity on calibration text {ratio:.4f} times the original's; "
            f"{_recall_in_words(taken)}, the original {_recall_in_words(original)}.",
        ),
        points=tuple(_points(chosen)),
        recall_title="share of right answers" if _is_counted(chosen) else "log-odds of the right answer",
        source="conversion.json",
        scores=chosen.heads["score"],
        memories=memories_of(attention, len(chosen.heads["score"][0])),
    )


def _points(chosen: MemoryChoice) -> Iterator[Point]:
    """The original, the plans it was chosen from, simple plans of the same bytes, and other budgets."""
    counted = _is_counted(chosen)
    yield Point("full softmax", "exp/sum", chosen.budget.original, **_measures(chosen.original, counted))
    for plan in (*chosen.measured, *chosen.references, *chosen.other_budgets):
        is_reference = plan in chosen.references
        found = _measures(plan, counted)
        yield Point(plan.kind, plan.name, plan.bytes, **found, is_reference=is_reference)


def _is_counted(chosen: MemoryChoice) -> bool:
    """Whether right answers of all plans were recorded; older records have log-odds only."""
    plans = (*chosen.measured, *chosen.references, *chosen.other_budgets)
    return chosen.original.recall is not None and all(m.recall is not None and m.questions for m in plans)


def _measures(found: MeasuredPlan | MeasuredOriginal, counted: bool) -> dict[str, Any]:
    """Perplexity and recall for a point; without counted answers, log-odds take the place of recall."""
    perplexity = math.exp(found.loss)
    if not counted:
        return {"perplexity": perplexity, "recall": found.log_odds}
    low, high = _interval(found)
    return {
        "perplexity": perplexity, "recall": found.recall, "low": low, "high": high,
        "log_odds": found.log_odds, "questions": found.questions,
    }  # fmt: skip


def _interval(found: MeasuredPlan | MeasuredOriginal) -> tuple[float | None, float | None]:
    if found.recall is None or not found.questions:
        return None, None
    return wilson_interval(found.recall, found.questions)


def _recall_in_words(found: MeasuredPlan | MeasuredOriginal) -> str:
    """The share of right answers with its interval, and log-odds."""
    odds = f"log-odds of right answers {found.log_odds:+.2f}"
    if found.recall is None:
        return odds
    low, high = _interval(found)
    between = "" if low is None else f" ({low:.2f} … {high:.2f})"
    return f"{found.recall:.2f}{between} of the answers right, {odds}"


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
    asked = any(p.questions is not None for p in page.points)
    columns = (
        Column("memory", "prose"),
        Column("kind"),
        Column("megabytes", "number"),
        Column("perplexity", "number"),
        Column(page.recall_title, "number"),
        *((Column("log-odds", "number"), Column("questions", "number")) if asked else ()),
    )
    rows = [
        (
            Entry(p.name, aside="reference" if p.is_reference else ""),
            Entry(p.method),
            Entry(f"{p.bytes / 1e6:.1f}", p.bytes),
            Entry(plain(p.perplexity, 2), p.perplexity),
            Entry(plain(p.recall), p.recall, "" if p.low is None else f"{p.low:.2f} … {p.high:.2f}"),
            *((Entry(plain(p.log_odds, 2), p.log_odds), _count(p.questions)) if asked else ()),
        )
        for p in page.points
    ]
    return Table("ways to spend memory", columns, tuple(rows))


def _count(number: int | None) -> Entry:
    return Entry("–" if number is None else str(number), number)


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
