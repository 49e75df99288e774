"""Text files as a corpus: a file, or every readable file under a folder.

    .txt       one document, or several if the file is long
    .jsonl     a document per line, under the key `text` or the one named after a colon
    .parquet   a document per row, in the column `text` or the one named after a colon

.txt and .jsonl may be compressed (.gz, .xz, .zst). Only .parquet and .zst need a library. Each reader yields
(text, share of the file read so far) and holds only a small part of the file in memory.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast, final

from maclaurin.data.cache_folder import file_hashes
from maclaurin.data.corpus import Corpus, Document
from maclaurin.errors import DataError, load_extra
from maclaurin.wording import did_you_mean

Texts = Iterator[tuple[str, float]]

PIECE = 1 << 14
"""A long .txt file is cut into documents of about this many characters."""

_PARQUET_ROWS = 256
COMPRESSIONS = (".gz", ".xz", ".zst")
_CHUNK = 1 << 18


@final
@dataclass(frozen=True)
class Files(Corpus):
    """The texts of a file, or of every readable file under a folder, sorted by path."""

    root: Path
    field: str
    notes: Path  # folder for the hashes of large files
    progress: bool = True

    @classmethod
    def named(cls, written: str, notes: Path, progress: bool = True) -> Files:
        """`path` or `path:field`."""
        path, _, field = written.rpartition(":")
        if path and not Path(written).expanduser().exists():
            return cls(Path(path).expanduser(), field, notes, progress)
        return cls(Path(written).expanduser(), "text", notes, progress)

    @property
    def name(self) -> str:
        """The path, with the field if it is not the usual one."""
        return f"{self.root}" if self.field == "text" else f"{self.root}:{self.field}"

    def _identity(self) -> dict[str, Any]:
        """The contents and formats of the files in order; their names do not matter."""
        hashes = file_hashes(self._paths, self.notes, progress=self.progress)
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
                f"{self.root} cannot be read as text: its name must end in one of {', '.join(READABLE)}."
            )
        return self.root


def _found(kinds: list[str]) -> str:
    return f" (found {', '.join(kinds)})" if kinds else ""


def read_txt(path: Path, field: str) -> Texts:
    """One document, or several that end at line ends if the file is longer than PIECE."""
    with open_stream(path) as (stream, raw):
        reader = io.TextIOWrapper(stream, encoding="utf-8-sig")
        try:
            yield from ((piece, _share(raw, path)) for piece in _pieces(reader))
        except UnicodeDecodeError as problem:
            raise DataError(
                f"{path} is not UTF-8 text: {problem.reason} at byte {problem.start} of the part being read. "
                "Convert it first, for example with iconv."
            ) from None


def _pieces(reader: io.TextIOWrapper) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    while line := reader.readline(PIECE):
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            yield "".join(lines)
            lines, size = [], 0
    yield "".join(lines)


def read_jsonl(path: Path, field: str) -> Texts:
    """The string under `field` of each line's object; blank lines are skipped."""
    with open_stream(path) as (stream, raw):
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _text_of_line(line, field, f"{path}, line {number}"), _share(raw, path)


def _text_of_line(line: bytes, field: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise DataError(f"{place} is not JSON: {problem}. Each line must hold one JSON object.") from None
    if not isinstance(value, dict):
        raise DataError(f"{place} holds {type(value).__name__}, not an object with the field {field!r}.")
    if field not in value:
        raise DataError(f"{place}: {_no_field(field, list(value))}")
    return text_or_error(value[field], field, place)


def read_parquet(path: Path, field: str) -> Texts:
    """The column `field`, a few hundred rows at a time."""
    arrow = load_extra("pyarrow", "data", "reading .parquet files", "use .jsonl")
    parquet = load_extra("pyarrow.parquet", "data", "reading .parquet files", "use .jsonl")
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise DataError(f"{path}: {_no_field(field, file.schema_arrow.names)}")
            yield from _parquet_rows(file, field, path)
    except (arrow.ArrowInvalid, OSError) as problem:
        raise DataError(f"{path} is not a complete parquet file: {problem}. Download it again.") from None


def _parquet_rows(file: Any, field: str, path: Path) -> Texts:
    row, rows = 0, file.metadata.num_rows
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
        for value in batch.column(0).to_pylist():
            row += 1
            yield text_or_error(value, field, f"{path}, row {row}"), row / rows


def text_or_error(value: object, field: str, place: str) -> str:
    """The value if it is a string."""
    if not isinstance(value, str):
        shown = "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        raise DataError(f"{place}: the field {field!r} holds {shown}, not text.")
    return value


def _no_field(field: str, known: list[str]) -> str:
    return (
        f"there is no field {field!r}; there are {', '.join(known) or 'none'}.{did_you_mean(field, known)} "
        f"Name another field after a colon: data=path:{known[0] if known else 'field'}."
    )


def _share(raw: BinaryIO, path: Path) -> float:
    return raw.tell() / max(path.stat().st_size, 1)


READERS: dict[str, Callable[[Path, str], Texts]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
READABLE = (*READERS, *(kind + end for kind in (".txt", ".jsonl") for end in COMPRESSIONS))


def format_of(path: Path) -> str | None:
    """The format, such as `.jsonl.gz`; None if there is no reader for it."""
    return next((kind for kind in sorted(READABLE, key=len, reverse=True) if path.name.endswith(kind)), None)


def read_texts(path: Path, field: str) -> Texts:
    """The texts of a file whose format is known."""
    kind = format_of(path) or ""
    return READERS[next(plain for plain in READERS if kind.startswith(plain))](path, field)


@contextmanager
def open_stream(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(decompressed bytes, the file itself, whose position is the progress)."""
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                yield cast("BinaryIO", gzip.GzipFile(fileobj=raw)), raw
            elif path.suffix == ".xz":
                with lzma.open(raw) as stream:
                    yield cast("BinaryIO", stream), raw
            elif path.suffix == ".zst":
                yield io.BufferedReader(_Zstandard(raw), _CHUNK), raw
            else:
                yield raw, raw
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as problem:
        raise DataError(
            f"{path} is not a complete compressed file ({problem}). Download it again or leave it out."
        ) from None


@final
class _Zstandard(io.RawIOBase):
    """Zstandard frames one after the other; unlike the library's stream, it detects a missing end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._library = load_extra("zstandard", "data", "reading .zst files", "use .gz")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._rest_of_frame() or self._raw.read(_CHUNK)
            if not compressed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the last zstandard frame has no end")
                return 0
            self._decompress(compressed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _rest_of_frame(self) -> bytes:
        return self._frame.unused_data if self._frame is not None and self._frame.eof else b""

    def _decompress(self, compressed: bytes) -> None:
        if self._frame is None or self._frame.eof:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._ready = self._frame.decompress(compressed)
        except self._library.ZstdError as problem:
            raise EOFError(str(problem)) from None
