"""What the numbers support, in words, and nothing they do not."""

from __future__ import annotations

import itertools
import math

from maclaurin.report.analysis import Analysis
from maclaurin.report.anova import Effect, Factorial
from maclaurin.report.numbers import chance, counted, interval, listed, plain, power, ratio, share, signed
from maclaurin.report.outcome import Outcome
from maclaurin.report.verdict import AGREES, DISAGREES, NOT_RUN, UNCLEAR, Judgement
from maclaurin.study.record import FormsRecord, RunRecord, StudyRecord

SHORT = {
    AGREES: "agree",
    DISAGREES: "disagree",
    UNCLEAR: "not distinguishable at this budget",
    NOT_RUN: "not run",
}


# ------------------------------------------------------------------------------------- the study


def planned_runs(study: StudyRecord) -> int:
    """Cells × seeds of all experiments."""
    return sum(len(e.cells) * len(e.seeds) for e in study.experiments)


def status_sentence(study: StudyRecord) -> str:
    """56 of 60 runs finished; 2 diverged, 1 crashed, 1 is not there yet."""
    planned = max(planned_runs(study), len(study.runs))
    by_status = {s: [r for r in study.runs if r.status == s] for s in ("finished", "diverged", "crashed")}
    absent = planned - sum(len(runs) for runs in by_status.values())
    rest = [f"{len(by_status[s])} {s}" for s in ("diverged", "crashed") if by_status[s]]
    if absent:
        rest.append(f"{absent} not there yet")
    return f"{len(by_status['finished'])} of {counted(planned, 'run')} finished" + (
        f"; {', '.join(rest)}" if rest else ""
    )


def trouble(study: StudyRecord) -> list[str]:
    """One line for each run that did not finish and each planned run that has no record."""
    lines = [
        f"{_run(run)}: {_became(run)}" + (f" ({run.message})" if run.message else "")
        for run in study.runs
        if run.status != "finished"
    ]
    metrics = {e.name: e.metric for e in study.experiments}
    lines += [
        f"{_run(run)}: finished without {metrics[run.experiment].replace('_', ' ')}"
        for run in study.runs
        if run.status == "finished" and getattr(run, metrics.get(run.experiment, ""), 0) is None
    ]
    there = {(run.experiment, run.cell, run.seed) for run in study.runs}
    for e in study.experiments:
        lines += [
            f"{e.name} · {cell} · seed {seed}: no record"
            for cell, seed in itertools.product(e.cells, e.seeds)
            if (e.name, cell, seed) not in there
        ]
    return lines


def _run(run: RunRecord) -> str:
    return f"{run.experiment} · {run.cell} · seed {run.seed}"


def _became(run: RunRecord) -> str:
    if run.status in ("diverged", "crashed", "stopped"):
        return f"{run.status} at step {run.step:,} of {run.steps:,}"
    return "waiting"


def verdict_counts(judgements: list[Judgement]) -> str:
    """5 claims agree, 1 disagrees, …"""
    counts = {v: sum(j.verdict == v for j in judgements) for v in (AGREES, DISAGREES, UNCLEAR, NOT_RUN)}
    parts = []
    for verdict, count in counts.items():
        if count:
            word = SHORT[verdict]
            parts.append(f"{count} {word + 's' if count == 1 and word.endswith('agree') else word}")
    return ", ".join(parts)


def headline(study: StudyRecord, judgements: list[Judgement]) -> str:
    """One line for the terminal."""
    claims = f" Of {counted(len(judgements), 'claim')}: {verdict_counts(judgements)}." if judgements else ""
    return f"{study.name}: {status_sentence(study)}.{claims}"


def findings(analysis: Analysis) -> list[str]:
    """The study in a few sentences."""
    study, judgements = analysis.study, analysis.judgements
    sentences = [forms_finding(study.forms)] if study.forms else []
    for name, outcome in analysis.outcomes.items():
        factorial = analysis.factorials.get(name)
        effects = factorial_finding(factorial) if factorial else ""
        sentences.append(effects or experiment_finding(outcome))
    if judgements:
        sentences.append(f"Of {counted(len(judgements), 'claim')}: {verdict_counts(judgements)}.")
    return [sentence for sentence in sentences if sentence]


def forms_finding(forms: FormsRecord) -> str:
    """Forms agree to …; the series …"""
    errors = [e for row in forms.agreement if (e := row.get("error")) is not None]
    text = f"The forms agree to {power(max(errors))}." if errors else ""
    series = sorted((r for r in forms.series if r.get("error") is not None), key=lambda r: r["order"])
    if len(series) > 1:
        first, last = series[0], series[-1]
        text += (
            f" The series is {power(first['error'])} away from softmax at order {first['order']} and "
            f"{power(last['error'])} at order {last['order']}."
        )
    return text.strip()


