"""The source code of the running Python's standard library: real text on every machine."""

from __future__ import annotations

import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.data.corpus import Corpus, Document
from maclaurin.data.data_errors import DataError
from maclaurin.data.splits import document_hash

FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test"})


@final
@dataclass(frozen=True)
class StandardLibrary(Corpus):
    """One document per .py file, sorted by path, each text once; about 10 MB without its tests, 31 with.

    Files that are not text in the encoding they declare (some tests are invalid on purpose) are left out.
    """

    with_tests: bool = False
    folder: Path | None = None  # None: that of the running Python

    @property
    def name(self) -> str:
        """`stdlib` or `stdlib:tests`."""
        return "stdlib:tests" if self.with_tests else "stdlib"

    def _identity(self) -> dict[str, Any]:
        """The Python version and the hashes of all documents."""
        hashes = [document_hash(document.text).hex() for document in self.documents()]
        return {"kind": "stdlib", "python": platform.python_version(), "documents": hashes}

    def documents(self) -> Iterator[Document]:
        """The files' texts."""
        paths = self._paths()
        seen: set[bytes] = set()
        for count, path in enumerate(paths, start=1):
            text = _source_text(path)
            if not text.strip() or (key := document_hash(text)) in seen:
                continue
            seen.add(key)
            yield Document.of(text, count / len(paths))

    def _paths(self) -> list[Path]:
        folder = self.folder or Path(sysconfig.get_path("stdlib"))
        left_out = FOREIGN if self.with_tests else FOREIGN | TESTS
        paths = [
            path for path in folder.rglob("*.py") if left_out.isdisjoint(path.relative_to(folder).parts[:-1])
        ]
        if not paths:
            raise DataError(
                f"the standard library at {folder} has no .py files (is it an archive?). "
                "Use text of your own: data=/path/to/files."
            )
        return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def _source_text(path: Path) -> str:
    """The text in the encoding its first lines declare; empty if it is invalid."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
