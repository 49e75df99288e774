"""A corpus: documents in a fixed order under a fingerprint, read one at a time.

Python's standard library is a corpus that every machine has.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, final

from maclaurin.data.splits import document_hash
from maclaurin.errors import DataError
from maclaurin.plain_data import digest


class Document(NamedTuple):
    """A text, and the share of the corpus read up to its end (None: unknown)."""

    text: str
    progress: float | None

    @classmethod
    def of(cls, text: str, progress: float | None) -> Document:
        """A document that every tokenizer accepts: lone surrogates, which are not valid text, become '?'."""
        return cls(text.encode("utf-8", "replace").decode("utf-8"), progress)


class Corpus(ABC):
    """Documents that are never all in memory at once."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name the user gave."""

    @property
    def description(self) -> str:
        """The name, with what else a reader needs to find the same text."""
        return self.name

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

    @property
    def longest_held_out(self) -> int | None:
        """Documents with more characters than this are never held out; None: there is no limit."""
        return None


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

    @property
    def description(self) -> str:
        """The full corpus, and how much of it."""
        return f"first {self.limit} documents of {self.corpus.description}"

    def _identity(self) -> dict[str, Any]:
        return {"kind": "first documents", "of": self.corpus.fingerprint, "limit": self.limit}

    @property
    def longest_held_out(self) -> int | None:
        """The same limit as in the full corpus."""
        return self.corpus.longest_held_out

    def documents(self) -> Iterator[Document]:
        """The first `limit` documents of the corpus."""
        for count, document in enumerate(islice(self.corpus.documents(), self.limit), start=1):
            yield document._replace(progress=max(count / self.limit, document.progress or 0.0))


FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test"})
#: generated code pages, and codecs that differ from each other in one word
CODECS = frozenset({"encodings"})
#: first characters of a line of a table, after brackets: it begins with a string or a number
_LITERALS = frozenset("'\"0123456789")
_DOCSTRINGS = ("'''", '"""')
#: share of the characters in lines of a table from which a file is one
TABLE_SHARE = 0.5
#: names a folder made by `StandardLibrary.copy_to`, to be read in place of the running Python's library
STDLIB_VARIABLE = "MACLAURIN_STDLIB"
#: file of such a folder: the version of the Python whose library it holds
PYTHON_VERSION = "PYTHON_VERSION"
#: raised when other files, or other splits of them, are chosen from the same library
STDLIB_VERSION = 2


@final
@dataclass(frozen=True)
class StandardLibrary(Corpus):
    """One document per .py file, sorted by path, each text once; about 10 MB without its tests, 31 with.

    Left out are files that are not text in the encoding they declare (some tests are invalid on purpose), the
    folder encodings, and every file with at least half of its characters in lines of a table (topics of the
    help, HTML entities, locale names). Tables are easy or impossible to predict, and one of them can be a
    large part of a small test set. Files longer than 60,000 characters always go to the training split, so
    that no file is more than about a tenth of the test or the validation data.

    Each version of Python has its own library. To use this text elsewhere, `copy_to` writes a folder, and
    $MACLAURIN_STDLIB names it.
    """

    with_tests: bool = False
    folder: Path | None = None  # None: $MACLAURIN_STDLIB, else the library of the running Python

    @property
    def name(self) -> str:
        """`stdlib` or `stdlib:tests`."""
        return "stdlib:tests" if self.with_tests else "stdlib"

    @property
    def description(self) -> str:
        """The name and the version of Python."""
        return f"{self.name} of Python {self.python}"

    @cached_property
    def python(self) -> str:
        """The version of the Python whose library this is."""
        written = self._root / PYTHON_VERSION
        if written.is_file():
            return written.read_text(encoding="utf-8").strip()
        if self.folder is None and os.environ.get(STDLIB_VARIABLE):
            raise DataError(
                f"{STDLIB_VARIABLE}={self._root} is not a copy of a standard library: it has no file "
                f"{PYTHON_VERSION}. Make one with StandardLibrary().copy_to(folder)."
            )
        return platform.python_version()

    def copy_to(self, folder: Path) -> None:
        """Copy the files this corpus may read, and the version of Python, to a new or empty folder."""
        if folder.exists() and any(folder.iterdir()):
            raise DataError(f"{folder} is not empty: a library is copied to a new folder.")
        for path in self._paths():
            target = folder / path.relative_to(self._root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        (folder / PYTHON_VERSION).write_text(f"{self.python}\n", encoding="utf-8")

    @property
    def _root(self) -> Path:
        named = os.environ.get(STDLIB_VARIABLE)
        return self.folder or (Path(named).expanduser() if named else Path(sysconfig.get_path("stdlib")))

    def _identity(self) -> dict[str, Any]:
        """The Python version and the hashes of all documents."""
        hashes = [document_hash(document.text).hex() for document in self.documents()]
        version = {"python": self.python, "version": STDLIB_VERSION}
        return {"kind": "stdlib", **version, "documents": hashes}

    @property
    def longest_held_out(self) -> int | None:
        """About a hundredth of the library, which is a tenth of what a split holds out."""
        return 60_000

    def documents(self) -> Iterator[Document]:
        """The files' texts."""
        paths = self._paths()
        seen: set[bytes] = set()
        for count, path in enumerate(paths, start=1):
            text = _source_text(path)
            if not text.strip() or is_table(text) or (key := document_hash(text)) in seen:
                continue
            seen.add(key)
            yield Document.of(text, count / len(paths))

    def _paths(self) -> list[Path]:
        folder = self._root
        left_out = FOREIGN | CODECS if self.with_tests else FOREIGN | CODECS | TESTS
        paths = [
            path for path in folder.rglob("*.py") if left_out.isdisjoint(path.relative_to(folder).parts[:-1])
        ]
        if not paths:
            raise DataError(
                f"the standard library at {folder} has no .py files (is it an archive?). "
                "Use your own text: data=/path/to/files."
            )
        return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def is_table(text: str) -> bool:
    """Whether at least half of the characters are in lines that begin with a string or a number."""
    found = 0
    for line in text.splitlines():
        begun = line.lstrip(" \t([{")
        if begun[:1] in _LITERALS and not begun.startswith(_DOCSTRINGS):
            found += len(line)
    return found >= TABLE_SHARE * len(text)


def _source_text(path: Path) -> str:
    """The text in the encoding its first lines declare; empty if it is invalid."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
