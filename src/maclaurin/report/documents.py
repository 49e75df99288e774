"""The tables of a report as one Markdown file."""

from __future__ import annotations

from collections.abc import Iterator

from maclaurin.report.analysis import Analysis
from maclaurin.report.sentences import effect_sentence, findings, status_sentence
from maclaurin.report.tables import (
    claims_table,
    cost_table,
    effects_table,
    forms_table,
    markdown,
    parts_table,
)


def tables_md(analyses: list[Analysis]) -> str:
    """Findings, parts, effects, cost and claims of every study."""
    return "\n".join(part for analysis in analyses for part in _study(analysis))


def _study(analysis: Analysis) -> Iterator[str]:
    study = analysis.study
    yield f"# {study.title}\n\n{study.question}\n\n{status_sentence(study)}.\n"
    yield "\n".join(f"- {s}" for s in findings(analysis)) + "\n"
    if study.forms is not None:
        yield "## The form\n\n" + markdown(forms_table(study.forms))
    for name, outcome in analysis.outcomes.items():
        yield f"## {outcome.experiment.title}\n\n" + markdown(parts_table(outcome))
        if (factorial := analysis.factorials.get(name)) is not None:
            yield "\n".join(f"- {effect_sentence(factorial, effect)}" for effect in factorial.effects) + "\n"
            yield markdown(effects_table(factorial))
        cost = cost_table(outcome)
        if cost.rows:
            yield "### Cost\n\n" + markdown(cost)
    if analysis.judgements:
        yield "## The claims\n\n" + markdown(claims_table(analysis.judgements))
