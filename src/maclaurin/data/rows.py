"""Documents → rows of fixed length, by number, in constant time.

T tokens of a row, n tokens of all documents with their separators
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from maclaurin.data.batch import NOT_SCORED, Row
from maclaurin.data.tokens.token_folder import Documents


@dataclass(frozen=True)
class Rows(ABC):
    """Rows that could all be laid out, one after the other."""

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
        """Scored places of all rows together."""

    @abstractmethod
    def __getitem__(self, number: int) -> Row:
        """One row."""

    def _row(self, start: int, stop: int, documents: np.ndarray | None) -> Row:
        """Places start … stop−1 predict start+1 … stop; separators that are not scored fill the row."""
        read = self.documents.tokens[start : stop + 1]
        missing = self.length - (len(read) - 1)
        return Row(
            np.pad(read[:-1], (0, missing), constant_values=self.separator),
            np.pad(read[1:], (0, missing), constant_values=NOT_SCORED),
            None if documents is None else np.pad(documents, (0, missing), constant_values=_next(documents)),
        )


@final
class PackedRows(Rows):
    """Row i holds tokens i·T … (i+1)·T − 1 of all documents; only the last may need filling."""

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
        """The document of each place, counting from 0; each has at least one place, its separator."""
        first = self.documents.at(start)
        starts = self.documents.starts[first : first + 1 + stop - start]
        return np.searchsorted(starts, np.arange(start, stop), side="right") - 1


@final
class DocumentRows(Rows):
    """Row i holds the first T tokens of document i with its separator; what is left of it is never seen."""

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def scored(self) -> int:
        """Σᵢ min(T, tokens of document i)."""
        return self._scored

    @cached_property
    def _scored(self) -> int:
        at_once, total = 1 << 16, 0
        for first in range(0, len(self), at_once):
            sizes = np.diff(self.documents.starts[first : first + at_once + 1])
            total += int(np.minimum(sizes, self.length).sum())
        return total

    def __getitem__(self, number: int) -> Row:
        start, end = self.documents.starts[number : number + 2].tolist()
        stop = min(start + self.length, end)
        return self._row(start, stop, None if self.cross_documents else np.zeros(stop - start, np.int64))


def _next(documents: np.ndarray) -> int:
    """Filler is a document of its own."""
    return int(documents[-1]) + 1


LAYOUTS: dict[str, type[Rows]] = {"packed": PackedRows, "documents": DocumentRows}
