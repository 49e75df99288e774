"""Text inside one file, by the end of its name: .txt, .jsonl and .parquet.

Each reader gives (text, share of the file read so far), holding a small part of the file at a time.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from maclaurin.data.corpora.compression import COMPRESSIONS, open_stream
from maclaurin.data.errors import DataError
from maclaurin.data.extra import load_extra
from maclaurin.errors import did_you_mean

PIECE = 1 << 14
"""A long .txt file becomes documents of about this many characters, so that it can be split and streamed."""

_PARQUET_ROWS = 256
Texts = Iterator[tuple[str, float]]


def read_txt(path: Path, field: str) -> Texts:
    """One document, or several that end at line ends if the file is longer than PIECE."""
    with open_stream(path) as (stream, raw):
        reader = io.TextIOWrapper(stream, encoding="utf-8-sig")
        try:
            yield from ((piece, _share(raw, path)) for piece in _pieces(reader))
        except UnicodeDecodeError as problem:
            raise DataError(
                f"{path} is not UTF-8 text: {problem.reason} at byte {problem.start} of what was being read. "
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
    arrow = load_extra("pyarrow", "reading .parquet files", "use .jsonl")
    parquet = load_extra("pyarrow.parquet", "reading .parquet files", "use .jsonl")
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise DataError(f"{path}: {_no_field(field, file.schema_arrow.names)}")
            yield from _parquet_rows(file, field, path)
    except (arrow.ArrowInvalid, OSError) as problem:
        raise DataError(f"{path} is not a whole parquet file: {problem}. Fetch it again.") from None


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
        f"Another field is named after a colon: data=path:{known[0] if known else 'field'}."
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
    """`.jsonl.gz` and the like if there is a reader for it."""
    return next((kind for kind in sorted(READABLE, key=len, reverse=True) if path.name.endswith(kind)), None)


def read_texts(path: Path, field: str) -> Texts:
    """The texts of a file whose format is known."""
    kind = format_of(path) or ""
    return READERS[next(plain for plain in READERS if kind.startswith(plain))](path, field)
