"""Runs by key, shared between studies, and the locks that keep two processes from training one run.

runs/pool/KEY/  config.json records.jsonl checkpoints/   an ordinary run folder, resumable
                progress.json log.txt lock               while it is trained
                record.json                              its result, written last and atomically
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from maclaurin.errors import InputError
from maclaurin.extensions import Extension
from maclaurin.files import LockedError, is_locked, locked, write_file
from maclaurin.study.run_record import FILE, RunRecord, read_run, read_study, write_run

MARKER = ".marker"
#: folders of a run with its weights
MODELS = ("checkpoints", "model")
LOG_LINES = 12
SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_TO_SAVE = 60.0


@final
class PoolEntry:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record_file = path / "record.json"
        self.progress = path / "progress.json"
        self.log = path / "log.txt"
        self.lock = path / "lock"

    def record(self) -> RunRecord | None:
        """The result, if there is one."""
        return read_run(self.record_file)

    def write(self, record: RunRecord) -> None:
        """Store the result."""
        write_run(record, self.record_file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this run; waits for a process that trains it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.lock):
            yield

    def is_busy(self) -> bool:
        """Whether a process trains it now."""
        return is_locked(self.lock)

    def drop_models(self) -> None:
        """Delete weights and checkpoints, which no record needs."""
        for name in MODELS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def forget(self) -> None:
        """Delete the result, so that the run is repeated: a crashed run resumes, any other starts over."""
        record = self.record()
        self.record_file.unlink(missing_ok=True)
        if record is None or record.status != "crashed":
            shutil.rmtree(self.path, ignore_errors=True)

    def last_lines(self) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(
                self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
            )
        except FileNotFoundError:
            return ""

    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


@final
class Pool:
    """The folder of all runs."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def entry(self, key: str) -> PoolEntry:
        """The entry of this key, which may not exist yet."""
        return PoolEntry(self.root / key)

    def entries(self) -> list[PoolEntry]:
        """Every existing run."""
        if not self.root.is_dir():
            return []
        return [PoolEntry(path) for path in sorted(self.root.iterdir()) if path.is_dir()]

    def marker(self) -> str:
        """A random text in a file of the pool: a process that reads the same text sees the same disk."""
        file = self.root / MARKER
        if not file.exists():
            write_file(file, uuid.uuid4().hex.encode())
        return file.read_text(encoding="utf-8")

    def has_marker(self, marker: str | None) -> bool:
        """Whether this is the folder where that text was written."""
        file = self.root / MARKER
        return marker is not None and file.is_file() and file.read_text(encoding="utf-8") == marker


@final
@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where and how a run of a study is trained; nothing here changes its numbers.

    pool           folder of the pool, absolute
    marker         text of the pool's marker file, by which a worker knows whether it sees the same disk
    study_lock     file that is locked while the study runs; None for a run without a study
    threads        torch threads; None leaves them unchanged
    runs_at_once   how many runs share the machine; None if unknown
    group          name of the study, for trackers
    run_name       name of the run in the study, for trackers
    job_type       train, or tune for a run that chooses a learning rate, for trackers
    code           user modules that a worker loads first
    """

    pool: str
    marker: str | None = None
    study_lock: str | None = None
    threads: int | None = None
    runs_at_once: int | None = None
    group: str = ""
    run_name: str = ""
    job_type: str = "train"
    code: tuple[Extension, ...] = ()
    keep_models: bool = False


# ---------------------------------------------------------------------------------- disk use


@final
@dataclass(frozen=True)
class PoolUse:
    """A run of the pool: its size, its weights and checkpoints, and the studies that refer to it."""

    entry: PoolEntry
    size: int
    model_bytes: int
    studies: tuple[str, ...]
    has_result: bool
    is_busy: bool


def pool_use(pool: Pool, studies: Path) -> list[PoolUse]:
    """Every run of a pool; `studies` holds the folders of the studies that may use it."""
    users: dict[str, list[str]] = {}
    for file in sorted(studies.glob(f"*/{FILE}")):
        try:
            study = read_study(file)
        except InputError:
            continue
        for key in study.keys:
            users.setdefault(key, []).append(file.parent.name)
    return [_use(entry, users.get(entry.path.name, [])) for entry in pool.entries()]


def _use(entry: PoolEntry, studies: list[str]) -> PoolUse:
    models = sum(
        file.stat().st_size for name in MODELS for file in (entry.path / name).rglob("*") if file.is_file()
    )
    return PoolUse(entry, entry.size(), models, tuple(studies), entry.record() is not None, entry.is_busy())


# ------------------------------------------------------------------------------ a study's life


@contextmanager
def study_lock(path: Path) -> Iterator[None]:
    """Hold the study's lock; raises if another study is running in the same folder."""
    lock = ExitStack()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # workers of a killed study hold the lock briefly each second to test it, so one failure is not enough
        lock.enter_context(locked(path, timeout=5 * SECONDS_BETWEEN_CHECKS))
    except LockedError:
        raise InputError(
            f"another study is running in {path.parent}: wait for it, or choose another --out."
        ) from None
    except OSError as problem:
        raise InputError(f"{path.parent} cannot be written: {problem.strerror}.") from None
    with lock:
        yield


def end_with_study(path: Path) -> None:
    """End this process once the study's process is gone: first save, then exit."""
    threading.Thread(target=_watch, args=(path,), daemon=True, name="study-watch").start()


def _watch(path: Path) -> None:
    while is_locked(path):
        time.sleep(SECONDS_BETWEEN_CHECKS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    os._exit(1)
