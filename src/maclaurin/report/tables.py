"""The tables of a report as data, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, final

from maclaurin.report.anova import Factorial
from maclaurin.report.numbers import (
    NOTHING,
    chance,
    duration,
    interval,
    many,
    plain,
    power,
    ratio,
    share,
    signed,
    size,
)
from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.report.statistics import Estimate
from maclaurin.report.verdict import Judgement
from maclaurin.study.record import FormsRecord, RunRecord

Tone = Literal["good", "bad", "unsure", "muted", ""]


@final
@dataclass(frozen=True)
class Column:
    """A heading and how what stands below it is set.

    Numbers to the right, code in its own type, prose may wrap; named has code for an aside, and folded shows
    its aside until it is asked for the rest.
    """

    title: str
    kind: Literal["text", "number", "code", "prose", "named", "folded"] = "text"
    hint: str = ""


@final
@dataclass(frozen=True)
class Entry:
    """What stands in one place: its text, what it is sorted by, a quieter second part, its tone."""

    text: str
    value: float | str | None = None
    aside: str = ""
    tone: Tone = ""

    def __str__(self) -> str:
        return f"{self.text} {self.aside}".strip()


@final
@dataclass(frozen=True)
class Table:
    """Headings and rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]


def markdown(table: Table) -> str:
    """As a Markdown table."""
    lines = [
        _line(_escaped(column.title) for column in table.columns),
        _line("---:" if column.kind == "number" else "---" for column in table.columns),
    ]
    for row in table.rows:
        texts = []
        for column, entry in zip(table.columns, row, strict=True):
            text, aside = _escaped(entry.text), _escaped(entry.aside)
            text = _code(text) if column.kind == "code" else text
            aside = _code(aside) if column.kind == "named" else aside
            texts.append(f"{text} {aside}".strip())
        lines.append(_line(texts))
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text and "`" not in text else text


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


# ------------------------------------------------------------------------------------- the parts


def parts_table(outcome: Outcome) -> Table:
    """Mean, difference to the baseline and standing of every cell, best first."""
    baseline = outcome.experiment.baseline
    columns = (
        Column("cell", "named"),
        Column(outcome.metric, "number", "mean over the seeds, 95 % interval"),
        Column(f"difference to {baseline}", "number", "seed by seed, 95 % interval"),
        Column("verdict"),
        Column("min – max", "number", "over the seeds of this cell alone"),
        Column("seeds", "number"),
    )
    rows = tuple(_parts_row(outcome, outcome.cells[name]) for name in outcome.best_first())
    return Table(f"{outcome.metric} by cell", columns, rows)


def _parts_row(outcome: Outcome, cell: CellOutcome) -> tuple[Entry, ...]:
    decimals = decimals_of(outcome)
    mean, difference = outcome.means[cell.name], outcome.differences[cell.name]
    spread = cell.spread
    ends = NOTHING if spread is None else f"{plain(spread[0], decimals)} – {plain(spread[1], decimals)}"
    return (
        Entry(cell.name, cell.name, ", ".join(cell.attention)),
        _estimate(mean, lambda value: plain(value, decimals), decimals),
        Entry(NOTHING) if cell.name == outcome.experiment.baseline else _difference(difference, decimals),
        verdict_entry(outcome, cell),
        Entry(ends, None if spread is None else spread[1] - spread[0]),
        Entry(str(len(cell.values)), len(cell.values)),
    )


def decimals_of(outcome: Outcome) -> int:
    """Digits after the point that the noise leaves a meaning."""
    sigma = outcome.fit.sigma
    return 4 if sigma is not None and sigma < 5e-4 else 3


def _estimate(estimate: Estimate | None, show: Callable[[float], str], decimals: int) -> Entry:
    if estimate is None:
        return Entry(NOTHING)
    return Entry(show(estimate.value), estimate.value, interval(estimate, decimals))


def _difference(difference: Estimate | None, decimals: int) -> Entry:
    if difference is not None and math.isinf(difference.value):
        return Entry("diverged", difference.value, tone="bad")
    return _estimate(difference, lambda value: signed(value, decimals), decimals)


def verdict_entry(outcome: Outcome, cell: CellOutcome) -> Entry:
    """Where a cell stands, and what became of runs that did not finish."""
    standing = outcome.standing(cell.name)
    tones: dict[str, Tone] = {"behind": "bad", "ahead": "good", "not distinguishable": "unsure"}
    words = {"one seed": "one seed: no conclusion", "not run": "no finished run"}
    asides = []
    if cell.diverged:
        asides.append(f"diverged in {len(cell.diverged)} of {len(outcome.experiment.seeds)}")
    if cell.crashed:
        asides.append(f"crashed in {len(cell.crashed)} of {len(outcome.experiment.seeds)}")
    if cell.name in outcome.fit.restless:
        asides.append("far larger spread than the others")
    text = words.get(standing, standing)
    return Entry(text, text, f"({'; '.join(asides)})" if asides else "", tones.get(standing, "muted"))


