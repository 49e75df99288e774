"""The cache folder (tokens, tokenizers, notes about corpora): filled once, with fingerprints as keys."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from maclaurin.errors import DataError, MaclaurinError
from maclaurin.files import locked, new_folder, remove_leftovers, sha256
from maclaurin.plain_data import read_json, write_json
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


class StorageError(MaclaurinError):
    """A folder of the cache that could not be written."""


def complete_folder(
    folder: Path,
    fill: Callable[[Path], None],
    is_complete: Callable[[Path], bool],
    *,
    what: str,
    progress: bool = True,
    advice: str = "Free some space.",
) -> None:
    """Make sure that `folder` is complete: if it is not, fill a temporary folder and rename it to `folder`.

    A lock avoids filling it twice. Correctness does not depend on the lock: the first process to rename
    wins, and the others discard theirs. `advice` ends the error message for a full disk.
    """
    if is_complete(folder):
        return
    with preparing(folder, what, progress=progress) as held:
        if is_complete(folder):
            return
        if held:
            remove_leftovers(folder)
        try:
            with new_folder(folder, keep=is_complete) as temporary:
                fill(temporary)
        except OSError as problem:
            raise _explained(problem, folder, advice) from problem


@contextmanager
def preparing(path: Path, what: str, *, progress: bool = True) -> Iterator[bool]:
    """Hold the lock of a file or folder of the cache, and report while another process prepares it.

    Yields False, without waiting, if the file system has no locks.
    """
    with ExitStack() as stack:
        with report_progress(f"waiting for the process that prepares {what}", progress) as report:
            lock = locked(path.with_name(f".{path.name}.lock"), required=False, on_wait=lambda: report(None))
            held = stack.enter_context(lock)
        yield held


def _explained(problem: OSError, folder: Path, advice: str) -> StorageError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk of {folder.parent} is full; nothing incomplete was left there. {advice}"
        )
    return StorageError(f"{folder} could not be written: {problem}.")


HASH_CACHE_MIN_BYTES = 16 << 20
"""Files of at least this many bytes are not hashed again while size, time and inode stay the same."""


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
    if status.st_size < HASH_CACHE_MIN_BYTES:
        return sha256(path)
    stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
    note = notes / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    known = read_json(note)
    if isinstance(known, list) and known[:1] == [stamp]:
        return known[1]
    value = sha256(path)
    write_json(note, [stamp, value], indent=None)
    return value