def experiment_finding(outcome: Outcome) -> str:
    """Who leads, who is tied with the baseline, who is behind it."""
    experiment = outcome.experiment
    head = f"{experiment.title}: "
    if not any(cell.values for cell in outcome.cells.values()):
        return head + "no run has finished yet."
    if len(outcome.fit.seeds) < 2:
        return head + f"one seed only, so {outcome.metric} can be looked at but nothing concluded."
    baseline, mean = experiment.baseline, outcome.means[experiment.baseline]
    if mean is None:
        return head + f"{baseline}, which the others are compared with, has no finished run yet."
    groups = {s: [] for s in ("ahead", "not distinguishable", "behind")}
    for name in outcome.best_first():
        standing = outcome.standing(name)
        if standing in groups:
            groups[standing].append(name)
    text = head + f"{baseline} has {_a(outcome.metric)} of {plain(mean.value)}"
    parts = [
        f"{listed(_some(names))} {verb}" + _range(outcome, names, standing)
        for standing, verb in (
            ("ahead", f"{_is(groups['ahead'])} better"),
            ("not distinguishable", f"{_is(groups['not distinguishable'])} not distinguishable from it"),
            ("behind", f"{_is(groups['behind'])} behind"),
        )
        if (names := groups[standing])
    ]
    return text + ("; " + "; ".join(parts) if parts else "") + "."


def factorial_finding(factorial: Factorial) -> str:
    """Which effects the numbers support, largest first; nothing where no effect can be tested."""
    tested = [effect for effect in factorial.effects if effect.p is not None]
    if not tested:
        return ""
    found = sorted((e for e in tested if e.supported), key=lambda e: -e.share)
    others = [effect.name for effect in tested if not effect.supported]
    parts = [f"{effect.name} explains {share(effect.share)} of the variance" for effect in found[:1]]
    parts += [f"{effect.name} {share(effect.share)}" for effect in found[1:]]
    text = ", ".join(parts)
    if others:
        text += ("; " if text else "") + f"{listed(others)} {_is(others)} not distinguishable at this budget"
    return f"{factorial.outcome.experiment.title}: {text}."


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _some(names: list[str], most: int = 6) -> list[str]:
    return names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} others"]


def _range(outcome: Outcome, names: list[str], standing: str) -> str:
    """' by 0.12 to 0.45', where the standing is sure."""
    differences = [d.value for name in names if (d := outcome.differences[name]) is not None]
    sizes = sorted(abs(value) for value in differences if math.isfinite(value))
    if standing == "not distinguishable" or not sizes:
        return ""
    return f" by {plain(sizes[0])}" + (f" to {plain(sizes[-1])}" if len(sizes) > 1 else "")


# ----------------------------------------------------------------------------------- the effects


def effect_sentence(factorial: Factorial, effect: Effect) -> str:
    """One sentence that the numbers support."""
    numbers = _test(effect, factorial.noise_df)
    if effect.p is None:
        return f"{effect.name}: one seed only, so there is no noise to compare it with."
    if not effect.supported:
        return f"{effect.name}: not distinguishable at this budget ({numbers})."
    if effect.term[0] not in factorial.axes:
        return f"Three or more parts act together in ways that pairs do not explain ({numbers})."
    return (_main if len(effect.term) == 1 else _interaction)(factorial, effect, numbers)


def _test(effect: Effect, noise_df: int) -> str:
    if effect.f is None or effect.p is None:
        return f"{share(effect.share)} of the variance"
    test = f"F({effect.df}, {noise_df}) = {ratio(effect.f)}, {chance(effect.p)}"
    return f"{share(effect.share)} of the variance, {test}"


def _main(factorial: Factorial, effect: Effect, numbers: str) -> str:
    (axis,) = effect.term
    outcome = factorial.outcome
    means = factorial.marginal(axis)
    ranked = sorted(means, key=lambda level: means[level], reverse=outcome.higher_is_better)
    best, worst = ranked[0], ranked[-1]
    tests = math.comb(len(ranked), 2)
    apart = {level: factorial.between(axis, level, best, tests) for level in ranked[1:]}
    told = f"{axis} makes a difference ({numbers})"
    last = apart[worst]
    if last is None or outcome.standing_of(last) != "behind":
        return f"{told}, though no two of its levels are surely apart."
    with_best = [level for level, d in apart.items() if outcome.standing_of(d) != "behind"]
    lead = (
        f"{best} is best"
        if not with_best
        else f"{listed([best, *with_best])} lead and are not distinguishable from each other"
        if len(with_best) == 1
        else f"{best} leads, with {listed(with_best)} not distinguishable from it"
    )
    return (
        f"{told}: averaged over the other parts {lead}; {worst} is last, "
        f"{signed(last.value)} {interval(last)} in {outcome.metric} against {best}."
    )


def _interaction(factorial: Factorial, effect: Effect, numbers: str) -> str:
    first, second = effect.term
    told = f"What {first} does depends on {second} ({numbers})"
    rows = list(itertools.combinations(factorial.levels[first], 2))
    columns = list(itertools.combinations(factorial.levels[second], 2))
    tests = len(rows) * len(columns)
    found = []
    for row, column in itertools.product(rows, columns):
        twist = factorial.twist(effect.term, row, column, tests)
        steps = [factorial.step(effect.term, row, level) for level in column]
        if twist is not None and twist.excludes_zero and None not in steps:
            found.append((twist, row, column, [step or 0.0 for step in steps]))
    if not found:
        return f"{told}, though no single pair of levels shows it surely."
    twist, row, column, steps = max(found, key=lambda item: abs(item[0].value))
    return (
        f"{told}: from {row[0]} to {row[1]}, {factorial.outcome.metric} changes by "
        f"{signed(steps[0])} under {column[0]} but by {signed(steps[1])} under {column[1]} "
        f"(a difference of {signed(twist.value)} {interval(twist)})."
    )
