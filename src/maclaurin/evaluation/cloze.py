"""Cloze: a docstring up to a word that stood in it before; which of four words of it is it?

The other three are words of the same docstring that come again nowhere near, so that a word is not right
because it is there. Whoever reads may also know the answer from what the sentence says: that is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

from maclaurin.data.random_draws import Draws
from maclaurin.evaluation.own_task import Item, OwnTask, Text, draws_for

CHOICES = 4
MOST_ITEMS = 200
#: nouns and the like between the answer and its last occurrence, at least
APART = 12
#: of one docstring, so that none is the whole task
MOST_OF_ONE = 3
_WORD = re.compile(r"(?<![\w.\-'`])[a-z]{5,12}(?![\w.\-'`(])")
_LEFT_OUT = """
about above after again against although always another because before being below between cannot could
either every first given might never other otherwise rather second should since still their there these
thing those through under unless until using value where whether which while without would
"""
_COMMON = frozenset(_LEFT_OUT.split())


class Word(NamedTuple):
    """A word and where it begins."""

    text: str
    start: int


@final
@dataclass(frozen=True)
class Cloze(OwnTask):
    """One of four words that all stand earlier in the docstring."""

    @property
    def name(self) -> str:
        """`maclaurin_cloze`."""
        return "maclaurin_cloze"

    @property
    def template(self) -> str:
        """Four choices."""
        return "cloze.yaml"

    @property
    def measures(self) -> str:
        """One line for people."""
        return "a word left out of a docstring that has it before, among four of its words"

    @property
    def chance(self) -> float | None:
        """One of the four."""
        return 1 / CHOICES

    def items(self, text: Text, seed: int) -> Iterator[Item]:
        """Docstrings in the order they come; at most MOST_ITEMS items."""
        count = 0
        for index, passage in enumerate(text.prose):
            for item in _items_of(passage, draws_for("cloze", seed, index)):
                yield item
                count += 1
                if count == MOST_ITEMS:
                    return


def _items_of(passage: str, draws: Draws) -> Iterator[Item]:
    words = [Word(found[0], found.start()) for found in _WORD.finditer(passage)]
    words = [word for word in words if word.text not in _COMMON]
    places = [place for place in range(len(words)) if _is_returning(words, place)]
    for choice in draws.distinct_below(len(places), MOST_OF_ONE) if places else ():
        if item := _item(passage, words, places[choice], draws):
            yield item


def _is_returning(words: list[Word], place: int) -> bool:
    """Whether the word stands earlier, and not only just before."""
    earlier = [word.text for word in words[:place]]
    word = words[place].text
    return word in earlier and word not in earlier[-APART:]


def _item(passage: str, words: list[Word], place: int, draws: Draws) -> Item | None:
    word = words[place]
    earlier = [other.text for other in words[:place]]
    others = sorted({other for other in earlier if other not in (*earlier[-APART:], word.text)})
    if len(others) < CHOICES - 1:
        return None
    wrong = [others[i] for i in draws.distinct_below(len(others), CHOICES - 1)]
    answer = int(draws.below(CHOICES, 1)[0])
    return {
        "text": passage[: word.start].rstrip(),
        "choices": [*wrong[:answer], word.text, *wrong[answer:]],
        "answer": answer,
        "value": word.text,
    }
