"""Recall, and tasks like those of RULER (arXiv 2404.06654): needles, variables, common words.

    … some years ago, never mind how long.          running text
    The password of Anna is river. It is a way
    I have of driving off the spleen. The password
    of Max is lamp. Whenever I find myself …        facts inside it, and more text
    The password of Max is                          → lamp

Differences from RULER: words instead of numbers and a plain continuation instead of an instruction, so that
small models without instruction tuning can answer; each key of `multiquery` is a separate question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, final

from maclaurin.data.random_order import Draws
from maclaurin.data.recall_rows import WORDS, fact_beginning
from maclaurin.evaluation.eval_task import Item, Query, TextTask, register
from maclaurin.evaluation.prose import CHARACTERS_PER_TOKEN, Prose, draws_for, take

_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"

#: facts in a text, and choices of a query
FACTS = 4
#: characters of running text before a query that is asked without the facts
WITHOUT = 400


def placed(sentences: Sequence[str], facts: Sequence[str], places: Sequence[int]) -> tuple[str, list[int]]:
    """Running text with facts[i] before sentences[places[i]], and where each fact ends in it."""
    parts: list[str] = []
    ends, length = [], 0

    def add(part: str) -> None:
        nonlocal length
        parts.append(part)
        length += len(part) + 1

    waiting = list(zip(places, facts, strict=True))
    for number, sentence in enumerate([*sentences, ""]):
        while waiting and waiting[0][0] == number:
            add(waiting.pop(0)[1])
            ends.append(length - 1)
        if sentence:
            add(sentence)
    return " ".join(parts) + "\n", ends


def random_places(draws: Draws, sentences: int, facts: int) -> list[int]:
    """Places for facts between sentences, in order; all different if there are enough."""
    between = max(1, sentences - 1)
    distinct = facts <= between
    found = draws.distinct_below(between, facts) if distinct else draws.below(between, facts)
    return sorted(1 + int(place) for place in found)


def tail(sentences: Sequence[str]) -> str:
    """The end of running text, starting at the beginning of a word."""
    text = " ".join(sentences)
    return text[-WITHOUT:].partition(" ")[2] + "\n" if len(text) > WITHOUT else text + "\n"


@final
@register("recall")
@dataclass(frozen=True)
class Recall(TextTask):
    """One of four facts, after `size` tokens of other text; there is text before the facts as well."""

    sizes: ClassVar = (64, 256, 1024)

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"one of four facts from {self.size} tokens ago"

    @property
    def guess(self) -> float:
        """A quarter: all four values occur in the text."""
        return 1 / FACTS

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """The same facts at every distance; each of the four places is asked equally often."""
        for index in count():
            draws = draws_for("recall", seed, index)
            names = [prose.names[i] for i in draws.distinct_below(len(prose.names), FACTS)]
            values = tuple(prose.things[i] for i in draws.distinct_below(len(prose.things), FACTS))
            asked = (index + index // FACTS) % FACTS
            text = prose.from_random_place(draws)
            before = take(text, round(max(64, self.size / 4) * CHARACTERS_PER_TOKEN))
            between = [next(text) for _ in range(FACTS - 1)]
            prompt = fact_beginning(names[asked])
            after = take(text, round(self.size * CHARACTERS_PER_TOKEN) - len(prompt))
            facts = [f"{fact_beginning(name)} {value}." for name, value in zip(names, values, strict=True)]
            sentences = [*before, *between, *after]
            context, ends = placed(sentences, facts, range(len(before), len(before) + FACTS))
            query = Query(prompt, values, (asked,), known_until=ends[asked])
            yield Item(context, (query,), tail(sentences))


@dataclass(frozen=True)
class NeedleTask(TextTask):
    """Facts at random places of a text of `size` tokens."""

    sizes: ClassVar = (256, 1024, 4096)
    smallest: ClassVar[int] = 256

    def _text(self, prose: Prose, draws: Draws, facts: Sequence[str]) -> tuple[str, list[int], str]:
        """The text, where each fact ends, and the end of the text without facts."""
        characters = round(self.size * CHARACTERS_PER_TOKEN) - sum(len(fact) + 1 for fact in facts)
        sentences = take(prose.from_random_place(draws), characters)
        context, ends = placed(sentences, facts, random_places(draws, len(sentences), len(facts)))
        return context, ends, tail(sentences)


@final
@register("needle")
@dataclass(frozen=True)
class SingleNeedle(NeedleTask):
    """One fact; the other choices are words of no fact."""

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"the only fact in {self.size} tokens"

    @property
    def guess(self) -> float:
        """A quarter: there are four words to choose from."""
        return 1 / FACTS

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """The place of the right word among the choices changes from item to item."""
        for index in count():
            draws = draws_for("needle", seed, index)
            name = prose.names[int(draws.below(len(prose.names), 1)[0])]
            words = tuple(prose.things[i] for i in draws.distinct_below(len(prose.things), FACTS))
            right = index % FACTS
            fact = f"{fact_beginning(name)} {words[right]}."
            context, (end,), without = self._text(prose, draws, [fact])
            yield Item(context, (Query(fact_beginning(name), words, (right,), known_until=end),), without)


@dataclass(frozen=True)
class _SeveralKeys(NeedleTask):
    """Four keys with a value each, of which `asked` are asked."""

    asked: ClassVar[int]

    @property
    def guess(self) -> float:
        """A quarter: all four values occur in the text."""
        return 1 / FACTS

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """Each key is asked equally often."""
        for index in count():
            draws = draws_for(self.kind, seed, index)
            names = [prose.names[i] for i in draws.distinct_below(len(prose.names), FACTS)]
            values = tuple(prose.things[i] for i in draws.distinct_below(len(prose.things), FACTS))
            facts = [f"{fact_beginning(name)} {value}." for name, value in zip(names, values, strict=True)]
            context, ends, without = self._text(prose, draws, facts)
            chosen = [(index + shift) % FACTS for shift in range(self.asked)]
            queries = (Query(fact_beginning(names[i]), values, (i,), known_until=ends[i]) for i in chosen)
            yield Item(context, tuple(queries), without)


@final
@register("multikey")
@dataclass(frozen=True)
class MultiKey(_SeveralKeys):
    """Four keys with a value each; one key is asked."""

    asked: ClassVar[int] = 1

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"one of four facts in {self.size} tokens"


@final
@register("multiquery")
@dataclass(frozen=True)
class MultiQuery(_SeveralKeys):
    """Four keys with a value each; every key is asked, after one reading of the text."""

    asked: ClassVar[int] = FACTS

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"all of four facts in {self.size} tokens, one after the other"


@final
@register("multivalue")
@dataclass(frozen=True)
class MultiValue(NeedleTask):
    """Two keys with three values each; all values of one key are asked."""

    values: ClassVar[int] = 3

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"the three values of one of two keys in {self.size} tokens"

    @property
    def guess(self) -> float:
        """A half, since half of the choices are right."""
        return 0.5

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """The facts of both keys alternate at random."""
        for index in count():
            draws = draws_for("multivalue", seed, index)
            asked, other = (prose.names[i] for i in draws.distinct_below(len(prose.names), 2))
            words = tuple(prose.things[i] for i in draws.distinct_below(len(prose.things), 2 * self.values))
            right = sorted(int(i) for i in draws.distinct_below(len(words), self.values))
            order = [int(i) for i in draws.distinct_below(len(words), len(words))]
            owners = [asked if i in right else other for i in order]
            facts = [
                f"One of the passwords of {owner} is {words[i]}."
                for owner, i in zip(owners, order, strict=True)
            ]
            context, ends, without = self._text(prose, draws, facts)
            known = max(end for owner, end in zip(owners, ends, strict=True) if owner == asked)
            query = Query(
                f"One of the passwords of {asked} is",
                words,
                tuple(right),
                written=f"The {self.values} passwords of {asked} are",
                known_until=known,
            )
            yield Item(context, (query,), without)


@final
@register("variables")
@dataclass(frozen=True)
class VariableTracking(NeedleTask):
    """Four chains of assignments inside running text: VAR A = 48213, VAR B = VAR A; what is VAR B?"""

    chains: ClassVar[int] = 4
    hops: ClassVar[int] = 2

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"the value of a variable after {self.hops} assignments in {self.size} tokens"

    @property
    def guess(self) -> float:
        """A quarter: the choices are the values of the four chains."""
        return 1 / self.chains

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """Each chain is asked equally often."""
        links = self.hops + 1
        for index in count():
            draws = draws_for("variables", seed, index)
            values = _values(draws, self.chains)
            names = _names(draws, self.chains * links)
            order = [
                int(i) % self.chains for i in draws.distinct_below(self.chains * links, self.chains * links)
            ]
            done = [0] * self.chains
            facts, owners = [], []
            for chain in order:
                name = names[chain * links + done[chain]]
                source = f"VAR {names[chain * links + done[chain] - 1]}" if done[chain] else values[chain]
                facts.append(f"VAR {name} = {source}.")
                owners.append(chain)
                done[chain] += 1
            context, ends, without = self._text(prose, draws, facts)
            asked = index % self.chains
            known = max(end for owner, end in zip(owners, ends, strict=True) if owner == asked)
            prompt = f"The value of VAR {names[asked * links + self.hops]} is"
            yield Item(context, (Query(prompt, values, (asked,), known_until=known),), without)


def _values(draws: Draws, number: int) -> tuple[str, ...]:
    """Different numbers of five digits in random order."""
    step = 90_000 // number
    values = [10_000 + step * i + int(draws.below(step, 1)[0]) for i in range(number)]
    return tuple(str(values[i]) for i in draws.distinct_below(number, number))


def _names(draws: Draws, number: int) -> list[str]:
    """Different names of three letters."""
    size = len(_LETTERS)
    pairs = draws.distinct_below(size**2, number)
    last = draws.below(size, number)
    return [_LETTERS[i // size] + _LETTERS[i % size] + _LETTERS[j] for i, j in zip(pairs, last, strict=True)]


@final
@register("words")
@dataclass(frozen=True)
class CommonWords(TextTask):
    """A list of words in which four occur four times as often as the others: which?"""

    sizes: ClassVar = (256, 1024, 4096)
    smallest: ClassVar[int] = 256
    common: ClassVar[int] = 4
    often: ClassVar[int] = 4

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return f"the four most common words in a list of {self.size} tokens"

    @property
    def guess(self) -> float:
        """A half, since half of the choices are right."""
        return 0.5

    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """Every rare word is listed equally often."""
        length = 2 + sum(map(len, WORDS)) / len(WORDS)  # including comma and space
        total = round(self.size * CHARACTERS_PER_TOKEN / length)
        times = max(1, total // 150)
        rare = min(total // times - self.common * self.often, len(WORDS) - self.common)
        for index in count():
            draws = draws_for("words", seed, index)
            words = tuple(WORDS[i] for i in draws.distinct_below(len(WORDS), self.common + rare))
            listed = [word for word in words[: self.common] for _ in range(times * self.often)]
            listed += [word for word in words[self.common :] for _ in range(times)]
            order = draws.distinct_below(len(listed), len(listed))
            context = "A list of words: " + ", ".join(listed[i] for i in order) + ".\n"
            choices = [int(i) for i in draws.distinct_below(2 * self.common, 2 * self.common)]
            query = Query(
                "A word that comes up very often in the list is",
                tuple(words[i] for i in choices),
                tuple(place for place, i in enumerate(choices) if i < self.common),
                written="The four most common words in the list are",
            )
            yield Item(context, (query,))
