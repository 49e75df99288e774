"""The cache folder (tokens, trained tokenizers, notes about corpora), and the fingerprints for its keys."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.errors import DataError
from maclaurin.files import write_file
from maclaurin.progress_bar import report_progress

VARIABLE = "MACLAURIN_CACHE"


@final
@dataclass(frozen=True)
class Cache:
    """Where prepared data is kept."""

    root: Path

    @classmethod
    def at(cls, folder: str | None) -> Cache:
        """The given folder, else $MACLAURIN_CACHE, else ~/.cache/maclaurin; created if missing."""
        chosen = folder or os.environ.get(VARIABLE) or "~/.cache/maclaurin"
        cache = cls(Path(chosen).expanduser().absolute())
        try:
            for part in (cache.tokens, cache.tokenizers, cache.notes):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise DataError(
                f"the cache folder {cache.root} cannot be created ({problem.strerror}). "
                f"Give another: cache=/path, or the environment variable {VARIABLE}."
            ) from None
        return cache

    @property
    def tokens(self) -> Path:
        """One folder per corpus, tokenizer and split."""
        return self.root / "tokens"

    @property
    def tokenizers(self) -> Path:
        """One file per trained tokenizer."""
        return self.root / "tokenizers"

    @property
    def notes(self) -> Path:
        """Revisions of hub data sets and hashes of large files."""
        return self.root / "corpora"


REMEMBERED_FROM = 16 << 20
"""Files of at least this many bytes are not hashed again while size, time and inode stay the same."""


def digest(plain: Any) -> str:
    """sha256 of plain data (numbers, strings, lists, dicts) in its canonical spelling, in hex."""
    spelling = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(spelling.encode()).hexdigest()


def file_hashes(paths: Sequence[Path], notes: Path, *, progress: bool = True) -> list[str]:
    """sha256 of each file, in hex; the folder `notes` keeps those of large files."""
    total, done = sum(path.stat().st_size for path in paths), 0
    hashes = []
    with report_progress("fingerprinting files", progress) as report:
        for path in paths:
            hashes.append(_file_hash(path, notes))
            done += path.stat().st_size
            report(done / max(total, 1), f"{len(hashes)} of {len(paths)} files")
    return hashes


def _file_hash(path: Path, notes: Path) -> str:
    status = path.stat()
    if status.st_size < REMEMBERED_FROM:
        return _sha256(path)
    stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
    note = notes / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    known = _read_note(note)
    if known is not None and known[0] == stamp:
        return known[1]
    value = _sha256(path)
    write_file(note, json.dumps([stamp, value]))
    return value


def _read_note(note: Path) -> tuple[list[int], str] | None:
    try:
        stamp, value = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return None
    return stamp, value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
