"""records.jsonl, one line per step and per evaluation, and trackers that receive the same records."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from maclaurin.errors import InputError
from maclaurin.files import write_file


class Tracker(Protocol):
    """A service that receives every record."""

    def write(self, record: dict[str, Any]) -> None:
        """One record."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


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


#: tracker → the module it needs
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}


def require_trackers(names: tuple[str, ...]) -> None:
    """Raise before anything is written if a tracker is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"there is no tracker {name!r}; trackers are {', '.join(TRACKERS)}.")
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise InputError(f"the tracker {name} needs: pip install {TRACKERS[name]}.")


def make_trackers(
    names: tuple[str, ...], folder: Path, config: dict[str, Any], resume_at: int | None
) -> list[Tracker]:
    """TensorBoard and Weights & Biases; a resumed run continues the same curves."""
    makers = {"tensorboard": _TensorBoard, "wandb": _WandB}
    return [makers[name](folder, config, resume_at) for name in names]


class _TensorBoard:
    def __init__(self, folder: Path, config: dict[str, Any], resume_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=None if resume_at is None else resume_at + 1
        )

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _numbers(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path, config: dict[str, Any], resume_at: int | None) -> None:
        import wandb  # type: ignore[import-not-found]

        name = folder / "wandb_id.txt"
        if resume_at is None or not name.is_file():
            write_file(name, secrets.token_hex(4))
        self._run = wandb.init(
            project="maclaurin",
            name=folder.name,
            dir=str(folder),
            config=config,
            id=name.read_text(encoding="utf-8"),
            resume="allow",
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(dict(_numbers(record)), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _numbers(record: dict[str, Any]) -> list[tuple[str, float]]:
    kind = record["kind"]
    return [
        (f"{kind}/{n}", v)
        for n, v in record.items()
        if isinstance(v, int | float) and n not in ("step", "kind")
    ]
