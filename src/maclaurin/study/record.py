"""What a study leaves behind: one JSON file that a report can be made from, and nothing else is needed.

The schema, in types. Curves are thinned, so that a study of a hundred runs stays below a few megabytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from maclaurin.errors import InputError
from maclaurin.study.claim import Claim, claim_from_json

SCHEMA = 1

Status = Literal["finished", "diverged", "crashed", "stopped", "waiting"]


@final
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run of one cell with one seed.

    key                 names the run in the pool: digest of config, code and data
    status              finished; diverged and crashed are results; stopped and waiting are not there yet
    order               highest power of the score the kernel holds; None where it holds all (exp) or is none
    state_bytes         of the recurrent state of all layers in fp32; None where it grows with the text
    test_loss           over the whole test set at the end, as is accuracy
    test_curve          [step, loss, accuracy] at each evaluation, all over the same rows of the test set
    train_curve         [step, loss], means over at most 200 stretches
    loss_by_position    [first position, mean loss] over at most 64 stretches of positions
    seconds             of the whole run, evaluation included
    provenance          commit, code (digest of the source), data (name, fingerprint), machine, versions, date
    """

    key: str
    experiment: str
    cell: str
    levels: Mapping[str, str]
    seed: int
    attention: tuple[str, ...]
    order: int | None
    state_bytes: int | None
    status: Status
    message: str | None = None
    steps: int
    step: int = 0
    test_loss: float | None = None
    accuracy: float | None = None
    parameters: int | None = None
    tokens_per_second: float | None = None
    peak_gpu_bytes: int | None = None
    seconds: float | None = None
    test_curve: tuple[tuple[int, float, float], ...] = ()
    train_curve: tuple[tuple[int, float], ...] = ()
    loss_by_position: tuple[tuple[int, float], ...] = ()
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class ExperimentRecord:
    """What the report must know of an experiment; see design.Experiment."""

    name: str
    title: str
    metric: str
    baseline: str
    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    axes: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class FormsRecord:
    """How well the forms agree, and how the series converges to softmax; as `maclaurin check` measures it.

    agreement   {"spec", "form", "error"}: largest relative difference to the parallel form, float64
    series      {"order", "error"}: relative error of taylor(order)/sum against softmax, same inputs
    """

    agreement: tuple[Mapping[str, Any], ...]
    series: tuple[Mapping[str, Any], ...]


@final
@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A whole study as it stands: also half-way through."""

    name: str
    title: str
    question: str
    budget: str
    scale: float
    experiments: tuple[ExperimentRecord, ...]
    claims: tuple[Claim, ...]
    runs: tuple[RunRecord, ...]
    forms: FormsRecord | None = None


def write_study(record: StudyRecord, path: Path) -> None:
    """Whole or not at all."""
    data = {"schema": SCHEMA, **_plain(record)}
    data["claims"] = [claim.to_json() for claim in record.claims]
    partial = path.with_suffix(".part")
    with partial.open("w") as file:
        json.dump(data, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_study(path: Path) -> StudyRecord:
    """The study a file (or the records.json in a folder) holds."""
    file = path / "records.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(
            f"{path} holds no records of a study: run one with 'maclaurin study mini --out {path}', or name "
            "the folder of one."
        ) from None
    except ValueError as problem:
        raise InputError(f"{file} is not JSON ({problem}), so it is not what a study writes.") from None
    found = data.pop("schema", None) if isinstance(data, dict) else None
    if found != SCHEMA:
        raise InputError(
            f"{file} has schema {found}, and this version of maclaurin reads schema {SCHEMA}: "
            "it is not the records.json of a study, or it was written by another version."
        )
    return StudyRecord(
        **{
            **data,
            "experiments": tuple(_experiment(e) for e in data["experiments"]),
            "claims": tuple(claim_from_json(claim) for claim in data["claims"]),
            "runs": tuple(run_from_json(run) for run in data["runs"]),
            "forms": _forms(data["forms"]),
        }
    )


def run_to_json(run: RunRecord) -> dict[str, Any]:
    """Plain data of one run."""
    return _plain(run)


def run_from_json(data: Mapping[str, Any]) -> RunRecord:
    """The run that data stand for."""
    curves = ("test_curve", "train_curve", "loss_by_position")
    values = {**data, **{name: tuple(tuple(point) for point in data[name]) for name in curves}}
    return RunRecord(**{**values, "attention": tuple(values["attention"])})


def _experiment(data: Mapping[str, Any]) -> ExperimentRecord:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
    return ExperimentRecord(**values)


def _forms(data: Mapping[str, Any] | None) -> FormsRecord | None:
    return None if data is None else FormsRecord(**{name: tuple(rows) for name, rows in data.items()})


def _plain(record: Any) -> dict[str, Any]:
    return dataclasses.asdict(record)
