"""Choose a memory for a budget: measure every head, then the plans that fill the budget, at its length.

    --at 4096      facts 256, 1,024 and 3,072 tokens back, calibration texts of 4,096 tokens

so that plans are measured at their own length. Neighbouring budgets (a half, double) show what more or
fewer bytes would give.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from torch import Tensor

from maclaurin.conversion.allocate import (
    FINAL_QUESTIONS,
    FINALISTS,
    FIRST_QUESTIONS,
    RECALL_WEIGHT,
    Decision,
    Measured,
    MemoryPlan,
    decide,
    memories_to_try,
    plans_for,
    reference_plans,
)
from maclaurin.conversion.conversion_record import (
    ChosenPlan,
    MeasuredOriginal,
    MeasuredPlan,
    MemoryBudget,
    MemoryChoice,
)
from maclaurin.conversion.fact_questions import Question, fact_questions, reaches_of
from maclaurin.conversion.head_measures import (
    ELIMINATED_BY,
    HeadMeasures,
    TextDamage,
    measure_damage,
    measure_heads,
    require_softmax,
)
from maclaurin.conversion.measure import MeasureFile
from maclaurin.conversion.memory_budget import read_budget
from maclaurin.conversion.sample_text import rows_of
from maclaurin.errors import InputError
from maclaurin.evaluation.likelihood import summed_loss
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache import weights_fingerprint
from maclaurin.models.modeling import with_attention
from maclaurin.progress_bar import report_progress

#: minimum calibration tokens for choosing a memory
FEWEST_TOKENS = 256
#: texts that heads and plans are measured on
CHOICE_ROWS = 2
#: distances of facts as shares of the length, and the smallest: farther than the window of a limited head
SHARES_OF_LENGTH, NEAREST = (1 / 16, 1 / 4, 3 / 4), 128
#: smallest distance at which facts can be asked for
SMALLEST_DISTANCE = 16
#: changes whenever measures in a file cannot be compared with earlier ones
MEASURES = 2
#: budgets of the frontier, as multiples of the requested one
NEIGHBOURS = (0.5, 2.0)


@final
@dataclass(frozen=True)
class MemoryRequest:
    """The requested memory, for which an attention is chosen.

    memory            bytes of a text of `at` tokens: 25% of the original's, or 64MB
    constant          bytes that no text may exceed, such as 32MB
    at                text length in tokens that the memory is meant for and measured at
    distances         tokens between facts and questions that heads and plans are measured by; () for a
                      sixteenth, a quarter and three quarters of `at`
    questions         that heads are measured by, at each distance
    final_questions   that the best plans are measured by, at all distances together
    recall_weight     nats per token that a drop of 1 in the log-odds of right answers costs
    frontier          whether neighbouring budgets are measured too
    """

    memory: str | None = None
    constant: str | None = None
    at: int = 4096
    distances: tuple[int, ...] = ()
    questions: int = 12
    final_questions: int = FINAL_QUESTIONS
    recall_weight: float = RECALL_WEIGHT
    frontier: bool = False

    def length(self, config: MaclaurinConfig) -> int:
        """The length that the memory is judged at: no longer than texts the model was made for."""
        return min(self.at, config.max_position_embeddings)

    def calibration_tokens(self, config: MaclaurinConfig) -> int:
        """Tokens of all texts that plans are measured on."""
        return CHOICE_ROWS * self.length(config)


def distances_for(length: int) -> tuple[int, ...]:
    """How far back facts are asked for in texts of this length."""
    farthest = max(SMALLEST_DISTANCE, round(SHARES_OF_LENGTH[-1] * length))
    nearest = min(NEAREST, farthest)
    return tuple(sorted({max(nearest, round(share * length)) for share in SHARES_OF_LENGTH}))


@final
@dataclass(frozen=True)
class ChosenMemory:
    """The chosen memory, and why.

    frontier    the best plan of every measured budget, the smallest budget first
    """

    budget: MemoryBudget
    heads: HeadMeasures
    decision: Decision
    recall_weight: float
    frontier: tuple[tuple[MemoryBudget, Measured], ...] = ()

    def record(self) -> MemoryChoice:
        """The choice for conversion.json, with scores of heads rounded to four digits."""
        best, heads, original = self.decision.best, self.heads, self.decision.original
        named = {"score": heads.score} | {
            f"{what} at {distance}": heads.mean(what, distance)
            for what in ("mass", "loss")
            for distance in heads.distances
        }
        others = [found for budget, found in self.frontier if budget != self.budget]
        return MemoryChoice(
            budget=self.budget,
            plan=ChosenPlan(best.plan.name, best.plan.bytes, best.cost, best.error),
            original=MeasuredOriginal(
                original.loss, original.log_odds, original.recall, len(original.answers)
            ),
            measured=tuple(_recorded(found) for found in self.decision.measured),
            recall_weight=self.recall_weight,
            heads={name: [[round(x, 4) for x in row] for row in u.tolist()] for name, u in named.items()},
            other_budgets=tuple(_recorded(found) for found in others),
            references=tuple(_recorded(found) for found in self.decision.references),
        )


def _recorded(found: Measured) -> MeasuredPlan:
    return MeasuredPlan(
        found.plan.name,
        found.plan.bytes,
        found.loss,
        found.log_odds,
        found.recall,
        found.cost,
        found.error,
        found.questions,
        found.plan.kind,
    )


def choose_memory(
    model: MaclaurinForCausalLM,
    tokenizer: Any,
    request: MemoryRequest,
    calibration: Tensor,
    out: Path | None,
    *,
    resume: bool = False,
    progress: bool = True,
) -> tuple[ChosenMemory, MeasureFile]:
    """Measure every head, then every plan that fills the budget, on calibration text [T] and questions.

    Results are kept in a file next to `out`.
    """
    config = cast("MaclaurinConfig", model.config)
    budget = read_budget(config, memory=request.memory, constant=request.constant, at=request.at)
    require_softmax(model)
    heads = [(layer, head) for layer in range(config.num_hidden_layers) for head in range(config.kv_heads)]
    plans_for(config, budget, heads)  # a budget that is too small is an error at once
    if calibration.numel() < FEWEST_TOKENS:
        raise InputError(
            f"the calibration text has {calibration.numel()} tokens, but choosing a memory "
            f"needs at least {FEWEST_TOKENS} (half of the text is kept to measure on): give a longer `text`."
        )
    length = request.length(config)
    questions = _Questions.of(tokenizer, request, length)
    rows = rows_of(calibration, length, CHOICE_ROWS)
    path = None if out is None else MeasureFile.path_for(out)
    file = MeasureFile.open(path, measures_identity(model, rows, questions.of_heads), resume=resume)
    if progress:
        budgets = 1 + len(NEIGHBOURS) * request.frontier
        plans = plans_for(config, budget, heads, _equal_damage(config, rows.shape[1]))
        references = reference_plans(config, budget, [[0.0] * config.kv_heads] * config.num_hidden_layers)
        _announce(model, rows, questions, plans, budgets, len(references), length)
    chosen = choose_by(
        model,
        budget,
        questions.of_heads,
        rows,
        file,
        plan_questions=questions.of_plans,
        recall_weight=request.recall_weight,
        neighbours=NEIGHBOURS if request.frontier else (),
        compare=True,
        progress=progress,
    )
    return chosen, file


def measures_identity(
    model: MaclaurinForCausalLM, rows: Tensor, questions: Sequence[Question]
) -> dict[str, Any]:
    """Everything that measures of heads and plans depend on, for their file."""
    return {
        "measures": MEASURES,
        "weights": weights_fingerprint(model.base_model),  # type: ignore[arg-type]
        "distances": list(dict.fromkeys(question.distance for question in questions)),
        "text": hashlib.sha256(str(rows.tolist()).encode()).hexdigest()[:16],
    }


def choose_by(
    model: MaclaurinForCausalLM,
    budget: MemoryBudget,
    questions: Sequence[Question],
    rows: Tensor,
    file: MeasureFile,
    *,
    plan_questions: Sequence[Question] | None = None,
    recall_weight: float = RECALL_WEIGHT,
    neighbours: Sequence[float] = (),
    compare: bool = False,
    progress: bool = True,
) -> ChosenMemory:
    """Choose a memory by these questions and calibration texts [B, T].

    plan_questions    that plans are measured by; by default those that heads are measured by
    neighbours        other budgets to measure, as multiples of this one
    compare           whether to measure simple plans of the same bytes as well (`reference_plans`)
    """
    config = cast("MaclaurinConfig", model.config)
    with report_progress("measuring heads by questions", progress) as report:
        heads = measure_heads(model, questions, file, report)
    with report_progress("measuring heads by text", progress) as report:
        damage = measure_damage(model, rows, memories_to_try(rows.shape[1]), file, report)
    asked = questions if plan_questions is None else plan_questions

    def decided(limit: MemoryBudget, finalists: int, references: Sequence[MemoryPlan] = ()) -> Decision:
        plans = plans_for(config, limit, heads.ranking, damage, reaches_of(questions))
        title = f"measuring {len(plans)} plans for {limit.bytes:,} bytes"
        with report_progress(title, progress) as report:
            return decide(
                model,
                plans,
                rows,
                asked,
                file,
                report,
                finalists=finalists,
                references=references,
                recall_weight=recall_weight,
            )

    references = reference_plans(config, budget, heads.score.tolist()) if compare else []
    decision = decided(budget, FINALISTS, references)
    others = _neighbours(config, budget, heads.ranking, neighbours)
    frontier = [(budget, decision.best), *((other, decided(other, 1).best) for other in others)]
    frontier.sort(key=lambda point: point[0].bytes)
    return ChosenMemory(budget, heads, decision, recall_weight, tuple(frontier))


def _neighbours(
    config: MaclaurinConfig, budget: MemoryBudget, ranking: Sequence[tuple[int, int]], times: Sequence[float]
) -> list[MemoryBudget]:
    """The budgets that some plan fits into and that still limit the memory."""
    found = []
    for other in (budget.times(factor) for factor in times):
        if other.bytes >= other.original:
            continue
        try:
            plans_for(config, other, ranking)
        except InputError:  # too small for a window in every head
            continue
        found.append(other)
    return found


# ------------------------------------------------------------------------------- questions and time


@final
@dataclass(frozen=True)
class _Questions:
    """Questions for heads, and the questions for plans, which begin with the same ones."""

    of_heads: list[Question]
    of_plans: list[Question]

    @staticmethod
    def of(tokenizer: Any, request: MemoryRequest, length: int) -> _Questions:
        distances = request.distances or distances_for(length)
        of_each = -(-request.final_questions // len(distances))
        every = fact_questions(tokenizer, distances, max(of_each, request.questions))
        of_heads = [question for question in every if question.number < request.questions]
        return _Questions(of_heads, every[: request.final_questions])


#: forward and backward pass, relative to a forward pass; attention alone, relative to a whole pass
_BACKWARD, _ATTENTION = 3.0, 0.5
#: tokens of the reading that is timed
_TIMED = 1024


def _announce(
    model: MaclaurinForCausalLM,
    rows: Tensor,
    questions: _Questions,
    plans: Sequence[MemoryPlan],
    budgets: int,
    references: int,
    length: int,
) -> None:
    """Print how long choosing will take, from the time of one reading with and without a smaller memory."""
    number = budgets * len(plans) + references
    seconds = _seconds_to_choose(model, rows, questions, plans[0], number, budgets)
    distances = sorted({question.distance for question in questions.of_heads})
    about = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{max(1, seconds):.0f} seconds"
    print(
        f"choosing a memory: about {about}; facts {', '.join(f'{d:,}' for d in distances)} tokens back, "
        f"text of {rows.shape[0]} × {rows.shape[1]:,} tokens, about {number} plans",
        file=sys.stderr,
        flush=True,
    )
    if rows.shape[1] < length:
        print(
            f"the calibration text allows only {rows.shape[1]:,} tokens, not {length:,}: "
            "give a longer text to measure plans at the full length",
            file=sys.stderr,
            flush=True,
        )


def _seconds_to_choose(
    model: MaclaurinForCausalLM,
    rows: Tensor,
    questions: _Questions,
    plan: MemoryPlan,
    plans: int,
    budgets: int,
) -> float:
    """The tokens of every pass, times the seconds of a token with full attention or with a plan."""
    of_heads = sum(q.tokens for q in questions.of_heads)
    eliminating = sum(q.tokens for q in questions.of_heads[:ELIMINATED_BY])
    first = sum(q.tokens for q in questions.of_plans[:FIRST_QUESTIONS])
    final = sum(q.tokens for q in questions.of_plans)
    full = 2 * (of_heads + eliminating) + _BACKWARD * rows.numel() + final
    damage = _ATTENTION * rows.numel() * len(memories_to_try(rows.shape[1]))
    more = (FINALISTS + budgets - 1) * (final - first)  # one finalist of every other budget
    limited = damage + plans * (rows.numel() + first) + more
    own = [str(layer) for layer in cast("MaclaurinConfig", model.config).layer_attention()]
    some = rows[0, :_TIMED].to(model.device)
    return full * _seconds_per_token(model, own, some) + limited * _seconds_per_token(
        model, plan.attention, some
    )


def _equal_damage(config: MaclaurinConfig, length: int) -> TextDamage:
    """Placeholder to count plans before measuring: equal damage for all heads, less with more keys."""
    memories = memories_to_try(length)
    layers, heads = config.num_hidden_layers, config.kv_heads
    return TextDamage({memory: [[1 / n] * heads] * layers for n, memory in enumerate(memories, start=1)})


def _seconds_per_token(model: MaclaurinForCausalLM, attention: Sequence[str], tokens: Tensor) -> float:
    """The time to read a text with this attention, measured after one reading that compiles."""
    found = 0.0
    with with_attention(model, attention):
        for _ in range(2):
            begin = time.monotonic()
            summed_loss(model, tokens)
            found = time.monotonic() - begin
    return found / tokens.numel()
