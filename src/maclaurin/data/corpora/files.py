"""A local file or folder as a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from maclaurin.data.corpora.content_hash import content_hashes
from maclaurin.data.corpora.corpus import Corpus, Document
from maclaurin.data.corpora.formats import PIECE, READABLE, format_of, read_texts
from maclaurin.data.errors import DataError


@final
@dataclass(frozen=True)
class Files(Corpus):
    """The texts of a file, or of every readable file under a folder, sorted by path."""

    root: Path
    field: str
    memory: Path  # folder for what is remembered about large files
    progress: bool = True

    @classmethod
    def named(cls, written: str, memory: Path, progress: bool = True) -> Files:
        """`path` or `path:field`."""
        path, _, field = written.rpartition(":")
        if path and not Path(written).expanduser().exists():
            return cls(Path(path).expanduser(), field, memory, progress)
        return cls(Path(written).expanduser(), "text", memory, progress)

    @property
    def name(self) -> str:
        """The path, with the field if it is not the usual one."""
        return f"{self.root}" if self.field == "text" else f"{self.root}:{self.field}"

    def _identity(self) -> dict[str, Any]:
        """The bytes and formats of the files in their order; their names do not matter."""
        hashes = content_hashes(self._paths, self.memory, progress=self.progress)
        files = [[format_of(path), value] for path, value in zip(self._paths, hashes, strict=True)]
        return {"kind": "files", "field": self.field, "piece": PIECE, "files": files}

    def documents(self) -> Iterator[Document]:
        """The texts of one file after the other."""
        sizes = [path.stat().st_size for path in self._paths]
        total, done = max(sum(sizes), 1), 0
        for path, size in zip(self._paths, sizes, strict=True):
            for text, share in read_texts(path, self.field):
                if text.strip():
                    yield Document.of(text, (done + size * share) / total)
            done += size

    @cached_property
    def _paths(self) -> list[Path]:
        if not self.root.exists():
            raise DataError(f"there is no file or folder {self.root}.")
        if self.root.is_file():
            return [self._checked_file()]
        files = [path for path in self.root.rglob("*") if path.is_file()]
        readable = [path for path in files if format_of(path)]
        if not readable:
            found = sorted({path.suffix or path.name for path in files})[:8]
            raise DataError(
                f"none of the {len(files)} files under {self.root} can be read"
                f"{_found(found)}; readable are {', '.join(READABLE)}."
            )
        return sorted(readable, key=lambda path: path.relative_to(self.root).as_posix())

    def _checked_file(self) -> Path:
        if format_of(self.root) is None:
            raise DataError(
                f"{self.root} cannot be read as text: its name does not end in one of {', '.join(READABLE)}."
            )
        return self.root


def _found(kinds: list[str]) -> str:
    return f" (found {', '.join(kinds)})" if kinds else ""
