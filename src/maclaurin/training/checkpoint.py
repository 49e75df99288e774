"""Checkpoints that are whole or not there.

    checkpoints/step-00000400/      tensors by torch.distributed.checkpoint, loadable on any number of
      __0_0.distcp, .metadata       processes
      progress.json, rng-0.pt       step and metrics; random states of each process
      manifest.json                 size and SHA-256 of every file, written last

A folder is filled under a temporary name, flushed and renamed. On loading, the manifest is checked; a
damaged checkpoint is passed over, with a warning, for the one before it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from maclaurin.errors import MaclaurinError
from maclaurin.training.processes import Processes

#: with less room than this, a failed write is put down to a full disk (libraries hide the errno)
_LEAST_FREE = 1 << 20


class CheckpointError(MaclaurinError):
    """A checkpoint could not be written or none could be read."""


@dataclass(frozen=True)
class Progress:
    """What a checkpoint says of the run beside its tensors."""

    step: int
    validation_loss: float | None
    best_loss: float | None
    data_fingerprint: str


class CheckpointStore:
    """The checkpoints of one run: the last few, and the best."""

    def __init__(self, folder: Path, processes: Processes, keep: int) -> None:
        self.folder, self.processes, self.keep = folder, processes, keep

    # -------------------------------------------------------------------------------- writing

    def save(self, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write the checkpoint of this step, then drop the oldest ones."""
        final = self.folder / f"step-{progress.step:08d}"
        partial = self.folder / f".{final.name}.part"
        if self.processes.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.processes.wait()
        try:
            self._fill(partial, progress, model, optimizer)
        except (Exception, CheckpointException) as problem:  # torch's own is no Exception
            error = self._unwritable(problem)
            if self.processes.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise error from problem
        self.processes.wait()
        if self.processes.is_first:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _flush_folder(self.folder)
            self._drop_old()
        self.processes.wait()
        return final

    def _fill(
        self, folder: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        weights, moments = get_state_dict(model, optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            self._save_tensors(folder, {"model": weights, "optimizer": moments})
        torch.save(_random_states(), folder / f"rng-{self.processes.rank}.pt")
        self.processes.wait()
        if self.processes.is_first:
            (folder / "progress.json").write_text(json.dumps(progress.__dict__))
            _write_manifest(folder)

    def _save_tensors(self, folder: Path, tensors: dict[str, Any]) -> None:
        writer = FileSystemWriter(folder, sync_files=True)
        save_tensors(tensors, storage_writer=writer, no_dist=self.processes.world == 1)

    def _unwritable(self, problem: BaseException) -> CheckpointError:
        root: BaseException | None = problem
        while root is not None and not isinstance(root, OSError):
            root = root.__cause__ or root.__context__
        full = isinstance(root, OSError) and root.errno == errno.ENOSPC
        full = full or shutil.disk_usage(self.folder).free < _LEAST_FREE
        reason = "the disk is full" if full else str(problem).strip().splitlines()[-1]
        good = self.steps()
        last = f"the checkpoint of step {good[-1]} is whole" if good else "there is no earlier checkpoint"
        return CheckpointError(
            f"the checkpoint could not be written to {self.folder}: {reason}; {last}. "
            "Make room and run the same command with --resume."
        )

    def _drop_old(self) -> None:
        """Keep the last few and the best."""
        best = self.best()
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self._path(step), ignore_errors=True)

    # -------------------------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were finished, ascending."""
        names = (p.name for p in self.folder.glob("step-*")) if self.folder.is_dir() else ()
        return sorted(int(name.removeprefix("step-")) for name in names)

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole; damaged ones are passed over with a warning."""
        for step in reversed(self.steps()):
            damage = damage_of(self._path(step))
            if damage is None:
                return self._path(step)
            warnings.warn(
                f"the checkpoint of step {step} is damaged ({damage}); trying the one before it.",
                stacklevel=2,
            )
        return None

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """Fill model and optimizer; random states too where this process had some."""
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        load_tensors(state, storage_reader=FileSystemReader(path), no_dist=self.processes.world == 1)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        own = path / f"rng-{self.processes.rank}.pt"
        if own.is_file():
            _restore_random_states(torch.load(own, weights_only=False))
        return Progress(**json.loads((path / "progress.json").read_text()))

    def best(self) -> int | None:
        """The step of the checkpoint with the smallest validation loss."""
        losses = {s: loss for s in self.steps() if (loss := self._validation_loss(s)) is not None}
        return min(losses, key=lambda s: losses[s]) if losses else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _validation_loss(self, step: int) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return json.loads((self._path(step) / "progress.json").read_text())["validation_loss"]
        return None


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return "its manifest is missing or cut"
    for name, known in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != known["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {known['bytes']}"
        if _sha256(path) != known["sha256"]:
            return f"{name} has changed"
    return None


def _write_manifest(folder: Path) -> None:
    files = [p for p in sorted(folder.iterdir()) if p.is_file()]
    manifest = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    path = folder / "manifest.json"
    with path.open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
