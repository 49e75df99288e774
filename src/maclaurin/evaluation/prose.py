"""Material for tasks: running prose, source text that no run of ours trains on, and common words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import final

from maclaurin.data.data_config import stdlib_test_documents
from maclaurin.data.random_order import Draws
from maclaurin.data.recall_rows import NAMES, WORDS
from maclaurin.errors import InputError
from maclaurin.files import read_text

#: characters per token of English prose; sizes of tasks are in such tokens, so that items need no tokenizer
CHARACTERS_PER_TOKEN = 4.0
#: lengths in characters of the sentences that are used; facts are placed between them
SHORTEST, LONGEST = 20, 200
#: a text with fewer sentences repeats itself too soon
FEWEST_SENTENCES = 20
#: with fewer words that are not in the text, items would be too similar
FEWEST_WORDS = 24
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)[\"”’']*\s+(?=[\"“‘(]*[A-Z])")


@final
@dataclass(frozen=True)
class Prose:
    """A text as sentences; tasks take passages of it from random places.

    name         of the text, for results
    paragraphs   one string each
    """

    name: str
    paragraphs: tuple[str, ...]

    @staticmethod
    def embedded() -> Prose:
        """Chapters 1 to 9 of Moby-Dick, about 25,000 tokens, half of them in sentences that are used."""
        file = resources.files("maclaurin.evaluation") / "assets" / "moby-dick.txt"
        return Prose("moby-dick", tuple(file.read_text("utf-8").splitlines()))

    @staticmethod
    def read(file: Path) -> Prose:
        """A UTF-8 file whose paragraphs are lines or are separated by empty lines."""
        text = read_text(file, "text")
        blocks = re.split(r"\n\s*\n", text) if re.search(r"\S\n\s*\n\S", text) else text.splitlines()
        found = Prose(file.name, tuple(line for block in blocks if (line := " ".join(block.split()))))
        if len(found.sentences) < FEWEST_SENTENCES:
            raise InputError(
                f"`text`: {file} has {len(found.sentences)} sentences; at least {FEWEST_SENTENCES} are "
                "needed to hide facts in. Give a longer text, or leave it out."
            )
        return found

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """Sentences in order, without very short and very long ones."""
        found = (part for paragraph in self.paragraphs for part in _SENTENCE_END.split(paragraph))
        return tuple(sentence for sentence in found if SHORTEST <= len(sentence) <= LONGEST)

    @cached_property
    def sha256(self) -> str:
        """Digest of the text."""
        return hashlib.sha256("\n".join(self.paragraphs).encode()).hexdigest()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names for keys that do not occur in the text."""
        return self._unused(NAMES)

    @cached_property
    def things(self) -> tuple[str, ...]:
        """Words for values that do not occur in the text."""
        return self._unused(WORDS)

    def _unused(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """The words that are not in the text, or all words if too few are left."""
        used = set(re.findall(r"\w+", " ".join(self.sentences).lower()))
        unused = tuple(word for word in words if word.lower() not in used)
        return unused if len(unused) >= FEWEST_WORDS else words

    def from_random_place(self, draws: Draws) -> Iterator[str]:
        """Endless sentences from a random one on: after the last comes the first."""
        place = int(draws.below(len(self.sentences), 1)[0])
        while True:
            yield self.sentences[place % len(self.sentences)]
            place += 1


def take(sentences: Iterator[str], characters: int) -> list[str]:
    """Sentences with `characters` characters in total; the last one may be cut at the end of a word."""
    taken: list[str] = []
    left = characters
    while left >= SHORTEST:
        sentence = next(sentences)
        if len(sentence) > left:
            sentence = sentence[: sentence.rfind(" ", 0, left)].rstrip(",;:—- ") + "."
            left = 0
        taken.append(sentence)
        left -= len(sentence) + 1
    return taken


def held_out_sources() -> list[str]:
    """Files of the standard library that runs on `stdlib` only test on, at the usual fractions."""
    return list(stdlib_test_documents())


def draws_for(task: str, seed: int, index: int) -> Draws:
    """The random numbers of one item."""
    return Draws(f"evaluation {task} {seed}", 1, index)
