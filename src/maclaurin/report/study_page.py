"""The page of studies, section by section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

from maclaurin.errors import MaclaurinError
from maclaurin.report import (
    cell_charts,
    curve_charts,
    effect_charts,
    ladder_chart,
    learning_rate_chart,
    order_charts,
)
from maclaurin.report.analysis import Analysis
from maclaurin.report.anova import Factorial
from maclaurin.report.cell_tables import cost_table, parts_table
from maclaurin.report.contributions import Contributions
from maclaurin.report.effect_tables import (
    contributions_table,
    effects_table,
    ladder_gaps_table,
    ladder_slopes_table,
    ladder_tokens_table,
    ladder_values_table,
    pairs_table,
)
from maclaurin.report.figure import Figure
from maclaurin.report.formatting import Table, counted, in_one_line, listed, listed_cells
from maclaurin.report.ladder import Ladder
from maclaurin.report.learning_rates import has_factors
from maclaurin.report.outcome import Outcome
from maclaurin.report.page import (
    Article,
    Block,
    Bullets,
    ClaimCard,
    Claims,
    Drawn,
    Facts,
    Fold,
    Formulas,
    Heading,
    Numbering,
    Progress,
    Section,
    Tabled,
    Text,
    render,
    slug,
)
from maclaurin.report.provenance_tables import Source, figures_table, mixtures, runs_table
from maclaurin.report.sentences import (
    diverged_sentence,
    effect_sentence,
    forms_finding,
    interaction_sentences,
    ladder_findings,
    ladder_limits,
    planned_runs,
    rate_cautions,
    status_sentence,
    trouble,
    tuning_finding,
    verdict_counts,
    waterfall_finding,
)
from maclaurin.report.training_tables import (
    common_settings,
    rules_of_comparison,
    settings_table,
    tuning_table,
)
from maclaurin.report.verdict import Judgement
from maclaurin.report.verdict_tables import TONES, agreement_table, forms_table, margin_text, published_text
from maclaurin.spec.head_groups import specs_in
from maclaurin.study.run_record import RunRecord
from maclaurin.wording import duration, listed_names

#: the folder next to the page with its figures as files
FIGURES = "figures"
FOOT = (
    "Means come with the standard deviation over seeds. Differences are taken seed by seed and come with "
    "95 % intervals from the pair's own spread (paired t), in log-odds for accuracies. Intervals in "
    "tables are not corrected for their number; claims, contributions and effects are (Holm). A run that "
    "diverged counts as the worst result."
)

DURING = (
    "From the evaluations on validation data. The learning rate of a run decays over the whole run, so an "
    "earlier evaluation is not the result of a shorter training."
)
FACTOR_NOTE = " Left: at the chosen factor of each cell (thin: at other factors). Right: at its chosen rate."


def study_articles(analyses: Sequence[Analysis]) -> list[Article]:
    """The studies of one page. Figures are named after the study, the experiment and what they show."""
    names = [analysis.study.name for analysis in analyses]
    articles = []
    for place, analysis in enumerate(analyses):
        name = names[place]
        anchor = name if len(names) == 1 else f"study {place + 1}"
        figures = f"{name} {place + 1}" if names.count(name) > 1 else name
        articles.append(Composer(analysis, anchor, figures).article())
    return articles


def study_page(articles: Sequence[Article]) -> str:
    """The whole report as HTML."""
    titles = [article.title for article in articles]
    return render(listed(titles), articles, FOOT, ("runs.csv", "summary.csv", "tables.md"))


# ------------------------------------------------------------------------------------- one study


@final
class Composer:
    """One study, section by section; its anchors and figure files start with the given names."""

    def __init__(self, analysis: Analysis, anchors: str, figures: str) -> None:
        self._analysis, self._anchors, self._figures = analysis, anchors, figures
        self._number = Numbering()
        self._sources: list[Source] = []

    def article(self) -> Article:
        """The whole article. Sections without content are left out."""
        study = self._analysis.study
        sections = [
            ("form", "The form", self._form()),
            ("ladder", "The ladder", self._ladder(self._analysis.ladder)),
            ("parts", "The parts", self._each(self._part)),
            ("gap", "The gap, explained", self._waterfalls()),
            ("tuning", "The learning rates", self._each_with_own_runs(self._tuning)),
            ("orders", "The orders", self._orders()),
            ("interactions", "The interactions", self._interactions()),
            ("across", "Across the experiments", self._across()),
            ("claims", "The claims", self._claims()),
            ("settings", "What was trained", self._each_with_own_runs(self._settings)),
            ("cost", "The cost", self._each_with_own_runs(self._cost)),
            ("positions", "Loss by position", self._each_with_own_runs(self._positions)),
        ]
        kept = [Section(self._anchor(n), title, tuple(b)) for n, title, b in sections if b]
        kept.append(Section(self._anchor("provenance"), "Provenance", tuple(self._provenance())))
        scale = "" if study.scale == 1 else f" Run with {study.scale:g} times its steps."
        status = Progress(
            len(study.having("finished")),
            planned_runs(study),
            f"{status_sentence(study)}.{scale}",
            f"Budget: {study.budget.rstrip('.')}." if study.budget else "",
        )
        return Article(
            kind="study",
            name=study.name,
            anchor=self._anchor("top"),
            title=study.title,
            question=study.question,
            lead=(status, *self._trouble()),
            findings=tuple(self._analysis.findings),
            sections=tuple(kept),
        )

    def _anchor(self, name: str) -> str:
        return slug(f"{self._anchors} {name}")

    def _each(self, build: Callable[[Outcome], list[Block]]) -> list[Block]:
        return [block for outcome in self._analysis.outcomes.values() for block in build(outcome)]

    def _each_with_own_runs(self, build: Callable[[Outcome], list[Block]]) -> list[Block]:
        return [block for outcome in self._analysis.with_own_runs for block in build(outcome)]

    def _figure(
        self, name: str, title: str, figure: Figure | None, records: Sequence[RunRecord], note: str = ""
    ) -> list[Block]:
        """A list with the figure, or empty if there is nothing to draw; `name` becomes the file name."""
        if figure is None:
            return []
        file = f"{FIGURES}/{slug(f'{self._figures} {name}')}.svg"
        return [Drawn(figure, title, note, self._label("Figure", title, records), file=file)]

    def _table(
        self, table: Table, title: str, records: Sequence[RunRecord], formulas: dict[str, str] | None = None
    ) -> Tabled:
        return Tabled(table, title, self._label("Table", title, records), formulas or {})

    def _label(self, kind: str, title: str, records: Sequence[RunRecord]) -> str:
        label = self._number(kind)
        self._sources.append(Source(label, title, tuple(records)))
        return label

    def _heading(self, outcome: Outcome, section: str) -> Heading:
        return Heading(outcome.experiment.title, self._anchor(f"{section}-{outcome.experiment.name}"))

    # ---------------------------------------------------------------------------------- sections

    def _trouble(self) -> list[Block]:
        lines = trouble(self._analysis.study)
        if not lines:
            return []
        summary = f"{counted(len(lines), 'run')} without a result"
        return [Fold(summary, (Bullets(tuple(lines)),), open=len(lines) <= 3, style="trouble")]

    def _form(self) -> list[Block]:
        forms = self._analysis.study.forms
        if forms is None:
            return []
        return [
            Text(forms_finding(forms)),
            self._table(
                forms_table(forms), "Largest relative difference to the parallel form, in float64", ()
            ),
            Fold("Every comparison", (Tabled(agreement_table(forms)),)),
            *self._figure(
                "series",
                "Relative error of the series against softmax, by order",
                order_charts.series_error(forms),
                (),
                "The same inputs at every order.",
            ),
        ]

    def _ladder(self, found: Ladder | None) -> list[Block]:
        if found is None:
            return []
        if not found.has_lines:
            return [Bullets(tuple(ladder_findings(found)))]
        records = [record for rung in found.rungs for record in rung.outcome.records]
        metric, during = found.first.metric, ladder_tokens_table(found)
        unit = f", {found.first.difference_unit}" if found.first.difference_unit else ""
        return [
            Bullets(tuple(ladder_findings(found))),
            *self._figure(
                "ladder",
                f"{metric.capitalize()} and difference to {found.baseline} against parameters",
                ladder_chart.ladder(found),
                records,
                f"Left: mean and standard deviation over seeds, and the line through ln {metric} against ln "
                "parameters. Right: difference seed by seed with its 95 % interval, the line through all "
                "seeds and its 95 % band; points of one size are drawn side by side so that they do not "
                "overlap. Lines whose slope is decided are thick, others dashed.",
            ),
            self._table(
                ladder_slopes_table(found), f"Change of the difference to {found.baseline} with size", records
            ),
            self._table(ladder_gaps_table(found), f"Difference to {found.baseline} by size{unit}", records),
            self._table(ladder_values_table(found), f"{metric.capitalize()} by size", records),
            *([Fold("The differences during training", (Text(DURING), Tabled(during)))] if during else []),
            Text(ladder_limits(found), "note"),
        ]

    def _part(self, outcome: Outcome) -> list[Block]:
        experiment, records = outcome.experiment, outcome.records
        direction = "higher" if outcome.higher_is_better else "lower"
        words = f"{outcome.metric.capitalize()}; {direction} is better."
        if outcome.most_seeds == 1:
            words += " One seed only: there are no intervals, and nothing is concluded."
        if experiment.added_seeds:
            words += f" {_added_seeds(experiment.added_seeds)}"
        metric = outcome.metric.capitalize()
        formulas = _formulas(outcome)
        rows = tuple(
            (listed_names(c.name for c in outcome.cells.values() if text in c.attention), text, formula)
            for text, formula in formulas.items()
        )
        return [
            self._heading(outcome, "parts"),
            Text(words),
            *(Text(rule, "note") for rule in rules_of_comparison(outcome)),
            *(Text(f"Note. {note}", "note") for note in mixtures(outcome)),
            self._table(
                parts_table(outcome), f"{metric} and difference to {experiment.baseline}", records, formulas
            ),
            *([Fold("What each cell computes", (Formulas(rows),))] if rows else []),
            *self._figure(
                f"{experiment.name} parts",
                f"{metric} by cell",
                cell_charts.cells(outcome),
                records,
                f"Left: mean and standard deviation over seeds; the dashed line is {experiment.baseline}. "
                "Right: difference seed by seed with its 95 % interval. An arrow marks values beyond "
                "the axis.",
            ),
            *self._figure(
                f"{experiment.name} curves",
                "Learning curves",
                curve_charts.curves(outcome),
                records,
                "Means over seeds; thin lines are seeds. Click a name below the chart to see it alone, with "
                "the shift key to add another.",
            ),
            *self._figure(
                f"{experiment.name} compute",
                "The same against training FLOPs",
                curve_charts.compute(outcome),
                records,
                "Read upwards to compare cells at equal compute; the learning rate decays over each "
                "cell's own run.",
            ),
        ]

    def _waterfalls(self) -> list[Block]:
        ways = [way for found in self._analysis.waterfalls.values() for way in found]
        if not ways:
            return []
        contributions, pairs = ways[0].tested_parts, ways[0].tested_pairs
        lead = (
            "The contribution of a part depends on the parts that are already there, so it is averaged over "
            "all orders of adding the parts in which every combination on the way has a meaning (the Shapley "
            "value). The contributions add up to the whole gap. Each is computed seed by seed; its interval "
            "is Student's t over the seeds, for this contribution alone. It is decided if its p, corrected "
            f"for all {counted(contributions, 'contribution')} on this page (every waterfall, every metric; "
            "Holm), is below 0.05."
        )
        if pairs:
            lead += f" Pairs of parts are corrected in the same way for all {counted(pairs, 'pair')}."
        return [Text(lead), *(block for way in ways for block in self._waterfall(way))]

    def _waterfall(self, found: Contributions) -> list[Block]:
        title, records = found.waterfall.title, self._records_of(found)
        heading = Heading(f"{title}: {found.outcome.experiment.title}", self._anchor(f"gap-{title}"))
        if not found.parts:
            return [heading, Text(waterfall_finding(found))]
        notes = [f"Note. {text}" for text in (diverged_sentence(found),) if text]
        notes += [
            f"Seed {seed} is left out: it has no result for {listed_cells(cells)}."
            for seed, cells in found.incomplete.items()
        ]
        pairs = pairs_table(found)
        return [
            heading,
            Text(waterfall_finding(found)),
            *([Bullets(tuple(sentences))] if (sentences := interaction_sentences(found)) else []),
            *self._figure(
                f"{found.outcome.experiment.name} {title}",
                title,
                effect_charts.waterfall(found),
                records,
                "Each bar begins where the one above ended; lines are 95 % intervals of the contributions.",
            ),
            self._table(contributions_table(found), f"What each part contributes: {title}", records),
            *(
                [Fold("What a part contributes without another and with it", (Tabled(pairs),))]
                if pairs.rows
                else []
            ),
            *(Text(note, "note") for note in notes),
        ]

    def _records_of(self, found: Contributions) -> list[RunRecord]:
        return [record for cell in found.needed for record in found.outcome.cells[cell].records.values()]

    def _tuning(self, outcome: Outcome) -> list[Block]:
        table, tuning = tuning_table(outcome), outcome.experiment.tuning
        if table is None or tuning is None:
            return []
        trials = [trial for cell in tuning.cells.values() for trial in cell.trials]
        cost = sum(trial.seconds or 0.0 for trial in trials)
        seeds = ", ".join(str(seed) for seed in sorted({trial.seed for trial in trials}))
        return [
            self._heading(outcome, "tuning"),
            Text(tuning_finding(outcome)),
            Text(
                f"{counted(len(trials), 'tuning run')} with seed {seeds}, {duration(cost)} in total; the "
                "results above come from other seeds.",
                "note",
            ),
            self._table(table, f"Learning rates of {outcome.experiment.title}", ()),
            *(Text(note, "note") for note in rate_cautions(outcome)),
            *self._figure(
                f"{outcome.experiment.name} learning rates",
                f"{tuning.metric.replace('_', ' ').capitalize()} against learning rate",
                learning_rate_chart.learning_rates(outcome),
                (),
                "Chosen rates are filled. Runs that diverged are left out."
                f"{FACTOR_NOTE if has_factors(tuning) else ''}",
            ),
        ]

    def _orders(self) -> list[Block]:
        blocks = self._each(self._order)
        lead = "Order is the highest power of the score in a kernel; softmax has all of them."
        return [Text(lead), *blocks] if blocks else []

    def _order(self, outcome: Outcome) -> list[Block]:
        title = f"{outcome.metric.capitalize()} against Taylor order and size of the state"
        ordered = [r for r in outcome.records if r.order is not None]
        note = (
            "Large points are means, small ones seeds. Read upwards to compare cells at equal bytes of state."
        )
        found = self._figure(
            f"{outcome.experiment.name} orders", title, order_charts.orders(outcome), ordered, note
        )
        return [self._heading(outcome, "orders"), *found] if found else []

    def _interactions(self) -> list[Block]:
        return [b for f in self._analysis.factorials.values() for b in self._factorial(f)]

    def _factorial(self, factorial: Factorial) -> list[Block]:
        outcome = factorial.outcome
        sentences = [effect_sentence(factorial, effect) for effect in factorial.effects]
        sentences += [
            f"{name}: the existing runs cannot separate it from other effects."
            for name in factorial.inestimable
        ]
        return [
            self._heading(outcome, "interactions"),
            Bullets(tuple(sentences)),
            *self._figure(
                f"{outcome.experiment.name} interactions",
                f"Mean {outcome.metric} for each pair of parts",
                effect_charts.heatmaps(factorial),
                outcome.records,
                "Darker is better; the mean is over the other parts.",
            ),
            self._table(effects_table(factorial), "Effects: main, two-way, and the rest", outcome.records),
            *(Text(note, "note") for note in _cautions(factorial)),
        ]

    def _across(self) -> list[Block]:
        ladder = self._analysis.study.ladder  # has a figure of its own
        outcomes = [outcome for name, outcome in self._analysis.outcomes.items() if name not in ladder]
        records = [record for outcome in outcomes for record in outcome.records]
        return self._figure(
            "across",
            "The same cells over all experiments",
            cell_charts.across(outcomes),
            records,
            "Each experiment has its own task; bars are standard deviations over seeds.",
        )

    def _claims(self) -> list[Block]:
        judgements = self._analysis.judgements
        if not judgements:
            return []
        names = {j.claim.experiment for j in judgements}
        records = [r for n, o in self._analysis.outcomes.items() if n in names for r in o.records]
        self._label("Table", "Claims", records)
        lead = (
            f"Of {counted(len(judgements), 'claim')}: {verdict_counts(judgements)}. A claim agrees only "
            "where its numbers show it at 95 % after correction for all claims of this page (Holm). "
            "“Undecided” means that the runs do not answer the question."
        )
        origin = self._analysis.claims_from
        note = [Text(f"Claims from {origin}.", "note")] if origin else []
        return [Text(lead), *note, Claims(tuple(_card(judgement) for judgement in judgements))]

    def _settings(self, outcome: Outcome) -> list[Block]:
        table = settings_table(outcome)
        if not table.rows:
            return []
        title = f"What differs between the cells of {outcome.experiment.title}"
        return [
            self._heading(outcome, "settings"),
            Text("All cells were trained with:"),
            Facts(tuple(common_settings(outcome))),
            self._table(table, title, outcome.records),
        ]

    def _cost(self, outcome: Outcome) -> list[Block]:
        table = cost_table(outcome)
        if not table.rows:
            return []
        title = f"Cost by cell, means over finished runs: {outcome.experiment.title}"
        return [
            self._table(table, title, outcome.records),
            *(Text(note, "note") for note in self._speed_notes(outcome)),
            *self._figure(
                f"{outcome.experiment.name} memory",
                f"{outcome.metric.capitalize()} against the bytes kept at the trained length",
                cell_charts.memory(outcome),
                outcome.records,
                "A state has a fixed size at any length; softmax keeps keys and values, counted here at "
                "the trained length. Large points are means, small ones seeds.",
            ),
        ]

    def _speed_notes(self, outcome: Outcome) -> list[str]:
        cells = [cell for cell in outcome.cells.values() if cell.finished()]
        machines = {in_one_line(cell.speed.machine) for cell in cells if cell.speed is not None}
        notes = [f"Tokens/s: {listed(sorted(machines))}."] if machines else []
        if any(cell.tokens_per_second is None for cell in cells):
            name = self._analysis.study.name
            notes.append(f"Tokens/s that are missing: maclaurin study {name} --time measures them.")
        return notes

    def _positions(self, outcome: Outcome) -> list[Block]:
        title = f"Test loss by position in the text: {outcome.experiment.title}"
        note = "Means over seeds. Positions without a score are left out."
        return self._figure(
            f"{outcome.experiment.name} positions",
            title,
            curve_charts.positions(outcome),
            outcome.records,
            note,
        )

    def _provenance(self) -> list[Block]:
        study = self._analysis.study
        count = counted(len(list(study.labelled())), "run")
        return [
            Text("The runs behind each figure and table, and where they were made."),
            Fold("By figure and table", (Tabled(figures_table(self._sources)),)),
            Fold(f"All {count}", (Tabled(runs_table(study)),)),
        ]


def _added_seeds(seeds: Sequence[int]) -> str:
    names = f"{'Seed' if len(seeds) == 1 else 'Seeds'} {listed([str(seed) for seed in seeds])}"
    return (
        f"{names} {'was' if len(seeds) == 1 else 'were'} added later: if seeds were added until a p was "
        "small (optional stopping), p and intervals are too optimistic."
    )


def _card(judgement: Judgement) -> ClaimCard:
    claim = judgement.claim
    p = "" if judgement.p is None else f"p = {judgement.p:.2g} after Holm's correction"
    facts = (
        ("published", published_text(judgement)),
        ("ours", judgement.ours),
        ("margin", margin_text(judgement)),
        ("test", p),
        ("experiment", claim.experiment),
        ("note", "; ".join(judgement.notes)),
    )
    shown = tuple((name, text) for name, text in facts if text)
    return ClaimCard(claim.says, judgement.verdict, TONES[judgement.verdict], shown)


def _formulas(outcome: Outcome) -> dict[str, str]:
    """Notation → formula, for notations that this version can parse."""
    found = {}
    for text in dict.fromkeys(t for cell in outcome.cells.values() for t in cell.attention):
        try:
            found[text] = "\n".join(spec.formula for spec in specs_in(text))
        except MaclaurinError:
            continue
    return found


def _cautions(factorial: Factorial) -> Iterator[str]:
    """What a reader of the effects should know."""
    if factorial.diverged:
        yield (
            f"{listed_cells(factorial.diverged)} diverged. The shares are about the finished runs only, "
            "which leave out a bad result, so no effect has a p or is decided."
        )
    else:
        yield (
            "An effect is decided if two tests agree, both corrected for the number of effects (Holm): F, "
            "which pools the noise of all cells, and its contrasts seed by seed, each with one value per "
            "seed (Student's t, Bonferroni over the contrasts). Intervals in the sentences are seed by seed."
        )
    if not factorial.is_balanced:
        lost = [c.name for c in factorial.outcome.cells.values() if not c.values and not c.diverged]
        text = "Not every combination has every seed, so shares need not add up to 100 %"
        yield text + (f"; {listed_cells(lost)} did not finish." if lost else ".")
    if factorial.spreads_differ:
        yield (
            "The spread over seeds differs between cells (Bartlett's test, p < 0.05), so F, which pools it, "
            "overstates the significance of some effects."
        )
