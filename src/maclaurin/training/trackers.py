"""TensorBoard and Weights & Biases: services that receive every record of a run."""

from __future__ import annotations

import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

from maclaurin.errors import InputError
from maclaurin.files import write_file

#: tracker → the module it needs
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    """A service that receives every record."""

    def write(self, record: dict[str, Any]) -> None:
        """Receive one record."""
        ...

    def close(self) -> None:
        """Finish, after the last record."""
        ...


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
            name=os.environ.get("WANDB_NAME") or folder.name,
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
