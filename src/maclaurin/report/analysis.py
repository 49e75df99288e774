"""Studies with everything a report says about them worked out once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

from maclaurin.report.anova import Factorial
from maclaurin.report.contributions import Contributions, contributions
from maclaurin.report.formatting import counted
from maclaurin.report.outcome import Outcome
from maclaurin.report.sentences import (
    experiment_finding,
    factorial_finding,
    forms_finding,
    headline,
    tuning_finding,
    verdict_counts,
    waterfall_finding,
)
from maclaurin.report.verdict import Judgement, judge
from maclaurin.study.run_record import StudyRecord


@final
class Analysis:
    """Outcomes by experiment, factorials where there are axes, waterfalls, a judgement per claim.

    Made by `analyse`: claims are corrected over all studies of a page.
    """

    def __init__(self, study: StudyRecord, claims_from: str = "") -> None:
        self.study, self.claims_from = study, claims_from
        self.outcomes = {e.name: Outcome(study, e) for e in study.experiments}
        self.judgements: list[Judgement] = []

    @functools.cached_property
    def factorials(self) -> dict[str, Factorial]:
        """Experiments with two axes or more."""
        return {
            name: Factorial(outcome)
            for name, outcome in self.outcomes.items()
            if len(outcome.experiment.axes) >= 2 and outcome.most_seeds
        }

    @functools.cached_property
    def waterfalls(self) -> dict[str, list[Contributions]]:
        """Experiment → what each part brings, for every waterfall that has runs."""
        return {name: found for name, outcome in self.outcomes.items() if (found := contributions(outcome))}

    @functools.cached_property
    def with_own_runs(self) -> tuple[Outcome, ...]:
        """For what is about runs, not their metric: the first of the experiments that share all of theirs."""
        first: dict[object, Outcome] = {}
        for outcome in self.outcomes.values():
            runs = frozenset(key for cell in outcome.experiment.cells for key in cell.runs.values())
            first.setdefault(runs or outcome.experiment.name, outcome)
        return tuple(first.values())

    @property
    def findings(self) -> list[str]:
        """The study in a few sentences."""
        sentences = [forms_finding(self.study.forms)] if self.study.forms else []
        for name, outcome in self.outcomes.items():
            factorial = self.factorials.get(name)
            effects = factorial_finding(factorial) if factorial else ""
            sentences += [waterfall_finding(each) for each in self.waterfalls.get(name, [])]
            sentences.append(effects or experiment_finding(outcome))
            sentences += [tuning_finding(outcome)] if outcome in self.with_own_runs else []
        if self.judgements:
            sentences.append(
                f"Of {counted(len(self.judgements), 'claim')}: {verdict_counts(self.judgements)}."
            )
        return [sentence for sentence in sentences if sentence]

    @property
    def headline(self) -> str:
        """One line for the terminal."""
        return headline(self.study, self.judgements)


def analyse(studies: Sequence[tuple[StudyRecord, str]]) -> list[Analysis]:
    """The studies of one page, each with where its claims come from; Holm's correction is over all claims."""
    analyses = [Analysis(study, origin) for study, origin in studies]
    claims = [(claim, analysis.outcomes) for analysis in analyses for claim in analysis.study.claims]
    found = iter(judge(claims))
    for analysis in analyses:
        analysis.judgements = [next(found) for _ in analysis.study.claims]
    return analyses
