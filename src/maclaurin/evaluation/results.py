"""Results on disk: one JSON file, written after each task, from which an evaluation goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError
from maclaurin.files import write_file

SCHEMA = 1


@final
@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number with its standard error; None where it is no finite number."""

    value: float | None
    stderr: float | None
    higher_is_better: bool | None


@final
@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What came out of one task.

    kind          multiple_choice, loglikelihood, loglikelihood_rolling or generate_until
    version       of the task, as its file says
    fingerprint   sha256 of its items where they are ours
    items         how many were asked
    cut           requests that were longer than the model reads and lost their beginning
    broken        texts with logits that are no numbers, whose answers mean nothing
    chance        accuracy of guessing where it is known
    distance      tokens, in this tokenizer, from what is asked for to the question: [least, median, most]
    """

    task: str
    kind: str
    version: str
    fingerprint: str | None
    items: int
    metrics: dict[str, Metric]
    cut: int = 0
    broken: int = 0
    chance: float | None = None
    distance: list[int] | None = None
    seconds: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Identity:
    """What decides the numbers beside the tasks: results of different ones do not go into one file."""

    model: str
    weights: str
    attention: list[str]
    tokenizer: str
    max_length: int
    limit: int | None
    seed: int


@final
@dataclass
class Results:
    """Everything one file holds."""

    identity: Identity
    machine: dict[str, Any]
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    groups: dict[str, dict[str, Metric]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema": SCHEMA,
            **asdict(self.identity),
            "machine": self.machine,
            "tasks": {name: asdict(result) for name, result in self.tasks.items()},
            "groups": {name: {m: asdict(v) for m, v in group.items()} for name, group in self.groups.items()},
        }

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False, ensure_ascii=False)
        write_file(path, (text + "\n").encode())


def finished_tasks(path: Path, identity: Identity) -> dict[str, TaskResult]:
    """What the file already holds of this very evaluation; nothing if there is none."""
    if not path.exists():
        return {}
    data = _read(path)
    now = asdict(identity)
    changed = [
        f"{key}: {data.get(key)!r}, now {value!r}" for key, value in now.items() if data.get(key) != value
    ]
    if changed:
        raise InputError(
            f"{path} holds results of another evaluation ({'; '.join(changed)}): choose another --out, or "
            "--again to write it anew."
        )
    return {name: _result(result) for name, result in data["tasks"].items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise InputError(f"--out: {path} is there, but not JSON ({problem}): choose another.") from None
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA or "tasks" not in data:
        raise InputError(
            f"--out: {path} has schema {found}, and this version of maclaurin writes schema {SCHEMA}: "
            "choose another, or --again to write it anew."
        )
    return data


def _result(data: dict[str, Any]) -> TaskResult:
    metrics = {name: Metric(**metric) for name, metric in data["metrics"].items()}
    return TaskResult(**{**data, "metrics": metrics})
