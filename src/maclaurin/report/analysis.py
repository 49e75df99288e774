"""Studies with all results of a report, each computed once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import final

from maclaurin.report.anova import Factorial
from maclaurin.report.contributions import Contributions, contributions, correct_over_page
from maclaurin.report.formatting import counted
from maclaurin.report.ladder import Ladder, ladder_of
from maclaurin.report.outcome import Outcome
from maclaurin.report.sentences import (
    experiment_finding,
    factorial_finding,
    forms_finding,
    headline,
    ladder_findings,
    verdict_counts,
    waterfalls_finding,
)
from maclaurin.report.verdict import Judgement, judge
from maclaurin.study.run_record import StudyRecord


@final
class Analysis:
    """Outcomes by experiment, factorials of experiments with axes, waterfalls, a ladder, and judgements.

    Created by `analyse`, which corrects claims and contributions over all studies of a page.
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
        """Experiment → contributions of the parts, for every waterfall that has runs."""
        return {name: found for name, outcome in self.outcomes.items() if (found := contributions(outcome))}

    @functools.cached_property
    def ladder(self) -> Ladder | None:
        """The experiments that the study declares as a ladder."""
        return ladder_of(self.outcomes, self.study.ladder)

    @functools.cached_property
    def with_own_runs(self) -> tuple[Outcome, ...]:
        """Outcomes with distinct runs: of experiments that share all runs, only the first."""
        first: dict[object, Outcome] = {}
        for outcome in self.outcomes.values():
            runs = frozenset(key for cell in outcome.experiment.cells for key in cell.runs.values())
            first.setdefault(runs or outcome.experiment.name, outcome)
        return tuple(first.values())

    @property
    def findings(self) -> list[str]:
        """The study in a few sentences; the sections of the page say more."""
        sentences = [forms_finding(self.study.forms)] if self.study.forms else []
        sentences += ladder_findings(self.ladder) if self.ladder else []
        sentences += [waterfalls_finding(ways) for ways in self._waterfalls_by_title.values()]
        for name, outcome in self.outcomes.items():
            factorial = self.factorials.get(name)
            effects = factorial_finding(factorial) if factorial else ""
            sentences.append(effects or experiment_finding(outcome))
        if self.judgements:
            sentences.append(
                f"Of {counted(len(self.judgements), 'claim')}: {verdict_counts(self.judgements)}."
            )
        return [sentence for sentence in sentences if sentence]

    @property
    def _waterfalls_by_title(self) -> dict[str, list[Contributions]]:
        """Title → the waterfall with each metric."""
        found: dict[str, list[Contributions]] = {}
        for ways in self.waterfalls.values():
            for way in ways:
                found.setdefault(way.waterfall.title, []).append(way)
        return found

    @property
    def headline(self) -> str:
        """One line for the terminal."""
        return headline(self.study, self.judgements)


def analyse(studies: Sequence[tuple[StudyRecord, str]]) -> list[Analysis]:
    """The studies of one page, each with the source of its claims.

    Holm's correction covers all claims of the page, and all contributions of its waterfalls.
    """
    analyses = [Analysis(study, origin) for study, origin in studies]
    claims = [(claim, analysis.outcomes) for analysis in analyses for claim in analysis.study.claims]
    found = iter(judge(claims))
    for analysis in analyses:
        analysis.judgements = [next(found) for _ in analysis.study.claims]
    correct_over_page([way for a in analyses for found in a.waterfalls.values() for way in found])
    return analyses
