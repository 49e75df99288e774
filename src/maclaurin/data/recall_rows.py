"""Training rows whose answers are far back: facts with questions, and repeated passages, put into text.

Plain text rarely depends on distant tokens. Of a share `mix` of the training rows, two in three get facts and
questions, and one in three repeats passages:

    The password of Anna is river. … text … The password of Anna is | river.

Every row has its own pairs of names and words. A row depends only on the seed and its place in the training
order, so a run continues bit for bit. Validation and test rows are plain text.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from maclaurin.data.random_order import Draws
from maclaurin.data.source import NOT_SCORED, Row, Source
from maclaurin.data.text_source import TextSource
from maclaurin.data.text_tokenizers import Tokenizer
from maclaurin.errors import DataError
from maclaurin.plain_data import digest

#: rows with questions in three rows that are not plain text; the others repeat passages
WITH_QUESTIONS = 2
#: tokens between groups of facts, facts in a group, and tokens from one to the next
GROUPS_APART, FACTS_TOGETHER, FACTS_APART = 1024, 4, 25
#: smallest distance of a fact to its question, and shortest repeated passage, in tokens
NEAREST = 64
#: shorter rows would have hardly any questions
SHORTEST_ROW = 512


def fact_beginning(name: str) -> str:
    """The beginning of a fact, and of its question."""
    return f"The password of {name} is"


@final
@dataclass(frozen=True)
class Facts:
    """Facts as tokens: beginnings of facts and of questions for each name, and the words that follow."""

    fact_starts: Sequence[Sequence[int]]
    question_starts: Sequence[Sequence[int]]
    words: Sequence[Sequence[int]]
    stop: Sequence[int]
    newline: Sequence[int]

    @staticmethod
    def of(tokenizer: Tokenizer) -> Facts:
        """All names and words in the tokens of a tokenizer."""
        encode = tokenizer.encode
        return Facts(
            [encode(f" {fact_beginning(name)}") for name in NAMES],
            [encode(f"\n{fact_beginning(name)}") for name in NAMES],
            [encode(f" {word}") for word in WORDS],
            encode("."),
            encode("\n"),
        )

    def fact(self, name: int, word: int) -> list[int]:
        """The password of Anna is river."""
        return [*self.fact_starts[name], *self.words[word], *self.stop]

    def question(self, name: int, word: int) -> tuple[list[int], range]:
        """A line with the answer in it, and the places of the answer."""
        begin, answer = self.question_starts[name], self.words[word]
        places = range(len(begin), len(begin) + len(answer))
        return [*begin, *answer, *self.stop, *self.newline], places


def require_mixable(
    mix: float, reach: int | None, length: int | None, layout: str, cross_documents: bool
) -> None:
    """Raise unless such rows can hold facts and repeated passages; a length of None is not known yet."""
    if not 0 < mix < 1:
        raise DataError(f"mix={mix:g} is not a share of the rows: use 0.2, or 0 for plain text.")
    if layout != "packed" or not cross_documents:
        raise DataError(
            "mix puts facts and repeated passages into rows, which needs packed rows whose attention "
            "crosses documents: use rows=packed and cross_documents=true, or mix=0."
        )
    if length is not None and length < SHORTEST_ROW:
        raise DataError(
            f"rows of {length} tokens are too short for facts with questions far from them: "
            f"use length={SHORTEST_ROW} or more, or mix=0."
        )
    if reach is not None and reach <= 2 * NEAREST:
        raise DataError(f"reach={reach} is too near for questions: use more than {2 * NEAREST} tokens.")


@final
@dataclass(frozen=True)
class MixedRows(Source):
    """A text of whose training rows a share has facts and questions, or repeated passages.

    reach    largest distance of a fact to its question, in tokens
    """

    text: TextSource
    mix: float
    reach: int
    seed: int

    def __post_init__(self) -> None:
        text = self.text
        require_mixable(self.mix, self.reach, text.length, text.layout, text.cross_documents)

    @property
    def name(self) -> str:
        """The name of the text."""
        return self.text.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text."""
        return self.text.tokenizer

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.text.vocab_size

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.text.length

    @property
    def fingerprint(self) -> str:
        """Digest of the text, the share, the reach and the seed."""
        parts = {"text": self.text.fingerprint, "mix": self.mix, "reach": self.reach}
        return digest({**parts, "seed": self.seed, "version": 1})

    @property
    def content(self) -> str:
        """The same for any seed."""
        parts = {"text": self.text.content, "mix": self.mix, "reach": self.reach}
        return digest({**parts, "version": 1})

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the data."""
        return {**self.text.facts, "content": self.content, "mix": self.mix, "reach": self.reach}

    @property
    def tokens_per_epoch(self) -> int:
        """Scored tokens of the text; what is put into its rows replaces about as many."""
        return self.text.tokens_per_epoch

    def train_row_numbers(self, first: int, count: int) -> np.ndarray:
        """Places in the training order: a row depends on its place."""
        return first + np.arange(count)

    def train_row(self, number: int) -> Row:
        """The row at this place of the training order."""
        row = self.text.train_row(int(self.text.train_row_numbers(number, 1)[0]))
        mixed = _so_many(number + 1, self.mix)
        if mixed == _so_many(number, self.mix) or row.targets[-1] == NOT_SCORED:
            return row  # plain text, or the last row of the text, which is shorter
        line = [*row.tokens.tolist(), int(row.targets[-1])]
        draws = Draws(f"recall rows, seed {self.seed}", 1, number)
        answers: list[int] = []
        if mixed % (WITH_QUESTIONS + 1):
            line, answers = with_questions(line, self._known, self.reach, draws)
        else:
            line = with_copies(line, self.reach, draws)
        is_answer = np.zeros(self.length, dtype=np.float32)
        is_answer[[place - 1 for place in answers]] = 1.0
        return Row(np.array(line[:-1]), np.array(line[1:]), None, is_answer)

    def held_out_rows(self, split: str) -> int:
        """Rows of the text's split."""
        return self.text.held_out_rows(split)

    def held_out_row(self, split: str, number: int) -> Row:
        """Plain text."""
        return self.text.held_out_row(split, number)

    @cached_property
    def _known(self) -> Facts:
        return Facts.of(self.tokenizer)


