"""Claims tested on the runs.

Each claim is about pairs of cells, and holds only if it holds for every pair:

    alike     cell − first: the interval lies within ± the margin (an equivalence test, TOST)
    behind    cell − first: significantly worse
    ordered   cell − the one before it: significantly better

It is contradicted if one pair significantly shows the opposite (corrected for the number of pairs). Holm's
method corrects the p of a claim for the number of claims on the page. Claims that could not be tested count
too, so that missing data never helps. A claim that neither holds nor is contradicted at 95 % is undecided. A
claim about cells without a result is not run, unless the other cells already contradict it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from maclaurin.report.formatting import counted, interval, listed_cells, plain, signed
from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import CONFIDENCE, Difference, holm
from maclaurin.study.claims import Alike, AnyClaim, Ordered
from maclaurin.wording import in_list

Verdict = Literal["agrees", "disagrees", "undecided", "not run"]
VERDICTS: tuple[Verdict, ...] = ("agrees", "disagrees", "undecided", "not run")
AGREES, DISAGREES, UNDECIDED, NOT_RUN = VERDICTS
LIMIT = 1 - CONFIDENCE


@final
@dataclass(frozen=True)
class Pair:
    """One comparison of a claim, with the one-sided p that it holds and that it is contradicted."""

    cell: str
    other: str
    difference: Difference | None
    p_holds: float
    p_contradicted: float

    @property
    def is_decided(self) -> bool:
        """Whether this pair alone, uncorrected, holds or contradicts."""
        return 2 * min(self.p_holds, self.p_contradicted) < LIMIT


@final
@dataclass(frozen=True)
class Judgement:
    """A claim, our numbers for it, the verdict, and notes for the reader.

    p   two-sided, after Holm's correction; None if the claim was not run
    """

    claim: AnyClaim
    verdict: Verdict
    p: float | None
    ours: str
    notes: tuple[str, ...]


@final
@dataclass(frozen=True)
class _Test:
    """A claim before the correction."""

    claim: AnyClaim
    outcome: Outcome | None
    pairs: tuple[Pair, ...]
    missing: tuple[str, ...]

    @property
    def p_holds(self) -> float:
        if self.missing or not self.pairs:
            return 1.0
        return max(pair.p_holds for pair in self.pairs)

    @property
    def p_contradicted(self) -> float:
        if not self.pairs:
            return 1.0
        return min(1.0, len(self.pairs) * min(pair.p_contradicted for pair in self.pairs))

    @property
    def p(self) -> float:
        return min(1.0, 2 * min(self.p_holds, self.p_contradicted))


Claims = Sequence[tuple[AnyClaim, dict[str, Outcome]]]


def judge(claims: Claims) -> list[Judgement]:
    """The verdicts on all claims of a page; each comes with the outcomes of its own study."""
    tests = [_test(claim, outcomes) for claim, outcomes in claims]
    corrected = holm([test.p for test in tests])
    return [_judgement(test, p, len(tests)) for test, p in zip(tests, corrected, strict=True)]


def _test(claim: AnyClaim, outcomes: dict[str, Outcome]) -> _Test:
    outcome = outcomes.get(claim.experiment)
    if outcome is None or any(name not in outcome.cells for name in claim.cells):
        return _Test(claim, None, (), claim.cells)
    there = [name for name in claim.cells if outcome.cells[name].has_result]
    missing = tuple(name for name in claim.cells if name not in there)
    if claim.cells[0] in missing and not isinstance(claim, Ordered):
        return _Test(claim, outcome, (), missing)
    return _Test(claim, outcome, tuple(_pairs(claim, outcome, there)), missing)


def _pairs(claim: AnyClaim, outcome: Outcome, there: list[str]) -> list[Pair]:
    if isinstance(claim, Ordered):
        return [_ordered(outcome, cell, other) for other, cell in itertools.pairwise(there)]
    first, *others = there
    if isinstance(claim, Alike):
        return [_alike(outcome, cell, first, claim.within) for cell in others]
    return [_behind(outcome, cell, first) for cell in others]


def _alike(outcome: Outcome, cell: str, first: str, within: float) -> Pair:
    difference = outcome.compare(cell, first)
    if difference is None:
        return Pair(cell, first, None, 1.0, 1.0)
    low, high = outcome.margin(first, within)
    inside = max(difference.p_above(low), difference.p_below(high))
    outside = min(difference.p_above(high), difference.p_below(low))
    return Pair(cell, first, difference, inside, outside)


def _behind(outcome: Outcome, cell: str, first: str) -> Pair:
    difference = outcome.compare(cell, first)
    if difference is None:
        return Pair(cell, first, None, 1.0, 1.0)
    worsening = outcome.worsening(difference)
    return Pair(cell, first, difference, worsening.p_above(0.0), worsening.p_below(0.0))


def _ordered(outcome: Outcome, cell: str, before: str) -> Pair:
    turned = _behind(outcome, cell, before)
    return replace(turned, p_holds=turned.p_contradicted, p_contradicted=turned.p_holds)


# -------------------------------------------------------------------------------------- in words


def _judgement(test: _Test, p: float, claims: int) -> Judgement:
    claim, outcome = test.claim, test.outcome
    if outcome is None:
        note = f"experiment {claim.experiment} with these cells is not part of the records"
        return Judgement(claim, NOT_RUN, None, "–", (note,))
    verdict: Verdict = UNDECIDED
    if p < LIMIT:
        verdict = AGREES if test.p_holds <= test.p_contradicted else DISAGREES
    if (test.missing or not test.pairs) and verdict != DISAGREES:
        verdict = NOT_RUN
    notes = [*_failures(outcome, claim.cells), *_one_seed(test.pairs)]
    if verdict == DISAGREES:
        wrong = [_named(claim, pair) for pair in test.pairs if 2 * pair.p_contradicted < LIMIT]
        notes.append(f"contradicted by {listed_cells(wrong)}")
    if verdict in (UNDECIDED, DISAGREES):
        notes += _what_is_undecided(test, verdict, claims)
    return Judgement(
        claim, verdict, None if verdict == NOT_RUN else p, _ours(claim, outcome, test), tuple(notes)
    )


def _what_is_undecided(test: _Test, verdict: Verdict, claims: int) -> list[str]:
    open_ones = [pair for pair in test.pairs if not pair.is_decided and pair.difference is not None]
    against = [pair for pair in test.pairs if 2 * pair.p_contradicted < LIMIT]
    corrected = f"but not after correction for {counted(claims, 'claim')}"
    notes = []
    if verdict == UNDECIDED and against:
        notes.append(
            f"contradicted by {listed_cells([_named(test.claim, p) for p in against])} alone, {corrected}"
        )
    if open_ones:
        some = (
            ""
            if len(open_ones) == len(test.pairs)
            else f" ({len(open_ones)} of {len(test.pairs)} comparisons)"
        )
        notes.append(f"undecided: {listed_cells([_named(test.claim, pair) for pair in open_ones])}{some}")
    elif not against and all(pair.difference is not None for pair in test.pairs):
        notes.append(f"every comparison is decided alone, {corrected}")
    return notes


def _named(claim: AnyClaim, pair: Pair) -> str:
    return f"{pair.other} → {pair.cell}" if isinstance(claim, Ordered) else pair.cell


def _one_seed(pairs: Sequence[Pair]) -> list[str]:
    alone = [pair.cell for pair in pairs if pair.difference is not None and pair.difference.n < 2]
    return [f"one seed for {listed_cells(alone)}: no interval, so no conclusion"] if alone else []


def _failures(outcome: Outcome, names: Sequence[str]) -> list[str]:
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
    return notes


def _ours(claim: AnyClaim, outcome: Outcome, test: _Test) -> str:
    names = [name for name in claim.cells if outcome.cells[name].has_result]
    if isinstance(claim, Ordered):
        means, other = " → ".join(mean_text(outcome, name) for name in names), "the one before"
    else:
        means, other = "".join(mean_text(outcome, name) for name in names[:1]), "it"
    differences = ", ".join(f"{in_list(pair.cell)} {difference_text(pair.difference)}" for pair in test.pairs)
    unit = f" ({outcome.difference_unit})" if outcome.difference_unit else ""
    return (means or "–") + (f"; difference to {other}{unit}: {differences}" if differences else "")


def mean_text(outcome: Outcome, name: str) -> str:
    """softmax 2.521 ± 0.011."""
    spread = outcome.cells[name].spread
    if spread is None:
        return f"{name} diverged"
    sd = "" if spread.deviation is None else f" ± {plain(spread.deviation)}"
    return f"{name} {plain(spread.mean)}{sd}"


def difference_text(difference: Difference | None) -> str:
    """+0.104 [0.081, 0.127]."""
    if difference is None:
        return "unknown"
    if math.isinf(difference.value):
        return "diverged"
    return f"{signed(difference.value)} {interval(difference.bounds)}".rstrip()
