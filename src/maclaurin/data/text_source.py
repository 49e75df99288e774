"""Prepared text as a source: rows of fixed length, by number, in constant time.

T tokens of a row, n tokens of all documents with their separators
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from maclaurin.data.random_order import Permutation
from maclaurin.data.source import NOT_SCORED, Row, Source
from maclaurin.data.splits import SPLITS, TEST, TRAIN, VALIDATION
from maclaurin.data.text_tokenizers import Tokenizer
from maclaurin.data.token_shards import Documents, PreparedTokens
from maclaurin.plain_data import digest


@dataclass(frozen=True)
class Rows(ABC):
    """Rows of a split, by number."""

    documents: Documents
    length: int
    separator: int
    cross_documents: bool

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @property
    @abstractmethod
    def scored(self) -> int:
        """Scored positions of all rows together."""

    @abstractmethod
    def __getitem__(self, number: int) -> Row:
        """One row."""

    def _row(self, start: int, stop: int, documents: np.ndarray | None) -> Row:
        """Positions start … stop−1 predict start+1 … stop; unscored separators fill the rest of the row."""
        read = self.documents.tokens[start : stop + 1].astype(np.int64)
        missing = self.length - (len(read) - 1)
        return Row(
            np.pad(read[:-1], (0, missing), constant_values=self.separator),
            np.pad(read[1:], (0, missing), constant_values=NOT_SCORED),
            None if documents is None else np.pad(documents, (0, missing), constant_values=_next(documents)),
        )


@final
class PackedRows(Rows):
    """Row i holds tokens i·T … (i+1)·T − 1 of all documents; only the last may need padding."""

    def __len__(self) -> int:
        return -(-self.scored // self.length)

    @property
    def scored(self) -> int:
        """n − 1: every token but the first separator is predicted once."""
        return len(self.documents.tokens) - 1

    def __getitem__(self, number: int) -> Row:
        start = number * self.length
        stop = min(start + self.length, self.scored)
        return self._row(start, stop, None if self.cross_documents else self._documents_of(start, stop))

    def _documents_of(self, start: int, stop: int) -> np.ndarray:
        """The document of each position, counting from 0; each has at least one token, its separator."""
        first = self.documents.at(start)
        starts = self.documents.starts[first : first + 1 + stop - start]
        return np.searchsorted(starts, np.arange(start, stop), side="right") - 1


@final
class DocumentRows(Rows):
    """Row i holds the first T tokens of document i with its separator; the rest is not used."""

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def scored(self) -> int:
        """Σᵢ min(T, tokens of document i)."""
        return self._scored

    @cached_property
    def _scored(self) -> int:
        return int(np.minimum(np.diff(self.documents.starts), self.length).sum())

    def __getitem__(self, number: int) -> Row:
        start, end = self.documents.starts[number : number + 2].tolist()
        stop = min(start + self.length, end)
        return self._row(start, stop, None if self.cross_documents else np.zeros(stop - start, np.int64))


def _next(documents: np.ndarray) -> int:
    """The number of the padding, which counts as a separate document."""
    return int(documents[-1]) + 1


LAYOUTS: dict[str, type[Rows]] = {"packed": PackedRows, "documents": DocumentRows}


@final
@dataclass(frozen=True)
class TextSource(Source):
    """Rows of text. Each epoch visits every training row once, in a different order.

    Validation and test rows have one shuffled order that does not depend on the seed. So the first few are a
    fair sample, and runs with different seeds are evaluated on the same rows.
    """

    corpus_name: str
    tokenizer: Tokenizer
    prepared: PreparedTokens
    row_length: int
    layout: str
    cross_documents: bool
    seed: int
    description: str

    @property
    def name(self) -> str:
        """The name of the corpus."""
        return self.corpus_name

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.row_length

    @property
    def fingerprint(self) -> str:
        """Digest of corpus, tokenizer, split, layout and seed."""
        return digest(
            {
                "made_from": self.prepared.manifest.made_from,
                "length": self.length,
                "layout": self.layout,
                "cross_documents": self.cross_documents,
                "seed": self.seed,
                "version": 1,
            }
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the data, with number, tokens and largest share of the held-out documents."""
        held_out = {split: self._size_of(split) for split in (VALIDATION, TEST)}
        return {**super().facts, "data": self.description, "held_out": held_out}

    def _size_of(self, split: str) -> dict[str, float]:
        documents = self.prepared.documents(split)
        lengths = np.diff(documents.starts)
        whole = int(lengths.sum())
        largest = round(float(lengths.max()) / whole, 4) if whole else 0.0
        return {"documents": len(documents), "tokens": whole, "largest": largest}

    @property
    def tokens_per_epoch(self) -> int:
        """Scored tokens of all training rows."""
        return self._train.scored

    def held_out_rows(self, split: str) -> int:
        """Rows of the split's documents."""
        return len(self._rows[split])

    def train_row_numbers(self, first: int, count: int) -> np.ndarray:
        """Epoch e = place // N has its own permutation of the N rows."""
        epochs, places = np.divmod(first + np.arange(count), len(self._train))
        numbers = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            members = epochs == epoch
            numbers[members] = self._order(f"train, seed {self.seed}, epoch {epoch}", self._train)(
                places[members]
            )
        return numbers

    def train_row(self, number: int) -> Row:
        """One row of the training documents."""
        return self._train[number]

    def held_out_row(self, split: str, number: int) -> Row:
        """One row of the split's documents, in shuffled order."""
        rows = self._rows[split]
        return rows[int(self._order(split, rows)(np.array([number]))[0])]

    @property
    def _train(self) -> Rows:
        return self._rows[TRAIN]

    @cached_property
    def _rows(self) -> dict[str, Rows]:
        return {split: self._rows_of(split) for split in SPLITS}

    def _rows_of(self, split: str) -> Rows:
        documents = self.prepared.documents(split)
        return LAYOUTS[self.layout](documents, self.length, self.tokenizer.separator, self.cross_documents)

    @staticmethod
    def _order(key: str, rows: Rows) -> Permutation:
        return Permutation(len(rows), key)
