"""The hash of a file's bytes; that of a large file is remembered until the file changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from maclaurin.data.cache.whole_file import write_whole_file
from maclaurin.data.progress import report_progress

REMEMBERED_FROM = 16 << 20
"""Files of at least this many bytes are not read again while size, time and inode stay the same."""


def content_hashes(paths: Sequence[Path], memory: Path, *, progress: bool = True) -> list[str]:
    """sha256 of each file, in hex; `memory` is the folder where those of large files are kept."""
    total, done = sum(path.stat().st_size for path in paths), 0
    hashes = []
    with report_progress("fingerprinting files", progress) as report:
        for path in paths:
            hashes.append(_content_hash(path, memory))
            done += path.stat().st_size
            report(done / max(total, 1), f"{len(hashes)} of {len(paths)} files")
    return hashes


def _content_hash(path: Path, memory: Path) -> str:
    status = path.stat()
    if status.st_size < REMEMBERED_FROM:
        return _sha256(path)
    stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
    note = memory / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    known = _read_note(note)
    if known is not None and known[0] == stamp:
        return known[1]
    value = _sha256(path)
    write_whole_file(note, json.dumps([stamp, value]).encode())
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
