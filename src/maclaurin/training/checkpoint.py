"""Checkpoints, written atomically.

    checkpoints/step-00000400/      tensors by torch.distributed.checkpoint, loadable on any number of
      __0_0.distcp, .metadata       processes
      progress.json, random-0.pt    step and loss; the random states of each process
      manifest.json                 size and SHA-256 of every file, written last

A folder is filled under a temporary name, flushed and renamed. Loading checks the manifest; if files are
damaged it warns and takes the previous checkpoint. Loading runs no code from the files: only tensors and
plain numbers are stored, and the pickled index of torch.distributed.checkpoint is read by an unpickler that
accepts only the index's own classes.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from maclaurin.errors import MaclaurinError
from maclaurin.files import flush_folder, sha256
from maclaurin.plain_data import read_json, read_or_none, read_value, write_json
from maclaurin.training.processes import Processes

#: with less free space than this, a failed write is reported as a full disk (libraries hide the errno)
_LEAST_FREE = 1 << 20
PROGRESS = "progress.json"


class CheckpointError(MaclaurinError):
    """A checkpoint could not be written or read."""


@final
@dataclass(frozen=True)
class Progress:
    """What a checkpoint holds in addition to its tensors."""

    step: int
    #: validation loss of exactly these weights; None if they were not evaluated
    validation_loss: float | None
    data_fingerprint: str


@final
class CheckpointStore:
    """The checkpoints of one run: the last few, and the best of those that were evaluated."""

    def __init__(self, folder: Path, processes: Processes, keep: int) -> None:
        self.folder, self.processes, self.keep = folder, processes, keep

    # -------------------------------------------------------------------------------- writing

    def save(self, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write the checkpoint of this step, then delete the oldest ones."""
        final_ = self._path(progress.step)
        partial = self.folder / f".{final_.name}.part"
        if self.processes.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.processes.wait()
        try:
            self._fill(partial, progress, model, optimizer)
        except (Exception, CheckpointException) as problem:  # the latter is not a subclass
            error = self._unwritable(problem)
            if self.processes.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise error from problem
        self.processes.wait()
        if self.processes.is_first:
            shutil.rmtree(final_, ignore_errors=True)
            partial.rename(final_)
            flush_folder(self.folder)
            self._delete_old()
        self.processes.wait()
        return final_

    def _fill(
        self, folder: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        tensors, _ = _tensors_of(model, optimizer)
        with _no_single_process_warning():
            writer = FileSystemWriter(folder, sync_files=True)
            save_tensors(tensors, storage_writer=writer, no_dist=self.processes.world == 1)
        torch.save(_random_states(), folder / f"random-{self.processes.rank}.pt")
        self.processes.wait()
        if self.processes.is_first:
            write_json(folder / PROGRESS, progress, indent=None)
            _write_manifest(folder)

    def _unwritable(self, problem: BaseException) -> CheckpointError:
        root: BaseException | None = problem
        while root is not None and not isinstance(root, OSError):
            root = root.__cause__ or root.__context__
        full = isinstance(root, OSError) and root.errno == errno.ENOSPC
        full = full or shutil.disk_usage(self.folder).free < _LEAST_FREE
        reason = "the disk is full" if full else str(problem).strip().splitlines()[-1]
        good = self.steps()
        last = f"the checkpoint of step {good[-1]} is complete" if good else "there is no earlier checkpoint"
        return CheckpointError(
            f"the checkpoint could not be written to {self.folder}: {reason}; {last}. "
            "Free some space, then continue with `resume=True`."
        )

    def _delete_old(self) -> None:
        """Delete every checkpoint except the last few and the best."""
        best = self.best()
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self._path(step), ignore_errors=True)

    # -------------------------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        names = (p.name for p in self.folder.glob("step-*")) if self.folder.is_dir() else ()
        return sorted(int(name.removeprefix("step-")) for name in names)

    def latest(self) -> Path | None:
        """The newest undamaged checkpoint; damaged ones are skipped with a warning."""
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
        """Fill model and optimizer, and restore the random states if this process saved them."""
        tensors, groups = _tensors_of(model, optimizer)
        try:
            with _no_single_process_warning():
                load_tensors(tensors, storage_reader=_Reader(path), no_dist=self.processes.world == 1)
        except CheckpointException as problem:  # not a subclass of Exception
            reason = str(problem).strip().splitlines()[-1]
            raise CheckpointError(f"the checkpoint {path} cannot be loaded: {reason}") from problem
        moments = {"state": tensors["optimizer"]["state"], "param_groups": groups}
        set_state_dict(model, optimizer, model_state_dict=tensors["model"], optim_state_dict=moments)
        own = path / f"random-{self.processes.rank}.pt"
        if own.is_file():
            _restore_random_states(torch.load(own, weights_only=True))
        return read_value(Progress, path / PROGRESS)

    def best(self) -> int | None:
        """The step with the smallest validation loss, of those that were evaluated at their own step."""
        losses = {s: loss for s in self.steps() if (loss := self._validation_loss(s)) is not None}
        return min(losses, key=lambda s: losses[s]) if losses else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _validation_loss(self, step: int) -> float | None:
        progress = read_or_none(Progress, self._path(step) / PROGRESS)
        return None if progress is None else progress.validation_loss


# ------------------------------------------------------------------------------------------- tensors


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], Any]:
    """(weights and moments, parameter groups); the groups follow from the config and are not stored."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": {"state": moments["state"]}}, moments["param_groups"]


@contextlib.contextmanager
def _no_single_process_warning() -> Iterator[None]:
    """Silence torch's warning about a single process without a process group, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Reader(FileSystemReader):
    """Reads the index without letting pickle run code."""

    def read_metadata(self, *args: Any, **more: Any) -> Metadata:
        """The index of the tensors."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


#: the classes an index is made of
_INDEX_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


def _member(kind: Any, name: str) -> enum.Enum:
    """A member of an enum; raises for any other attribute."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise CheckpointError(
        f"the index of the checkpoint asks for {name!r} of {kind!r}, which no index has: it is not loaded."
    )


class _IndexUnpickler(pickle.Unpickler):
    """Accepts only the classes of an index."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of the index or a dtype; anything else is an error."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _INDEX_CLASSES:
            return super().find_class(module, name)
        if (module, name) == (
            "builtins",
            "getattr",
        ):  # how Python 3.11.0 to 3.11.3 pickles members of an enum
            return _member
        raise CheckpointError(
            f"the index of the checkpoint refers to {module}.{name}, which is not part of a checkpoint of "
            "this trainer: the file comes from elsewhere and is not loaded."
        )


# ----------------------------------------------------------------------------------------- integrity


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict):
        return "its manifest is missing or incomplete"
    for name, known in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != known["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {known['bytes']}"
        if sha256(path) != known["sha256"]:
            return f"{name} has changed"
    return None


def _write_manifest(folder: Path) -> None:
    files = [p for p in sorted(folder.iterdir()) if p.is_file()]
    manifest = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files}
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_json(folder / "manifest.json", manifest, indent=None)


# -------------------------------------------------------------------------------------- random states


def _random_states() -> dict[str, Any]:
    """The random states as tensors and plain numbers, which torch.load reads with weights_only=True."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *(float(x) for x in rest)),
        "python": random.getstate(),
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    name, keys, place, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(place), int(has_gauss), gauss))
    random.setstate(states["python"])
