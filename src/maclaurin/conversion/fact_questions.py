"""Questions about facts far back in the text: some to choose a memory, others to evaluate it.

Both are made like `maclaurin eval --tasks maclaurin_recall_…`, from separate seeds, so that a memory is not
chosen by the questions that evaluate it. Questions for choosing are decided by one token, those for
evaluation by one of four answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple, cast, final

import torch
from torch import Tensor

from maclaurin.conversion.measure import OnTokens, Reading
from maclaurin.data.recall_rows import fact_beginning
from maclaurin.errors import InputError
from maclaurin.evaluation.eval_task import Item
from maclaurin.evaluation.needles import Recall
from maclaurin.evaluation.prose import Prose
from maclaurin.evaluation.scoring import Scorer, answer_metrics
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM

SEED = 1018
#: distance of the questions asked without facts; the facts are the same at every distance
WITHOUT_DISTANCE = 256


class Answer(NamedTuple):
    """ln p(right) − ln p(the others), and whether the right answer is the most likely."""

    log_odds: float
    is_right: bool


@final
@dataclass(frozen=True)
class Question:
    """A text with facts in it, then the beginning of one fact again, and the choices that may follow."""

    distance: int
    number: int
    context: Tensor  # [1, T]
    prompt: Tensor  # [1, n]
    fact: slice  # position of the asked fact in the tokens
    choices: tuple[int, ...]  # for each choice, the first token that differs from the others
    right: int

    @property
    def tokens(self) -> int:
        """How many tokens are read."""
        return self.context.shape[1] + self.prompt.shape[1]

    def read(self, model: MaclaurinForCausalLM) -> MaclaurinCache:
        """The text before the question, read with the attention the model has now."""
        cache = MaclaurinCache(cast("MaclaurinConfig", model.config))
        with torch.no_grad():
            model(input_ids=self.context.to(model.device), past_key_values=cache, logits_to_keep=1)
        return cache

    @torch.no_grad()
    def log_odds(self, model: MaclaurinForCausalLM, cache: MaclaurinCache) -> Tensor:
        """ln p(right) − ln p(the others together) after the prompt, for every row of the cache: [B].

        Afterwards the cache includes the prompt.
        """
        prompt = self.prompt.to(model.device).expand(cache.batch_size, -1)
        out = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        assert out.logits is not None
        return self.odds(out.logits[:, -1].double().cpu())

    def answer(self, logits: Tensor) -> Answer:
        """The answer, from the logits [vocabulary] after the prompt."""
        best = int(logits[list(self.choices)].argmax())
        return Answer(float(self.odds(logits[None])), best == self.right)

    def odds(self, logits: Tensor) -> Tensor:
        """The log-odds [B], from the logits [B, vocabulary] after the prompt."""
        found = logits[:, list(self.choices)]  # the probability of other words cancels
        others = torch.cat([found[:, : self.right], found[:, self.right + 1 :]], dim=-1)
        return found[:, self.right] - others.logsumexp(-1)


def fact_questions(tokenizer: Any, distances: Sequence[int], number: int, seed: int = SEED) -> list[Question]:
    """`number` questions at each distance; those with the same index are adjacent."""
    if not distances or min(distances) < 16 or number < 1:
        raise InputError("heads are measured by at least one question, at distances of 16 tokens or more.")
    prose = Prose.embedded()
    items = {d: list(islice(Recall(d).items(prose, seed), number)) for d in distances}
    return [_question(items[d][n], tokenizer, d, n) for n in range(number) for d in distances]


def without_facts(tokenizer: Any, number: int, seed: int = SEED) -> list[Question]:
    """The same questions after a text without the facts: a baseline for a model that has not read them."""
    items = islice(Recall(WITHOUT_DISTANCE).items(Prose.embedded(), seed), number)
    bare = (dataclasses.replace(item, context=item.without or "\n") for item in items)
    return [_question(item, tokenizer, 0, n, facts=False) for n, item in enumerate(bare)]


def reaches_of(questions: Sequence[Question]) -> list[int]:
    """For each distance, how many tokens back the farthest of the asked facts begins."""
    found: dict[int, int] = {}
    for asked in questions:
        reach = asked.tokens - asked.fact.start
        found[asked.distance] = max(reach, found.get(asked.distance, 0))
    return sorted(found.values())


@torch.no_grad()
def answers_together(
    model: MaclaurinForCausalLM,
    questions: Sequence[Question],
    tokens_at_once: int,
) -> list[Answer]:
    """The answers to questions; questions of about the same length are read in one batch.

    Rows of a batch are cut at the front to the length of the shortest, but never into the asked fact.
    """
    found: dict[int, Answer] = {}
    left = sorted(range(len(questions)), key=lambda n: questions[n].tokens)
    while left:
        batch = _alike(questions, left, tokens_at_once)
        left = left[len(batch) :]
        asked = [questions[n] for n in batch]
        length = asked[0].tokens
        ids = torch.stack([torch.cat([q.context[0], q.prompt[0]])[-length:] for q in asked])
        out = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=1)
        assert out.logits is not None
        logits = out.logits[:, -1].double().cpu()
        found |= {n: q.answer(row) for n, q, row in zip(batch, asked, logits, strict=True)}
    return [found[n] for n in range(len(questions))]


def _alike(questions: Sequence[Question], numbers: Sequence[int], tokens_at_once: int) -> list[int]:
    """The first of the numbers, ordered by length, whose texts may be cut to the shortest."""
    shortest = questions[numbers[0]].tokens
    some = list(numbers[: max(1, tokens_at_once // shortest)])
    for place, number in enumerate(some):
        question = questions[number]
        may_lose = question.fact.start if question.fact.stop else question.tokens
        if question.tokens - shortest > may_lose:
            return some[:place]
    return some


def _question(item: Item, tokenizer: Any, distance: int, number: int, *, facts: bool = True) -> Question:
    (query,) = item.queries

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    spelled = [tokens(f"{item.context}{query.prompt} {choice}") for choice in query.choices]
    shortest = min(map(len, spelled))
    stem = next((n for n in range(shortest) if len({s[n] for s in spelled}) > 1), shortest - 1)
    first, last = fact_beginning("").split("  ")
    name = query.prompt.removeprefix(first).removesuffix(last).strip()
    fact = f"{fact_beginning(name)} {query.choices[query.right[0]]}."
    until = query.known_until
    assert until is not None
    begin = len(tokens(item.context[: max(0, until - len(fact))])) if facts else 0
    end = max(begin + 1, len(tokens(item.context[:until]))) if facts else 0
    cut = min(len(tokens(item.context)), stem - 1)
    return Question(
        distance,
        number,
        torch.tensor([spelled[0][:cut]]),
        torch.tensor([spelled[0][cut:stem]]),
        slice(begin, end),
        tuple(s[stem] for s in spelled),
        query.right[0],
    )


RECALL_SEED = 0
#: texts of a measure are never cut
_ANY_LENGTH = 1 << 30


@final
@dataclass(frozen=True)
class RecallOverDistance:
    """The share of questions answered right; guessing gets one in four."""

    at: int
    items: tuple[Item, ...]
    lengths: tuple[int, ...]
    tokenizer: Any
    kind: ClassVar[str] = "recall"
    higher_is_better: ClassVar[bool] = True

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(self.lengths)

    def read(self, model: MaclaurinForCausalLM, on_tokens: OnTokens) -> Reading:
        """Accuracy and log-odds of a model, asked question by question, as `maclaurin eval` does."""
        scorer = Scorer(model, self.tokenizer, _ANY_LENGTH)
        answers = []
        for item, length in zip(self.items, self.lengths, strict=True):
            answers.append(scorer.answers(item, "choices"))
            on_tokens(length)
        scores = answer_metrics(answers, "choices")
        share = scores["acc"].value
        assert share is not None
        return Reading(share, scores)


def recall_over(distances: Sequence[int], tokenizer: Any, number: int) -> list[RecallOverDistance]:
    """The first `number` questions at each distance; the facts are the same at every distance."""
    prose = Prose.embedded()
    found = []
    for distance in distances:
        items = tuple(islice(Recall(distance).items(prose, RECALL_SEED), number))
        lengths = (len(tokenizer(item.context, add_special_tokens=False)["input_ids"]) for item in items)
        found.append(RecallOverDistance(distance, items, tuple(lengths), tokenizer))
    return found
