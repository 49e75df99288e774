"""Recall: four facts, then running text, then one of them is asked.

    The password of Anna is river.            ┐
    The password of Max is lamp.  …           ┘ facts
    Return the number of items in …             filler: docstrings of the standard library
    The password of Max is                      → lamp

All four values stand in the text, so that remembering that there were some is not enough: without seeing
the asked fact, one of four is a guess. Each place among the facts is asked equally often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from maclaurin.data.random_draws import Draws
from maclaurin.evaluation.own_task import Item, OwnTask, Text, draws_for
from maclaurin.evaluation.words import NAMES, THINGS

FACTS = 4
ITEMS = 200
#: English prose in the vocabularies of today
CHARACTERS_PER_TOKEN = 4.5


@final
@dataclass(frozen=True)
class Recall(OwnTask):
    """One of four facts from about `distance` tokens ago; chosen, or written where `exact`."""

    distance: int
    exact: bool = False

    @property
    def name(self) -> str:
        """`maclaurin_recall_256`, `maclaurin_recall_256_exact`."""
        return f"maclaurin_recall_{self.distance}{'_exact' if self.exact else ''}"

    @property
    def template(self) -> str:
        """Choose or write."""
        return "recall_exact.yaml" if self.exact else "recall.yaml"

    @property
    def measures(self) -> str:
        """One line for people."""
        way = "written" if self.exact else "chosen among the four"
        return f"one of four facts from about {self.distance} tokens ago, {way}"

    @property
    def chance(self) -> float | None:
        """One of the four; who writes does not know which four unless they are seen."""
        return 1 / len(THINGS) if self.exact else 1 / FACTS

    def items(self, text: Text, seed: int) -> Iterator[Item]:
        """`distance` is not part of the draws: the same facts are asked at every distance."""
        for index in range(ITEMS):
            yield self._item(text.prose, draws_for("recall", seed, index), index)

    def _item(self, prose: Sequence[str], draws: Draws, index: int) -> Item:
        names = [NAMES[i] for i in draws.distinct_below(len(NAMES), FACTS)]
        values = [THINGS[i] for i in draws.distinct_below(len(THINGS), FACTS)]
        asked = (index + index // FACTS) % FACTS
        facts = [f"{_question(name)} {value}." for name, value in zip(names, values, strict=True)]
        question = _question(names[asked])
        room = round(self.distance * CHARACTERS_PER_TOKEN) - len(question)
        filler = running_text(prose, draws, room)
        return {
            "text": "\n".join([*facts, filler, question]),
            "choices": values,
            "answer": asked,
            "value": values[asked],
            "known_until": len("\n".join(facts[: asked + 1])),
        }


def _question(name: str) -> str:
    return f"The password of {name} is"


def running_text(prose: Sequence[str], draws: Draws, characters: int) -> str:
    """Docstrings from a random one on, cut to whole words of about so many characters."""
    place = int(draws.below(len(prose), 1)[0])
    parts: list[str] = []
    while sum(len(part) + 1 for part in parts) < characters:
        parts.append(prose[place % len(prose)])
        place += 1
    text = "\n".join(parts)
    end = text.find(" ", characters)
    return text if end < 0 else text[:end]
