"""Recall beyond the window: facts from so many tokens ago, each asked with four answers to choose from.

The questions are those of `maclaurin eval --tasks maclaurin_recall_…` (evaluation/recall.py); here they are
asked without the harness, while the attention of a model is exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from maclaurin.conversion.measure import Tell
from maclaurin.data.standard_library import StandardLibrary
from maclaurin.evaluation.prepare import task_text
from maclaurin.evaluation.recall import Recall
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM

SEED = 0


@final
@dataclass(frozen=True)
class Question:
    """A text, tokens that may follow it, and which of these is right."""

    text: Tensor
    choices: tuple[Tensor, ...]
    answer: int


@final
@dataclass(frozen=True)
class RecallOverDistance:
    """The share of questions answered right; guessing answers one of four."""

    at: int
    questions: tuple[Question, ...]
    kind: ClassVar[str] = "recall"
    higher_is_better: ClassVar[bool] = True

    @property
    def tokens(self) -> int:
        """Tokens of all questions."""
        return sum(question.text.numel() for question in self.questions)

    def __call__(self, model: MaclaurinForCausalLM, tell: Tell) -> float:
        """Of a model, asked question by question."""
        right = 0
        for question in self.questions:
            right += _chosen(model, question) == question.answer
            tell(question.text.numel())
        return right / len(self.questions)


def recall_over(distances: list[int], tokenizer: Any, number: int) -> list[RecallOverDistance]:
    """The first so many questions at each distance; the facts are the same at all of them."""
    if not distances:
        return []
    text = task_text(StandardLibrary())
    return [
        RecallOverDistance(
            distance,
            tuple(_question(tokenizer, item) for item in islice(Recall(distance).items(text, SEED), number)),
        )
        for distance in distances
    ]


def _question(tokenizer: Any, item: dict[str, Any]) -> Question:
    """A choice is what the whole has behind the tokens of the text, since words join differently alone."""
    start = [tokenizer.bos_token_id] if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else []

    def ids(text: str) -> list[int]:
        return start + tokenizer(text, add_special_tokens=False)["input_ids"]

    begin = ids(item["text"])
    choices = [torch.tensor(ids(f"{item['text']} {word}")[len(begin) :]) for word in item["choices"]]
    return Question(torch.tensor(begin), tuple(choices), item["answer"])


@torch.no_grad()
def _chosen(model: MaclaurinForCausalLM, question: Question) -> int:
    """The likeliest choice, −1 where a likelihood is no number; the text is read once."""
    cache = MaclaurinCache(cast("MaclaurinConfig", model.config))
    first = _log_probabilities(model, question.text, cache, 1)[0]
    found = []
    for choice in (choice.to(model.device) for choice in question.choices):
        likelihood = first[choice[0]]
        if len(choice) > 1:
            later = _log_probabilities(model, choice[:-1], cache.fork(), len(choice) - 1)
            likelihood = likelihood + later.gather(-1, choice[1:, None]).sum()
        found.append(float(likelihood))
    return found.index(max(found)) if all(map(math.isfinite, found)) else -1


def _log_probabilities(
    model: MaclaurinForCausalLM, tokens: Tensor, cache: MaclaurinCache, last: int
) -> Tensor:
    """ln p [n, vocabulary] of what follows each of the last n tokens."""
    out = model(input_ids=tokens[None].to(model.device), past_key_values=cache, logits_to_keep=last)
    assert out.logits is not None
    return out.logits[0].float().log_softmax(-1)
