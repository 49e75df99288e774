"""Results of an evaluation: one JSON file, written after each task, from which an evaluation continues."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from maclaurin.errors import InputError
from maclaurin.plain_data import read_record, write_json

SCHEMA = 3
#: quantile of the standard normal distribution for 95 % intervals
Z = statistics.NormalDist().inv_cdf(0.975)

AskedBy = Literal["maclaurin", "lm-eval"]


@final
@dataclass(frozen=True, kw_only=True)
class Score:
    """One number (None if not finite), with standard error and 95 % interval if known."""

    value: float | None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    higher_is_better: bool | None = None


def share_score(scores: Sequence[float]) -> Score:
    """The mean of scores between 0 and 1, with Wilson's interval.

    The interval is exact for right-or-wrong scores, and too wide for scores in between.
    """
    mean = sum(scores) / len(scores)
    low, high = wilson_interval(mean, len(scores))
    return Score(value=mean, stderr=_standard_error(scores), low=low, high=high, higher_is_better=True)


def wilson_interval(share: float, number: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share p of n right answers.

    (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)
    """
    centre = (share + Z**2 / (2 * number)) / (1 + Z**2 / number)
    spread = Z / (1 + Z**2 / number) * math.sqrt(share * (1 - share) / number + Z**2 / (4 * number**2))
    return (0.0 if share == 0 else centre - spread), (1.0 if share == 1 else centre + spread)


def mean_score(values: Sequence[float], higher_is_better: bool | None = True) -> Score:
    """The mean with its standard error and a normal interval; None without finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Score(value=None, higher_is_better=higher_is_better)
    mean, error = sum(finite) / len(finite), _standard_error(finite)
    low, high = (None, None) if error is None else (mean - Z * error, mean + Z * error)
    return Score(value=mean, stderr=error, low=low, high=high, higher_is_better=higher_is_better)


def _standard_error(values: Sequence[float]) -> float | None:
    number = len(values)
    if number < 2:
        return None
    mean = sum(values) / number
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (number - 1) / number)


@final
@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The result of one task.

    kind          scoring mode: choices, endings, written or text; for tasks of the harness, the output type
    asked_by      maclaurin or lm-eval
    version       of the task
    fingerprint   sha256 of its items, for our tasks
    items         how many were asked
    questions     how many queries they had
    truncated     texts longer than the model reads, which lost their beginning
    non_finite    answers with non-finite output; they count as wrong
    chance        score of a guess, if known
    distance      tokens, in this tokenizer, from the needed fact to the question: [least, median, most]
    """

    task: str
    kind: str
    asked_by: AskedBy
    version: str
    fingerprint: str | None
    items: int
    questions: int
    metrics: dict[str, Score]
    truncated: int = 0
    non_finite: int = 0
    chance: float | None = None
    distance: tuple[int, ...] | None = None
    seconds: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the numbers depend on in addition to the tasks; results that differ in it do not share a file.

    text   name and digest of the prose that our tasks are made of
    """

    model: str
    weights: str
    attention: tuple[str, ...]
    tokenizer: str
    max_length: int
    limit: int | None
    seed: int
    text: str


@final
@dataclass(frozen=True)
class Results:
    """Everything in one file."""

    identity: Identity
    machine: dict[str, Any]
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    groups: dict[str, dict[str, Score]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replace the file."""
        write_json(path, self, SCHEMA, allow_nan=False)


def read_results(path: Path) -> Results:
    """Read the file that `Results.write` wrote."""
    return read_record(
        Results,
        path,
        SCHEMA,
        "a file of results",
        missing=f"`out`: there is no file {path}.",
        advice=" Choose another `out`, or `again=True` to replace it.",
    )


def finished_tasks(path: Path, identity: Identity) -> dict[str, TaskResult]:
    """The results in a file, which must be of the same evaluation; empty if there is no file."""
    if not path.exists():
        return {}
    known = read_results(path)
    changed = [
        f"{name}: {before!r}, now {now!r}"
        for name, now in vars(identity).items()
        if (before := getattr(known.identity, name)) != now
    ]
    if changed:
        raise InputError(
            f"{path} holds the results of another evaluation ({'; '.join(changed)}): choose another `out`, "
            "or `again=True` to replace it."
        )
    return known.tasks
