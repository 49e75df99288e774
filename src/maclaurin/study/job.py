"""What a worker is told: one run, as plain data that travels in a file or over a network."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.files import write_file


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One run.

    key           its name in the pool; None where the data have not been opened yet: the worker finds it
    pool          folder of the pool, absolute
    marker        what the pool's marker file says, if this is the same disk
    study_lock    file that is locked as long as the study lives; None where the run stands alone
    threads       of torch; None as they are
    gpu           CUDA_VISIBLE_DEVICES of the worker; None as it is
    code, data    version of the code and fingerprint of the data the key was made with
    """

    key: str | None
    experiment: str
    cell: str
    levels: Mapping[str, str]
    seed: int
    config: Mapping[str, Any]
    order: int | None
    state_bytes: int | None
    pool: str
    marker: str | None = None
    study_lock: str | None = None
    threads: int | None = None
    gpu: str | None = None
    code: str
    data: str | None = None
    keep_models: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def write(self, path: Path) -> None:
        """As a file for `python -m maclaurin.study.worker`."""
        write_file(path, (json.dumps(self.to_json(), indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Job:
        """The job of a file."""
        return cls(**json.loads(path.read_text()))
