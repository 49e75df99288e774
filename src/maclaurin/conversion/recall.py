"""Recall beyond the window: facts from so many tokens ago, each asked with four answers to choose from.

The questions are those of `maclaurin eval --tasks maclaurin_recall_…` (evaluation/needles.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, final

from maclaurin.conversion.measure import Tell
from maclaurin.evaluation.asking import Asker
from maclaurin.evaluation.eval_task import Item
from maclaurin.evaluation.needles import Recall
from maclaurin.evaluation.prose import Prose
from maclaurin.models import MaclaurinForCausalLM

SEED = 0
#: no text of a measure is cut
_ANY_LENGTH = 1 << 30


@final
@dataclass(frozen=True)
class RecallOverDistance:
    """The share of questions answered right; guessing answers one of four."""

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

    def __call__(self, model: MaclaurinForCausalLM, tell: Tell) -> float:
        """Accuracy of a model, asked question by question."""
        asker = Asker(model, self.tokenizer, _ANY_LENGTH)
        right = 0.0
        for item, length in zip(self.items, self.lengths, strict=True):
            (answer,) = asker.answers(item, "choices")
            right += answer.score
            tell(length)
        return right / len(self.items)


def recall_over(distances: list[int], tokenizer: Any, number: int) -> list[RecallOverDistance]:
    """The first so many questions at each distance; the facts are the same at all of them."""
    prose = Prose.embedded()
    found = []
    for distance in distances:
        asked = islice(Recall(distance).items(prose, SEED), number)
        items = tuple(dataclasses.replace(item, without=None) for item in asked)  # no log-odds are shown
        lengths = (len(tokenizer(item.context, add_special_tokens=False)["input_ids"]) for item in items)
        found.append(RecallOverDistance(distance, items, tuple(lengths), tokenizer))
    return found
