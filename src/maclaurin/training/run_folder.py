"""A run's folder: resolved config, machine, records, checkpoints, the final model.

runs/x/config.json  machine.json  records.jsonl  checkpoints/  model/  summary.json
"""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from maclaurin.code_version import commit
from maclaurin.errors import InputError
from maclaurin.training.config import TrainConfig

#: keys that may differ between a run and its resumption: they decide no number
FREE_KEYS = ("keep", "trackers", "checkpoint_every", "log_every", "device")


class RunFolder:
    """Where everything of one run lies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.machine = path / "machine.json"
        self.records = path / "records.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.summary = path / "summary.json"

    def start(self, config: TrainConfig, data: dict[str, Any]) -> None:
        """Begin a new run here; a folder that holds one already is not overwritten."""
        if self.config.exists():
            raise InputError(
                f"{self.path} already holds a run: continue it with --resume, or choose another --out."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self.machine.write_text(json.dumps({**machine_facts(), "data": data}, indent=1) + "\n")
        partial = self.config.with_suffix(".part")
        partial.write_text(json.dumps(config.to_dict(), indent=1) + "\n")
        partial.replace(self.config)

    def check_same(self, config: TrainConfig, data_fingerprint: str) -> None:
        """Raise if this is another run than the one that began here, or its data have changed."""
        known = json.loads(self.config.read_text())
        changed = [
            f"{key}: {known.get(key)!r} → {value!r}"
            for key, value in config.to_dict().items()
            if key not in FREE_KEYS and known.get(key) != value
        ]
        if changed:
            raise InputError(
                f"{self.path} holds another run, which cannot go on with other settings "
                f"({'; '.join(changed)}): give the same ones, or choose another --out."
            )
        before = json.loads(self.machine.read_text())["data"]["fingerprint"]
        if before != data_fingerprint:
            raise InputError(
                f"the data have changed since this run began (fingerprint {before[:12]} → "
                f"{data_fingerprint[:12]}), so it cannot go on as if they had not: bring "
                "the old data back, or choose another --out."
            )


def machine_facts() -> dict[str, Any]:
    """Versions, processor and commit: what a number may depend on beside the config."""
    versions = {}
    for name in ("maclaurin", "torch", "numpy", "transformers", "tokenizers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit(),
    }
