"""Tasks made of text alone: repetition, cloze, ends of lines, and perplexity."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import ClassVar, NamedTuple, final

from maclaurin.data.random_order import Draws
from maclaurin.data.recall_rows import WORDS
from maclaurin.evaluation.eval_task import Item, Query, ScoringMode, TextTask, register
from maclaurin.evaluation.prose import CHARACTERS_PER_TOKEN, Prose, draws_for, held_out_sources


@final
@register("induction")
@dataclass(frozen=True)
class Induction(TextTask):
    """`size` random words, then the same again up to one of them: which comes next?"""

    sizes: ClassVar = (16, 64, 192)
    smallest: ClassVar[int] = 8
    largest: ClassVar[int] = 192
    options: ClassVar[int] = 4

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"the next word when {self.size} random words are repeated"

    @property
    def guess(self) -> float:
        """A quarter: the choices are four words of the sequence."""
        return 1 / self.options

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """No prose is needed: the order of the words is random."""
        for index in count():
            draws = draws_for("induction", seed, index)
            words = [WORDS[i] for i in draws.distinct_below(len(WORDS), self.size)]
            again = 1 + int(draws.below(self.size - 1, 1)[0])
            others = [word for word in words if word != words[again]]
            wrong = [others[i] for i in draws.distinct_below(len(others), self.options - 1)]
            right = index % self.options
            choices = (*wrong[:right], words[again], *wrong[right:])
            known = len(" ".join(words[: again + 1]))
            prompt = " ".join(words[:again])
            yield Item(" ".join(words) + "\n", (Query(prompt, choices, (right,), known_until=known),))


# -------------------------------------------------------------------------------------------- cloze

_WORD = re.compile(r"(?<![\w.\-'’`])[a-z]{5,12}(?![\w.\-'’`(])")
_LEFT_OUT = """
about above after again against almost although always among another because before being below between
cannot could either every first given might never other otherwise quite rather second seemed shall should
since still their there therefore these thing things those though through towards under unless until upon
using value where whether which while whole without would
"""
_COMMON = frozenset(_LEFT_OUT.split())


class _Word(NamedTuple):
    text: str
    start: int


@final
@register("cloze")
@dataclass(frozen=True)
class Cloze(TextTask):
    """A passage cut before a word that occurs earlier in it; which of four words of the passage is it?

    None of the four occurs among the last `apart` words, so that being recent does not help.
    """

    modes: ClassVar[tuple[ScoringMode, ...]] = ("choices",)
    options: ClassVar[int] = 4
    apart: ClassVar[int] = 12
    most_of_one: ClassVar[int] = 3
    passage_characters: ClassVar[int] = 1000

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return "a word left out of a passage that has it before, among four of its words"

    @property
    def guess(self) -> float:
        """A quarter: there are four words to choose from."""
        return 1 / self.options

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """Passages in order, at most `most_of_one` words of each."""
        for index, passage in enumerate(self._passages(prose)):
            yield from self._items_of(passage, draws_for("cloze", seed, index))

    def _passages(self, prose: Prose) -> Iterator[str]:
        parts: list[str] = []
        for paragraph in prose.paragraphs:
            parts.append(paragraph)
            if sum(map(len, parts)) >= self.passage_characters:
                yield "\n".join(parts)
                parts = []

    def _items_of(self, passage: str, draws: Draws) -> Iterator[Item]:
        words = [_Word(found[0], found.start()) for found in _WORD.finditer(passage)]
        words = [word for word in words if word.text not in _COMMON]
        places = [place for place in range(len(words)) if self._returns(words, place)]
        for choice in draws.distinct_below(len(places), self.most_of_one) if places else ():
            if item := self._item(passage, words, places[choice], draws):
                yield item

    def _returns(self, words: list[_Word], place: int) -> bool:
        """Whether the word occurs earlier, and not only just before."""
        earlier = [word.text for word in words[:place]]
        return words[place].text in earlier and words[place].text not in earlier[-self.apart :]

    def _item(self, passage: str, words: list[_Word], place: int, draws: Draws) -> Item | None:
        word = words[place]
        earlier = [other.text for other in words[:place]]
        others = sorted({other for other in earlier if other not in (*earlier[-self.apart :], word.text)})
        if len(others) < self.options - 1:
            return None
        wrong = [others[i] for i in draws.distinct_below(len(others), self.options - 1)]
        right = int(draws.below(self.options, 1)[0])
        choices = (*wrong[:right], word.text, *wrong[right:])
        return Item(passage[: word.start].rstrip(), (Query("", choices, (right,)),), without=None)


# -------------------------------------------------------------------------------------------- lines

#: two words in lower case: a line of code or of a comment, not of a table of numbers
_TWO_WORDS = re.compile(r"[a-z_]{3,}.*?[^a-z_][a-z_]{3,}")
#: a single space inside a line, where it can be cut
_GAP = re.compile(r"(?<=\S) (?=\S)")


class _CutLine(NamedTuple):
    beginning: str
    ending: str


@final
@register("lines")
@dataclass(frozen=True)
class Lines(TextTask):
    """Four lines of held-out source, cut in two: which beginning does each end belong to?

    The lines are from one file, each after the text before it, and have ends of about the same length. Each
    end is scored after all four beginnings, so a model that ignores them scores exactly chance.
    """

    sizes: ClassVar = (32, 128, 512)
    smallest: ClassVar[int] = 16
    modes: ClassVar[tuple[ScoringMode, ...]] = ("endings",)
    options: ClassVar[int] = 4
    #: characters of an end, and of the difference between two that are asked together
    shortest: ClassVar[int] = 7
    longest: ClassVar[int] = 32
    class_width: ClassVar[int] = 6
    #: items of one file, so that no file is more than a few hundredths of the answers
    most_of_a_file: ClassVar[int] = 8

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"to which of four beginnings of {self.size} tokens the end of a line of source belongs"

    @property
    def guess(self) -> float:
        """A quarter: there are four beginnings."""
        return 1 / self.options

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """Groups of four lines in random order; all four ends of a group are scored."""
        fours = [
            four
            for number, source in enumerate(held_out_sources())
            for four in islice(
                self._fours(source, draws_for("lines of a file", seed, number)), self.most_of_a_file
            )
        ]
        if not fours:
            return
        for index in draws_for("lines", seed, 0).distinct_below(len(fours), len(fours)):
            beginnings = tuple(line.beginning for line in fours[index])
            ends = enumerate(line.ending for line in fours[index])
            yield Item("", tuple(Query(end, beginnings, (right,)) for right, end in ends), without=None)

    def _fours(self, source: str, draws: Draws) -> Iterator[list[_CutLine]]:
        """Lines of a file with different ends of about the same length, each line at most once."""
        lines = list(self._cut_lines(source))
        order = draws.distinct_below(len(lines), len(lines)) if lines else ()
        waiting: dict[int, list[_CutLine]] = {}
        for line in (lines[i] for i in order):
            alike = waiting.setdefault(len(line.ending) // self.class_width, [])
            if all(line.ending != other.ending for other in alike):
                alike.append(line)
            if len(alike) == self.options:
                yield alike.copy()
                alike.clear()

    def _cut_lines(self, source: str) -> Iterator[_CutLine]:
        """Lines that can be cut in two, each with the text before it, complete lines if there are any."""
        most = round(self.size * CHARACTERS_PER_TOKEN)
        start = 0
        for line in source.splitlines(keepends=True):
            place = self._place_to_cut(line.rstrip())
            if place is not None:
                first = source.find("\n", max(0, start + place - most - 1), start) + 1
                beginning = source[first : start + place]
                if most / 2 <= len(beginning) <= most:
                    yield _CutLine(beginning, line[place + 1 :].rstrip())
            start += len(line)

    def _place_to_cut(self, line: str) -> int | None:
        """The middle one of the spaces that are followed by an end of the right length."""
        if not (line.isascii() and _TWO_WORDS.search(line)):
            return None
        gaps = [found.start() for found in _GAP.finditer(line)]
        gaps = [gap for gap in gaps if self.shortest <= len(line) - gap - 1 <= self.longest]
        return gaps[len(gaps) // 2] if gaps else None


# --------------------------------------------------------------------------------------- perplexity


@final
@register("perplexity")
@dataclass(frozen=True)
class HeldOutText(TextTask):
    """Passages of the standard-library files held out for testing, in random order."""

    modes: ClassVar[tuple[ScoringMode, ...]] = ("text",)
    characters: ClassVar[int] = 4000
    most: ClassVar[int] = 32

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return "source files of the standard library held out from training"

    @property
    def guess(self) -> float:
        """Unused, since there is nothing to guess."""
        return 0.0

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """At most `most` passages."""
        stretches = [stretch for source in held_out_sources() for stretch in self._stretches(source)]
        for index in draws_for("perplexity", seed, 0).distinct_below(len(stretches), self.most):
            yield Item(stretches[index])

    def _stretches(self, source: str) -> Iterator[str]:
        """Complete lines of at least `characters`; the end of a file counts if it is half as long."""
        lines: list[str] = []
        length = 0
        for line in source.splitlines(keepends=True):
            lines.append(line)
            length += len(line)
            if length >= self.characters:
                yield "".join(lines)
                lines, length = [], 0
        if length >= self.characters / 2:
            yield "".join(lines)