# -------------------------------------------------------------------------------------- the rest


def cost_table(outcome: Outcome) -> Table:
    """What each cell takes: means over its finished runs."""
    columns = (
        Column("cell"),
        Column("tokens/s", "number"),
        Column("state", "number", "recurrent state of all layers in fp32"),
        Column("parameters", "number"),
        Column("time of a run", "number", "evaluation included"),
        Column("peak GPU memory", "number"),
    )
    rows = []
    for cell in outcome.cells.values():
        done = [run for run in cell.runs if run.status == "finished"]
        if not done:
            continue
        rate = average(done, lambda run: run.tokens_per_second)
        memory = average(done, lambda run: run.peak_gpu_bytes)
        seconds = average(done, lambda run: run.seconds)
        parameters = average(done, lambda run: run.parameters)
        state = cell.state_bytes
        rows.append(
            (
                Entry(cell.name, cell.name),
                Entry(many(rate), rate),
                Entry(
                    "grows with the text" if state is None else size(state),
                    math.inf if state is None else state,
                ),
                Entry(many(parameters), parameters),
                Entry(duration(seconds), seconds),
                Entry(size(memory), memory),
            )
        )
    return Table("cost by cell", columns, tuple(rows))


def average(runs: list[RunRecord], what: Callable[[RunRecord], float | None]) -> float | None:
    """Mean over the runs that know it."""
    known = [value for run in runs if (value := what(run)) is not None]
    return sum(known) / len(known) if known else None


def effects_table(factorial: Factorial) -> Table:
    """Main effects and interactions, then what is left over."""
    columns = (
        Column("effect"),
        Column("share of variance", "number"),
        Column("df", "number"),
        Column("F", "number"),
        Column("p (Holm)", "number"),
        Column("verdict"),
    )
    rows = []
    for effect in (*factorial.effects, *factorial.left_over):
        left = effect in factorial.left_over
        verdict = "" if left else "supported" if effect.supported else "not distinguishable"
        tone: Tone = "muted" if left else "good" if effect.supported else "unsure"
        rows.append(
            (
                Entry(effect.name, effect.name),
                Entry(share(effect.share), effect.share),
                Entry(str(effect.df), effect.df),
                Entry(ratio(effect.f), effect.f),
                Entry(
                    NOTHING if effect.p is None else chance(effect.p).removeprefix("p ").removeprefix("= "),
                    effect.p,
                ),
                Entry(verdict, verdict, tone=tone),
            )
        )
    return Table("effects", columns, tuple(rows))


def claims_table(judgements: list[Judgement]) -> Table:
    """Each claim beside our numbers."""
    columns = (
        Column("claim", "prose"),
        Column("verdict"),
        Column("published", "prose"),
        Column("ours", "prose"),
        Column("source", "prose"),
    )
    tones: dict[str, Tone] = {"agrees": "good", "disagrees": "bad", "not run": "muted"}
    rows = tuple(
        (
            Entry(j.claim.says, j.claim.says),
            Entry(
                j.verdict,
                j.verdict,
                f"({'; '.join(j.notes)})" if j.notes else "",
                tones.get(j.verdict, "unsure"),
            ),
            Entry(j.claim.paper),
            Entry(j.ours),
            Entry(j.claim.source),
        )
        for j in judgements
    )
    return Table("claims", columns, rows)


def forms_table(forms: FormsRecord) -> Table:
    """The largest error of each form, and where."""
    columns = (
        Column("form"),
        Column("largest error", "number"),
        Column("at", "code"),
        Column("specs", "number"),
    )
    by_form: dict[str, list[tuple[float, str]]] = {}
    for row in forms.agreement:
        if row.get("error") is not None:
            by_form.setdefault(str(row["form"]), []).append((float(row["error"]), str(row["spec"])))
    rows = []
    for form, errors in by_form.items():
        error, spec = max(errors)
        rows.append(
            (Entry(form, form), Entry(power(error), error), Entry(spec), Entry(str(len(errors)), len(errors)))
        )
    return Table("agreement of the forms", columns, tuple(rows))


def agreement_table(forms: FormsRecord) -> Table:
    """Every comparison."""
    columns = (Column("spec", "code"), Column("form"), Column("error", "number"))
    rows = tuple(
        (
            Entry(str(row["spec"]), str(row["spec"])),
            Entry(str(row["form"]), str(row["form"])),
            Entry(power(row.get("error")), row.get("error")),
        )
        for row in forms.agreement
    )
    return Table("every comparison", columns, rows)
