"""A corpus: documents in a fixed order under a fingerprint, read one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, final

from maclaurin.data.fingerprint import digest


class Document(NamedTuple):
    """A text, and the share of the corpus that has been read with it (None: unknown)."""

    text: str
    progress: float | None

    @classmethod
    def of(cls, text: str, progress: float | None) -> Document:
        """A document that every tokenizer accepts: lone surrogates, which are no text, become '?'."""
        return cls(text.encode("utf-8", "replace").decode("utf-8"), progress)


class Corpus(ABC):
    """Documents that are never all in memory at once."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name the user gave."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that determines the documents and their order."""
        return digest(self._identity())

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What the fingerprint is the digest of."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """All documents that are not empty, in the corpus's order."""


@final
@dataclass(frozen=True)
class FirstDocuments(Corpus):
    """The first `limit` documents of a corpus."""

    corpus: Corpus
    limit: int

    @property
    def name(self) -> str:
        """The name of the full corpus."""
        return self.corpus.name

    def _identity(self) -> dict[str, Any]:
        return {"kind": "first documents", "of": self.corpus.fingerprint, "limit": self.limit}

    def documents(self) -> Iterator[Document]:
        """The first ones."""
        for count, document in enumerate(islice(self.corpus.documents(), self.limit), start=1):
            yield document._replace(progress=max(count / self.limit, document.progress or 0.0))
