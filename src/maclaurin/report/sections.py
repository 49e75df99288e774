"""The sections of a study on the page, each from one analysis."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from maclaurin.errors import MaclaurinError
from maclaurin.report import charts
from maclaurin.report.analysis import Analysis
from maclaurin.report.anova import Factorial
from maclaurin.report.html import Html, embedded, framed, join, table_html, tag
from maclaurin.report.numbers import NOTHING, counted, plain
from maclaurin.report.outcome import Outcome
from maclaurin.report.provenance import Register, figures_table, mixtures, runs_table
from maclaurin.report.sentences import (
    effect_sentence,
    findings,
    forms_finding,
    planned_runs,
    status_sentence,
    trouble,
    verdict_counts,
)
from maclaurin.report.tables import (
    Table,
    agreement_table,
    cost_table,
    decimals_of,
    effects_table,
    forms_table,
    parts_table,
)
from maclaurin.report.verdict import VERDICTS, Judgement
from maclaurin.spec.catalogue import resolve
from maclaurin.study.record import RunRecord

#: verdict → tone of its mark
TONES = dict(zip(VERDICTS, ("good", "bad", "unsure", "muted"), strict=True))


@final
@dataclass
class Sections:
    """One study, section by section; its anchors begin with `name`."""

    analysis: Analysis
    name: str
    register: Register = field(default_factory=Register)
    headings: list[tuple[str, str]] = field(default_factory=list)

    def article(self) -> Html:
        """All of it. Sections without content do not appear."""
        study = self.analysis.study
        body = [
            self._form(),
            self._parts(),
            self._orders(),
            self._interactions(),
            self._cost(),
            self._claims(),
            self._positions(),
            self._provenance(),
        ]
        return tag("article", self._header(), *body, id=self.anchor("top"), data_study=study.name)

    # -------------------------------------------------------------------------------- building blocks

    def anchor(self, name: str) -> str:
        """Where a section can be linked to."""
        return slug(f"{self.name} {name}")

    def _section(self, name: str, title: str, *children: object) -> Html:
        if not any(children):
            return Html("")
        self.headings.append((self.anchor(name), title))
        return tag("section", tag("h2", title), *children, id=self.anchor(name))

    def _chart(
        self, title: str, chart: charts.Chart | None, runs: tuple[RunRecord, ...], note: str = ""
    ) -> Html:
        if chart is None:
            return Html("")
        label = self.register.figure(title, runs)
        caption = tag("figcaption", tag("b", f"{label}. "), title, ". " if note else ".", note)
        holder = tag("div", class_="chart", data_title=title)
        nothing = tag(
            "noscript", tag("p", "This figure is drawn by a script; figures/ holds it as SVG and PDF.")
        )
        return tag("figure", holder, nothing, caption, embedded(chart, class_="chart-data"), class_="drawn")

    def _table(
        self, table: Table, title: str, runs: tuple[RunRecord, ...], titles: dict[str, str] | None = None
    ) -> Html:
        label = self.register.table(title, runs)
        return table_html(table, join(tag("b", f"{label}. "), title, "."), titles)

    def _each(self, build: Callable[[Outcome], Html]) -> list[Html]:
        return [part for outcome in self.analysis.outcomes.values() if (part := build(outcome))]

    # -------------------------------------------------------------------------------------- sections

    def _header(self) -> Html:
        study = self.analysis.study
        planned = max(planned_runs(study), len(study.runs))
        finished = sum(run.status == "finished" for run in study.runs)
        scale = "" if study.scale == 1 else f" Run at {study.scale:g} of its budget."
        lines = trouble(study)
        problems = (
            tag(
                "details",
                tag("summary", f"{counted(len(lines), 'run')} without a result"),
                tag("ul", *(tag("li", line) for line in lines)),
                class_="trouble",
                open=len(lines) <= 3,
            )
            if lines
            else ""
        )
        sentences = findings(self.analysis)
        return tag(
            "header",
            tag("p", "study ", tag("b", study.name), class_="kicker"),
            tag("h1", study.title),
            tag("p", study.question, class_="question"),
            tag(
                "p",
                tag("progress", value=finished, max=planned, aria_label="finished runs"),
                " ",
                f"{status_sentence(study)}.{scale} ",
                tag("span", f"Budget: {study.budget}", class_="quiet") if study.budget else "",
                class_="status",
            ),
            problems,
            tag(
                "div",
                tag("h2", "What was found"),
                tag("ul", *(tag("li", sentence) for sentence in sentences)),
                class_="findings",
            ),
        )

    def _form(self) -> Html:
        forms = self.analysis.study.forms
        if forms is None:
            return Html("")
        return self._section(
            "form",
            "The form",
            tag("p", forms_finding(forms)),
            self._table(
                forms_table(forms), "Largest relative difference to the parallel form, in float64", ()
            ),
            tag("details", tag("summary", "Every comparison"), table_html(agreement_table(forms))),
            self._chart(
                "Relative error of the series against softmax, by order",
                charts.series_error(forms),
                (),
                "The same inputs at every order.",
            ),
        )

    def _parts(self) -> Html:
        return self._section("parts", "The parts", *self._each(self._part))

    def _part(self, outcome: Outcome) -> Html:
        experiment, fit = outcome.experiment, outcome.fit
        direction = "higher" if outcome.higher_is_better else "lower"
        noise = (
            f" The noise of one run is {fit.sigma:.2g} ({fit.df} degrees of freedom, pooled over all cells)."
            if fit.sigma is not None
            else " One seed only: there are no intervals, and nothing is concluded."
            if len(fit.seeds) == 1
            else ""
        )
        words = f"{outcome.metric.capitalize()}; {direction} is better. Intervals hold 95 %."
        words += noise + _adjusted(outcome)
        notes = [tag("p", tag("b", "Note. "), note, class_="note") for note in mixtures(outcome.runs)]
        formulas = _formulas(outcome)
        return join(
            tag("h3", experiment.title, id=self.anchor(f"parts-{experiment.name}")),
            tag("p", words),
            *notes,
            self._table(
                parts_table(outcome),
                f"{outcome.metric.capitalize()} and difference to {experiment.baseline}",
                outcome.runs,
                titles=formulas,
            ),
            _formula_list(outcome, formulas),
            self._chart(
                f"{outcome.metric.capitalize()} by cell",
                charts.dots(outcome) if fit.cells else None,
                outcome.runs,
                "Dots are means with their 95 % intervals, small marks are seeds; "
                f"the line is the mean of {experiment.baseline}. What a seed does to all cells alike is left "
                "out of the intervals, so marks may lie outside them.",
            ),
            self._chart(
                "Learning curves",
                charts.curves(outcome),
                outcome.runs,
                "Thick lines are means over seeds, thin ones seeds. Switch cells on and off above; "
                "point at a chart, or focus it and use the arrow keys, to read values.",
            ),
        )

    def _orders(self) -> Html:
        parts = self._each(self._order)
        lead = "Order is the highest power of the score that a kernel holds; full softmax holds all of them."
        return self._section("orders", "The orders", tag("p", lead), *parts) if parts else Html("")

    def _order(self, outcome: Outcome) -> Html:
        chart = charts.orders(outcome)
        if chart is None:
            return Html("")
        runs = tuple(
            run for run in outcome.runs if run.order is not None or run.cell == outcome.experiment.baseline
        )
        lines = [line["name"] for line in chart["series"]]
        note = f"The points are {lines[0]}. " if len(lines) == 1 else ""
        note += f"The line is {outcome.experiment.baseline}." if chart["panels"][0]["rules"] else ""
        title = f"{outcome.metric.capitalize()} against Taylor order and size of the state"
        return join(tag("h3", outcome.experiment.title), self._chart(title, chart, runs, note))

    def _interactions(self) -> Html:
        parts = [self._factorial(f) for f in self.analysis.factorials.values()]
        return self._section("interactions", "The interactions", *parts) if parts else Html("")

    def _factorial(self, factorial: Factorial) -> Html:
        outcome = factorial.outcome
        runs = outcome.runs
        sentences = [effect_sentence(factorial, effect) for effect in factorial.effects]
        sentences += [
            f"{name}: cannot be told apart with the runs there are." for name in factorial.inestimable
        ]
        maps = [self._heatmap(factorial, *pair) for pair in itertools.combinations(factorial.axes, 2)]
        lost = [c.name for c in outcome.cells.values() if not c.values or c.diverged]
        balance = "" if factorial.is_balanced else _unbalanced(lost)
        return join(
            tag("h3", outcome.experiment.title),
            tag("ul", *(tag("li", s, class_="sentence") for s in sentences)),
            tag("div", *maps, class_="maps"),
            self._table(effects_table(factorial), "Effects: main, two-way, and what is left", runs),
            tag("p", balance, class_="note") if balance else "",
        )

    def _heatmap(self, factorial: Factorial, rows: str, columns: str) -> Html:
        outcome = factorial.outcome
        places = {
            (row, column): factorial.mean_at({rows: row, columns: column})
            for row in factorial.levels[rows]
            for column in factorial.levels[columns]
        }
        known = [mean for mean, _, _ in places.values() if mean is not None]
        if not known:
            return Html("")
        low, high = min(known), max(known)
        title = f"Mean {outcome.metric}, {rows} × {columns}"
        label = self.register.figure(title, outcome.runs)
        body = []
        for row in factorial.levels[rows]:
            entries = [self._shade(outcome, places[row, c], low, high) for c in factorial.levels[columns]]
            body.append(tag("tr", tag("th", row, scope="row"), *entries))
        heads = [tag("th", column, scope="col") for column in factorial.levels[columns]]
        table = tag(
            "table",
            tag("thead", tag("tr", tag("td", rows, " \\ ", columns, class_="corner"), *heads)),
            tag("tbody", *body),
            class_="heat",
        )
        return framed(table, title, join(tag("b", f"{label}. "), title, "; deeper is better."))

    @staticmethod
    def _shade(outcome: Outcome, place: tuple[float | None, int, int], low: float, high: float) -> Html:
        mean, there, planned = place
        if mean is None:
            return tag(
                "td", NOTHING, class_="empty", title="no finished run" if planned else "not in the design"
            )
        fraction = 0.5 if high == low else (mean - low) / (high - low)
        good = fraction if outcome.higher_is_better else 1 - fraction
        mark = "" if there == planned else tag("sup", f"{there}/{planned}", title="cells with a finished run")
        return tag("td", plain(mean, decimals_of(outcome)), mark, style=f"--f:{100 * good:.0f}%")

    def _cost(self) -> Html:
        return self._section("cost", "The cost", *self._each(self._cost_of))

    def _cost_of(self, outcome: Outcome) -> Html:
        table = cost_table(outcome)
        if not table.rows:
            return Html("")
        title = f"Cost by cell, means over finished runs: {outcome.experiment.title}"
        return self._table(table, title, outcome.runs)

    def _claims(self) -> Html:
        judgements = self.analysis.judgements
        if not judgements:
            return Html("")
        cards = [_claim(judgement) for judgement in judgements]
        lead = f"Of {counted(len(judgements), 'claim')}: {verdict_counts(judgements)}."
        runs = tuple(
            r for r in self.analysis.study.runs if r.experiment in {j.claim.experiment for j in judgements}
        )
        self.register.table("Claims", runs)
        return self._section("claims", "The claims", tag("p", lead), *cards)

    def _positions(self) -> Html:
        return self._section("positions", "Loss by position", *self._each(self._position))

    def _position(self, outcome: Outcome) -> Html:
        title = f"Test loss by position in the text: {outcome.experiment.title}"
        return self._chart(title, charts.positions(outcome), outcome.runs, "Means over seeds are thick.")

    def _provenance(self) -> Html:
        runs = self.analysis.study.runs
        return self._section(
            "provenance",
            "Provenance",
            tag("p", "Which runs each figure and table was made from, and where those were made."),
            tag("details", tag("summary", "By figure and table"), table_html(figures_table(self.register))),
            tag("details", tag("summary", f"All {counted(len(runs), 'run')}"), table_html(runs_table(runs))),
        )


def slug(text: str) -> str:
    """Text that can be an id and the name of a file."""
    return "-".join("".join(c if c.isalnum() and c.isascii() else " " for c in text.lower()).split()) or "x"


def _claim(judgement: Judgement) -> Html:
    claim = judgement.claim
    rows = [("published", claim.paper), ("ours", judgement.ours), ("source", claim.source)]
    if judgement.notes:
        rows.append(("note", "; ".join(judgement.notes)))
    facts = [join(tag("dt", name), tag("dd", text)) for name, text in rows if text]
    return tag(
        "div",
        tag("h3", claim.says),
        tag("p", tag("span", judgement.verdict, class_=f"tone {TONES[judgement.verdict]}")),
        tag("dl", *facts),
        class_="claim",
        data_verdict=judgement.verdict,
    )


def _adjusted(outcome: Outcome) -> str:
    counts = {len(cell.values) for cell in outcome.cells.values() if cell.values}
    if counts <= {len(outcome.fit.seeds)}:
        return ""
    return " Where a seed is missing, the mean is what the model expects over all seeds."


def _formulas(outcome: Outcome) -> dict[str, str]:
    """Notation → formula, for those this version can read."""
    found = {}
    for text in dict.fromkeys(t for cell in outcome.cells.values() for t in cell.attention):
        try:
            found[text] = resolve(text).formula
        except MaclaurinError:
            continue
    return found


def _formula_list(outcome: Outcome, formulas: dict[str, str]) -> Html:
    if not formulas:
        return Html("")
    items = []
    for text, formula in formulas.items():
        names = [cell.name for cell in outcome.cells.values() if text in cell.attention]
        items.append(tag("div", tag("dt", ", ".join(names), " ", tag("code", text)), tag("dd", formula)))
    return tag("details", tag("summary", "What each cell computes"), tag("dl", *items, class_="formulas"))


def _unbalanced(lost: list[str]) -> str:
    text = "Not every combination has every seed, so shares need not add up to 100 %"
    if lost:
        text += f"; effects speak of the finished runs only: {', '.join(lost)} diverged or did not finish"
    return text + "."
