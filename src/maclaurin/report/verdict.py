"""A claim held against the runs.

    tied      agrees where every difference to the first cell has its interval within ±within, or a mean
              within ±within and an interval around 0; disagrees where an interval lies wholly outside
    behind    agrees where every interval lies on the worse side of 0; disagrees where one lies on the better
    ordered   agrees where no step to the next cell is surely worse and the last is surely better than the
              first; disagrees where a step is surely worse

Anything else is not distinguishable at this budget. A claim about cells that have no result was not run,
unless those that have one already contradict it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, final

from maclaurin.report.numbers import interval, listed, signed
from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import Estimate
from maclaurin.study.claim import Behind, Claim, Ordered, Tied

Verdict = Literal["agrees", "disagrees", "not distinguishable at this budget", "not run"]
VERDICTS: tuple[Verdict, ...] = ("agrees", "disagrees", "not distinguishable at this budget", "not run")
AGREES, DISAGREES, UNCLEAR, NOT_RUN = VERDICTS


@final
@dataclass(frozen=True)
class Judgement:
    """A claim, our numbers beside it, the verdict, and what a reader should know about it."""

    claim: Claim
    verdict: Verdict
    ours: str
    notes: tuple[str, ...]


def judge(claim: Claim, outcomes: dict[str, Outcome]) -> Judgement:
    """The verdict of the runs on one claim."""
    outcome = outcomes.get(claim.experiment)
    if outcome is None or any(name not in outcome.cells for name in claim.cells):
        return Judgement(
            claim, NOT_RUN, "–", (f"experiment {claim.experiment} is not part of these records",)
        )
    missing = [name for name in claim.cells if not outcome.cells[name].has_result]
    there = [name for name in claim.cells if name not in missing]
    notes = [*_what_failed(outcome, claim.cells)]
    if claim.cells[0] in missing or len(there) < 2:
        return Judgement(claim, NOT_RUN, _means(outcome, there) or "–", tuple(notes))
    pairs = (
        list(itertools.pairwise(there)) if isinstance(claim, Ordered) else [(n, there[0]) for n in there[1:]]
    )
    if isinstance(claim, Ordered):
        pairs = [(after, before) for before, after in pairs]
    differences = {pair: outcome.compare(*pair) for pair in pairs}
    notes += _one_seed(differences)
    if isinstance(claim, Tied):
        verdict = _tied(claim, differences, notes)
    elif isinstance(claim, Behind):
        verdict = _behind(outcome, differences)
    elif isinstance(claim, Ordered):
        verdict = _ordered(outcome, differences, outcome.compare(there[-1], there[0]), notes)
    else:
        raise TypeError(f"{type(claim).__name__} is a kind of claim this report cannot judge.")
    if missing and verdict != DISAGREES:
        verdict = NOT_RUN
    return Judgement(claim, verdict, _ours(outcome, claim, there, differences), tuple(notes))


Differences = dict[tuple[str, str], Estimate | None]


def _tied(claim: Tied, differences: Differences, notes: list[str]) -> Verdict:
    found = [_is_tied(difference, claim.within) for difference in differences.values()]
    if False in found:
        return DISAGREES
    if None in found:
        return UNCLEAR
    wide = [
        pair[0]
        for pair, d in differences.items()
        if d is not None and d.low is not None and d.high is not None and max(-d.low, d.high) > claim.within
    ]
    if wide:
        notes.append(f"weak: the interval of {listed(wide)} reaches beyond ±{claim.within:g}")
    return AGREES


def _is_tied(difference: Estimate | None, within: float) -> bool | None:
    if difference is None or difference.low is None or difference.high is None:
        return None
    low, high = difference.low, difference.high
    if low > within or high < -within:
        return False
    inside = -within <= low and high <= within
    around_zero = abs(difference.value) < within and low <= 0 <= high
    return True if inside or around_zero else None


def _behind(outcome: Outcome, differences: Differences) -> Verdict:
    standings = {outcome.standing_of(difference) for difference in differences.values()}
    if "ahead" in standings:
        return DISAGREES
    return AGREES if standings == {"behind"} else UNCLEAR


def _ordered(outcome: Outcome, steps: Differences, whole: Estimate | None, notes: list[str]) -> Verdict:
    wrong = [pair for pair, step in steps.items() if outcome.standing_of(step) == "behind"]
    if wrong:
        notes += [f"{after} is behind {before}" for after, before in wrong]
        return DISAGREES
    if whole is None or outcome.standing_of(whole) != "ahead":
        return UNCLEAR
    for (after, before), step in steps.items():
        if step is not None and outcome.harm(step).value > 0:
            notes.append(f"{after} has the worse mean than {before}, within the noise")
    return AGREES


def _one_seed(differences: Differences) -> list[str]:
    alone = [pair[0] for pair, d in differences.items() if d is not None and d.n < 2]
    return [f"one seed only for {listed(alone)}: no interval, so no conclusion"] if alone else []


def _what_failed(outcome: Outcome, names: tuple[str, ...]) -> list[str]:
    notes = []
    for name in names:
        cell = outcome.cells[name]
        planned = len(outcome.experiment.seeds)
        if cell.diverged:
            notes.append(f"{name} diverged in {len(cell.diverged)} of {planned} runs, which counts as worst")
        if cell.crashed:
            notes.append(f"{name} crashed in {len(cell.crashed)} of {planned} runs")
        if not cell.has_result and not cell.crashed:
            notes.append(f"{name} has no finished run")
        if name in outcome.fit.restless:
            notes.append(f"{name} varies far more between seeds than the others, so its own spread is used")
    return notes


def _ours(outcome: Outcome, claim: Claim, there: list[str], differences: Differences) -> str:
    if isinstance(claim, Ordered):
        return _means(outcome, there)
    shown = [f"{pair[0]} {_shown(difference)}" for pair, difference in differences.items()]
    return f"{_means(outcome, there[:1])}; difference to it: " + ", ".join(shown)


def _means(outcome: Outcome, names: list[str]) -> str:
    parts = []
    for name in names:
        mean = outcome.means[name]
        text = "diverged" if mean is None else f"{mean.value:.3f}"
        parts.append(f"{name} {text}")
    return " → ".join(parts) if len(parts) > 1 else "".join(parts)


def _shown(difference: Estimate | None) -> str:
    if difference is None:
        return "unknown"
    if math.isinf(difference.value):
        return "diverged"
    return f"{signed(difference.value)} {interval(difference)}".rstrip()