def _so_many(rows: int, share: float) -> int:
    """How many of the first rows are not plain text; a small epsilon makes 0.1 · 10 count as 1."""
    return int(rows * share + 1e-9)


# ------------------------------------------------------------------------------------------- one row


def with_questions(text: list[int], facts: Facts, reach: int, draws: Draws) -> tuple[list[int], list[int]]:
    """The text with groups of facts and questions, of the same length; and the places of the answers."""
    length = len(text)
    names = draws.distinct_below(len(facts.fact_starts), len(facts.fact_starts)).tolist()
    words = draws.distinct_below(len(facts.words), len(facts.words)).tolist()
    stops = [0, *(n + 1 for n, token in enumerate(text) if token == facts.stop[-1])]
    put: list[tuple[int, int, list[int], range]] = []  # (where, which, what, places of its answer)
    for first in range(0, length - 2 * NEAREST, GROUPS_APART):
        group = first + _below(min(GROUPS_APART, length) // 2, draws)
        for n in range(FACTS_TOGETHER):
            if not names or not words:
                break
            name, word = names.pop(), words.pop()
            told = _next_of(stops, group + n * FACTS_APART)
            most = min(reach, length - told) - FACTS_APART * FACTS_TOGETHER
            if most <= NEAREST:
                continue
            asked = _next_of(stops, told + _distance(most, draws))
            put.append((told, len(put), facts.fact(name, word), range(0)))
            put.append((max(asked, told + 1), len(put), *facts.question(name, word)))
    made: list[int] = []
    answers, at = list[int](), 0
    for where, _, what, answer in sorted(put, key=lambda item: item[:2]):
        made += text[at:where]
        at = max(at, where)
        if len(made) + answer.stop <= length:
            answers += [len(made) + place for place in answer]
        made += what
    return (made + text[at:])[:length], answers


def with_copies(text: list[int], reach: int, draws: Draws) -> list[int]:
    """Passages of the text, each twice, up to `reach` tokens long."""
    made: list[int] = []
    at, length = 0, len(text)
    most = min(reach, length // 2)
    while len(made) < length:
        size = max(1, min(most, round(NEAREST * (most / NEAREST) ** _share(draws))))
        made += 2 * text[at : at + size]
        at = (at + size) % (length - most)
    return made[:length]


def _distance(most: int, draws: Draws) -> int:
    """A random distance: half of the time uniform, half of the time log-uniform."""
    share = _share(draws)
    if _share(draws) < 0.5:
        return round(NEAREST + (most - NEAREST) * share)
    return round(NEAREST * (most / NEAREST) ** share)


def _next_of(places: list[int], at: int) -> int:
    """The first of the places from `at` on, if it is near."""
    found = bisect.bisect_left(places, at)
    return places[found] if found < len(places) and places[found] < at + 2 * FACTS_APART else at


def _below(most: int, draws: Draws) -> int:
    return int(draws.below(max(1, most), 1)[0])


def _share(draws: Draws) -> float:
    return float(draws.uniform(1)[0])


# --------------------------------------------------------------------------------------------- words


_NAMES = """
Adam Alice Anna Arthur Barbara Ben Carl Charles Clara Daniel David Diana Edward Ellen Emma Eric Frank George
Grace Hannah Harry Helen Henry Jack James Jane John Julia Karen Kate Laura Leo Linda Louis Lucy Maria Mark
Martin Mary Max Michael Nina Oliver Oscar Paul Peter Rachel Richard Robert Rose Ruth Sam Sarah Simon Sophie
Susan Thomas Victor Walter William
"""
_WORDS = """
apple arm army baby ball bank bear bed bell bird boat body bone book box bread bridge brother butter camp
car card cat chain chair cheese church circle city clock cloud coat coffee corn cotton cup daughter desert
dog door dream dress drum ear egg engine eye face farm father field finger fire fish flag floor flower foot
forest fruit garden gate glass gold grass hair hammer hand hat heart hill horse hotel house ice iron island
jacket key king kitchen knife lake lamp leaf leg lemon letter lion lip market milk mirror money moon mother
mountain mouse mouth music neck needle night nose oil orange page paint paper park pen phone piano picture
pipe plane plant plate pocket pool potato prince queen rain ring river road rock roof room root rope sail
salt sand school seed shadow sheep ship shirt shoe silver sister skin sky smoke snake snow soap soldier son
song spoon spring square stamp star station stone storm street sugar summer sun table tail teacher tent
tiger tongue tooth tower town train tree truck valley village voice wall watch water wave wheel wind window
wine wing winter wolf wood wool yard
"""
#: names for keys, and words for values; one token each in most vocabularies
NAMES, WORDS = tuple(_NAMES.split()), tuple(_WORDS.split())
