"""Train, validation and test documents: three disjoint splits, decided by each document's own text.

    u = hash(text) / 2⁶⁴;   test if u < test_fraction, validation if u < test_fraction + validation_fraction

So copies of a text are always in the same split, and no document changes its split when others are added.
A corpus can have a limit on the length of a held-out document; longer ones are trained on.
A corpus with too few documents for that is split within its documents: see `BlockSplitter`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, final

from maclaurin.errors import DataError

if TYPE_CHECKING:
    from maclaurin.data.corpus import Corpus

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)

#: share of the documents in the validation and in the test split
USUAL_FRACTION = 0.02
#: the same for the standard library: 0.02 of its 600 files would be ten
STDLIB_FRACTION = 0.1

_FEWEST_DOCUMENTS = 10  # with fewer, documents are cut into blocks
_BLOCKS = 100
_SHORTEST_BLOCK, _LONGEST_BLOCK = 64, 1 << 14  # characters


def document_hash(text: str) -> bytes:
    """A hash of 128 bits of the text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone and is uniform over texts."""
    return int.from_bytes(document_hash(text)[:8], "big") / 2**64


def usual_fraction(data: str) -> float:
    """The share of the documents that each held-out split gets by default."""
    return STDLIB_FRACTION if data.partition(":")[0] == "stdlib" else USUAL_FRACTION


@final
@dataclass(frozen=True)
class Fractions:
    """Shares of the documents that are held out."""

    validation: float
    test: float

    def __post_init__(self) -> None:
        if not (0 <= self.validation < 1 and 0 < self.test < 1 and self.validation + self.test < 1):
            raise DataError(
                f"validation_fraction={self.validation:g} and test_fraction={self.test:g} must lie between 0 "
                "and 1 and leave something to train on; 0.02 each is usual."
            )

    def split_of(self, text: str) -> str:
        """The split of a document."""
        share = hash_share(text)
        if share < self.test:
            return TEST
        return VALIDATION if share < self.test + self.validation else TRAIN

    @property
    def used(self) -> frozenset[str]:
        """The splits that must not be empty."""
        return frozenset(SPLITS if self.validation else (TRAIN, TEST))


class Splitter(ABC):
    """Assigns the text of a corpus to splits."""

    fractions: Fractions

    @abstractmethod
    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """A document as (split, text), in order; together the texts are the document."""

    def training_texts(self, text: str) -> Iterator[str]:
        """The parts of a document that are trained on."""
        return (part for split, part in self.parts(text) if split == TRAIN)

    @property
    def identity(self) -> dict[str, float]:
        """The numbers that the splits of a given corpus depend on."""
        return {"validation": self.fractions.validation, "test": self.fractions.test}


@final
@dataclass(frozen=True)
class DocumentSplitter(Splitter):
    """Each document belongs to one split as a whole; one longer than `longest` characters is trained on."""

    fractions: Fractions
    longest: int | None = None

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """The document itself."""
        yield self.split_of(text), text

    def split_of(self, text: str) -> str:
        """The split of a document."""
        if self.longest is not None and len(text) > self.longest:
            return TRAIN
        return self.fractions.split_of(text)


@final
@dataclass(frozen=True)
class BlockSplitter(Splitter):
    """For one or a few documents: cuts them into blocks and holds out those with the smallest hashes.

    Every split gets at least one block, whatever the fractions. Neighbouring blocks of one split stay
    together. Blocks with the same text are in the same split.
    """

    fractions: Fractions
    block: int  # characters
    held_out: dict[bytes, str]  # block hash → split

    @classmethod
    def of(cls, name: str, texts: Iterable[str], block: int, fractions: Fractions) -> BlockSplitter:
        """Rank the blocks of all texts by their hash."""
        hashes = sorted({document_hash(part) for text in texts for part in _blocks(text, block)})
        wanted = [(TEST, fractions.test), (VALIDATION, fractions.validation)]
        held_out: dict[bytes, str] = {}
        for split, fraction in wanted:
            if fraction > 0:
                first = len(held_out)
                count = max(1, round(fraction * len(hashes)))
                held_out |= dict.fromkeys(hashes[first : first + count], split)
        if len(hashes) <= len(held_out) or not fractions.used - {TRAIN} <= set(held_out.values()):
            raise DataError(
                f"{name} holds too little text to split into {', '.join(SPLITS)}: it has {len(hashes)} "
                f"different block{'s' if len(hashes) != 1 else ''} of about {block} characters. "
                "Give more text, or smaller fractions."
            )
        return cls(fractions, block, held_out)

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """Runs of blocks of the same split."""
        for split, blocks in groupby(_blocks(text, self.block), self._split_of):
            yield split, "".join(blocks)

    def _split_of(self, block: str) -> str:
        return self.held_out.get(document_hash(block), TRAIN)


@final
@dataclass(frozen=True)
class CorpusSplitter(Splitter):
    """By document if that fills every split of the corpus, else by block; looked up when first needed.

    So a corpus whose tokens are in the cache is not read, and the hub is not contacted.
    """

    corpus: Corpus
    fractions: Fractions

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """The parts by the chosen splitter."""
        return self._chosen.parts(text)

    @property
    def identity(self) -> dict[str, float]:
        """The fractions, and the limit on the length of a held-out document if the corpus has one."""
        longest = self.corpus.longest_held_out
        limit = {} if longest is None else {"longest": longest}
        return {"validation": self.fractions.validation, "test": self.fractions.test, **limit}

    @cached_property
    def _chosen(self) -> Splitter:
        return split_corpus(self.corpus, self.fractions)


def split_corpus(corpus: Corpus, fractions: Fractions) -> Splitter:
    """By document if that fills every split, else by block; reads no more documents than needed."""
    found: set[str] = set()
    documents = characters = longest = 0
    by_document = DocumentSplitter(fractions, corpus.longest_held_out)
    for document in corpus.documents():
        found.add(by_document.split_of(document.text))
        if fractions.used <= found:
            return by_document
        documents += 1
        characters += len(document.text)
        longest = max(longest, len(document.text))
    if not documents:
        raise DataError(f"{corpus.name} holds no text.")
    block = min(max(characters // _BLOCKS, _SHORTEST_BLOCK), _LONGEST_BLOCK)
    texts = (document.text for document in corpus.documents())
    return BlockSplitter.of(
        corpus.name, texts, longest if documents >= _FEWEST_DOCUMENTS else block, fractions
    )


def _blocks(text: str, size: int) -> Iterator[str]:
    """Consecutive parts of at least `size` characters (the last may be shorter) that end at line ends.

    A line longer than a block is cut inside the line.
    """
    block: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), size):
            piece = line[start : start + size]
            block.append(piece)
            length += len(piece)
            if length >= size:
                yield "".join(block)
                block, length = [], 0
    if block:
        yield "".join(block)
