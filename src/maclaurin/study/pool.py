"""Runs by key: each is an ordinary run folder, with a record once it has a result.

runs/pool/<key>/  config.json records.jsonl checkpoints/   the run, resumable
                  progress.json log.txt lock               while it is trained
                  record.json                              its result; written last, never half
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from maclaurin.files import locked, write_file
from maclaurin.study.lifeline import is_locked
from maclaurin.study.record import RunRecord, run_from_json, run_to_json

MARKER = ".marker"
LINES_TOLD = 12


@final
class PoolEntry:
    """Where everything of one run lies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record_file = path / "record.json"
        self.progress = path / "progress.json"
        self.log = path / "log.txt"
        self.lock = path / "lock"

    def record(self) -> RunRecord | None:
        """The result, if there is one."""
        try:
            return run_from_json(json.loads(self.record_file.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):  # damaged, or of another schema: the run is done again
            return None

    def write(self, record: RunRecord) -> None:
        """Whole or not at all."""
        content = json.dumps(run_to_json(record), separators=(",", ":"))
        write_file(self.record_file, content.encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one at this run, after whoever is at it now."""
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.lock, f"run {self.path.name}"):
            yield

    def is_busy(self) -> bool:
        """Whether somebody trains it now."""
        return self.lock.exists() and is_locked(self.lock)

    def drop_models(self) -> None:
        """Delete what only a resumption or a user of the model would need."""
        for name in ("checkpoints", "model"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def forget(self) -> None:
        """Take the result back, so that the run is done again: a crashed one goes on, another starts anew."""
        record = self.record()
        self.record_file.unlink(missing_ok=True)
        if record is None or record.status != "crashed":
            shutil.rmtree(self.path, ignore_errors=True)

    def last_lines(self) -> str:
        """The end of the log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-LINES_TOLD:])
        except FileNotFoundError:
            return ""


@final
class Pool:
    """The folder of all of them."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def entry(self, key: str) -> PoolEntry:
        """The run of that name, there or not."""
        return PoolEntry(self.root / key)

    def marker(self) -> str:
        """Something only who sees this very folder can read."""
        file = self.root / MARKER
        if not file.exists():
            write_file(file, uuid.uuid4().hex.encode())
        return file.read_text()

    def is_marked(self, marker: str | None) -> bool:
        """Whether this is the folder where that was written."""
        file = self.root / MARKER
        return marker is not None and file.is_file() and file.read_text() == marker
