"""The folder of a run: its files, its lock, and whether a run can start or continue there.

runs/x/config.json  machine.json  records.jsonl  checkpoints/  model/  adapter/  summary.json

records.jsonl has one line per step and per evaluation; trackers receive the same records. A run in the pool
of a study also has record.json, its result. `find_runs` lists the runs below a folder.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.code_version import FREE_KEYS
from maclaurin.errors import InputError
from maclaurin.extensions import extensions_of
from maclaurin.files import LockedError, is_locked, locked, write_file
from maclaurin.machine import provenance
from maclaurin.plain_data import read_json, write_json
from maclaurin.spec.head_groups import specs_in
from maclaurin.training.config import TrainConfig
from maclaurin.training.trackers import Tracker

#: settings that may differ between a run and its resumption
MAY_DIFFER = (*FREE_KEYS, "device", "test")


@final
class RunFolder:
    """Where the files of one run are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.machine = path / "machine.json"
        self.records = path / "records.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.adapter = path / "adapter"
        self.summary = path / "summary.json"
        self.record = path / "record.json"
        self.lock = path / ".lock"

    # ------------------------------------------------------------------------- before anything is made

    def require(self, *, resume: bool) -> None:
        """Raise if a run can neither start nor continue here; nothing is written."""
        if resume and not self.config.exists():
            raise InputError(f"{self.path} holds no run to resume: leave `resume` out to start one.")
        if not resume and self.config.exists():
            raise InputError(
                f"{self.path} already holds a run: continue it with `resume=True`, or choose another `out`."
            )
        existing = self.path
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            what = "is not a folder" if not existing.is_dir() else "cannot be written to"
            raise InputError(
                f"the run cannot be saved in {self.path}: {existing} {what}. Choose another `out`."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process; a folder that stays empty is removed again."""
        is_new = not self.path.exists()
        lock = ExitStack()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(self.lock, timeout=0.0))
        except LockedError:
            raise InputError(
                f"another process is training in {self.path}: wait for it, or choose another `out`."
            ) from None
        except OSError as problem:
            raise InputError(
                f"the run cannot be saved in {self.path} ({problem.strerror}): choose another `out`."
            ) from None
        try:
            yield
        finally:
            lock.close()
            if is_new and not self.config.exists():
                self.lock.unlink(missing_ok=True)
                with suppress(OSError):  # not empty
                    self.path.rmdir()

    # -------------------------------------------------------------------------------- start and resume

    def start(self, config: TrainConfig, data: dict[str, Any]) -> None:
        """Write the first files of a run, the config last."""
        own = extensions_of(spec for text in config.attention for spec in specs_in(text))
        imports = [found.shown for found in own]
        write_json(self.machine, {**provenance(), "data": data, "imports": imports})
        write_json(self.config, config.to_dict())

    def imports(self) -> list[str]:
        """Files and modules of user parts that the run was started with."""
        return _object_in(self.machine).get("imports", [])

    def settings(self) -> dict[str, Any]:
        """The settings of the run in this folder."""
        try:
            return json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{self.path} holds no run: there is no {self.config}.") from None

    def read_summary(self) -> dict[str, Any]:
        """The summary of a finished run; empty before that."""
        return _object_in(self.summary)

    def check_same(self, config: TrainConfig, data_fingerprint: str) -> None:
        """Raise if the settings differ from those of the run in this folder, or if its data have changed."""
        known = {**TrainConfig().to_dict(), **self.settings()}  # the run may be older than a key
        changed = [
            f"{key}: {known[key]!r} → {value!r}"
            for key, value in config.to_dict().items()
            if key not in MAY_DIFFER and known[key] != value and not (key == "steps" and value > known[key])
        ]
        if changed:
            raise InputError(
                f"{self.path} holds a run with other settings ({'; '.join(changed)}). A run can be continued "
                "for more steps, but not otherwise changed: give the same settings, or choose another `out`."
            )
        before = json.loads(self.machine.read_text(encoding="utf-8"))["data"]["fingerprint"]
        if before != data_fingerprint:
            raise InputError(
                f"the data have changed since this run began (fingerprint {before[:12]} → "
                f"{data_fingerprint[:12]}): restore the old data, or choose another `out`."
            )

    def extend(self, config: TrainConfig, step: int) -> int | None:
        """Record that the run now continues to config.steps; returns the earlier steps if fewer."""
        known = self.settings()
        before = known["steps"]
        if before == config.steps:
            return None
        facts = json.loads(self.machine.read_text(encoding="utf-8"))
        extensions = [*facts.get("extended", []), {"at": step, "from": before, "to": config.steps}]
        write_json(self.machine, {**facts, "extended": extensions})
        write_json(self.config, {**known, "steps": config.steps})
        return before


def _object_in(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    found = read_json(file)
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------ finding runs


@final
@dataclass(frozen=True)
class RunSummary:
    """A run as its folder describes it: of `maclaurin train`, of a sweep, or of the pool of a study.

    status   finished, running or stopped; in a pool also diverged or crashed
    """

    path: Path
    config: Mapping[str, Any]
    status: str
    step: int
    numbers: Mapping[str, float]
    data: str | None = None
    commit: str | None = None

    @property
    def attention(self) -> str:
        """The notation, or one per layer."""
        return ", ".join(self.config.get("attention", ())) or "–"


def find_runs(paths: Sequence[Path]) -> list[RunSummary]:
    """Every run in these folders and below, newest first; a folder without runs is an error."""
    found: dict[Path, RunSummary] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no folder {path}.")
        here = [file.parent for file in [path / "config.json", *sorted(path.rglob("config.json"))]]
        runs = {folder: run for folder in here if (run := summary_of(folder)) is not None}
        if not runs:
            raise InputError(
                f"{path} holds no training run: the folder of a run has config.json and records.jsonl."
            )
        found |= runs
    return sorted(found.values(), key=lambda run: -_changed(run.path))


def summary_of(path: Path) -> RunSummary | None:
    """The run in this folder; None if there is none."""
    folder = RunFolder(path)
    config = _object_in(folder.config)
    if "steps" not in config or "attention" not in config:
        return None
    if record := _object_in(folder.record):
        facts = record.get("provenance", {})
        numbers = _finite({**record["metrics"], "seconds": record.get("seconds")})
        return RunSummary(
            path, config, record["status"], record["step"], numbers, facts.get("data"), facts.get("commit")
        )
    machine, summary = _object_in(folder.machine), folder.read_summary()
    facts = {"data": (machine.get("data") or {}).get("name"), "commit": machine.get("commit")}
    if summary.get("step", 0) >= config["steps"]:
        numbers = {("loss" if name == "test_loss" else name): v for name, v in _finite(summary).items()}
        return RunSummary(path, config, "finished", summary["step"], numbers, **facts)
    lines = read_records(folder.records) if folder.records.is_file() else []
    last = lines[-1] if lines else {"step": 0}
    numbers = _finite({"train_loss": last.get("loss")})
    status = "running" if is_locked(folder.lock) else "stopped"
    return RunSummary(path, config, status, last["step"], numbers, **facts)


def differing_keys(runs: Sequence[RunSummary]) -> list[str]:
    """Config keys in which the runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return [name for name in names if len({json.dumps(run.config.get(name)) for run in runs}) > 1]


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    }


def _changed(folder: Path) -> float:
    return max((file.stat().st_mtime for file in folder.iterdir() if file.is_file()), default=0.0)


# ------------------------------------------------------------------------------------------ records


class Records:
    """The lines of a run on disk. After a resume, lines beyond the checkpoint are removed first."""

    def __init__(self, path: Path, resume_at: int | None, trackers: list[Tracker]) -> None:
        kept = [] if resume_at is None or not path.is_file() else read_records(path)
        lines = [json.dumps(record) + "\n" for record in kept if record["step"] <= (resume_at or 0)]
        write_file(path, "".join(lines))
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._file.write(json.dumps(record) + "\n")
        for tracker in self._trackers:
            tracker.write(record)

    def flush(self) -> None:
        """Write to the disk, so that no record before a checkpoint can be lost."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a line that a crash cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
