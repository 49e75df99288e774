"""From a run's folder to its record."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maclaurin.study.job import Job
from maclaurin.study.record import RunRecord, Status
from maclaurin.study.thinning import thinned
from maclaurin.training.records import read_records
from maclaurin.training.run_folder import RunFolder, machine_facts

MOST_TRAIN_POINTS = 200
MOST_POSITIONS = 64


def make_record(
    job: Job,
    key: str,
    status: Status,
    *,
    folder: Path | None,
    provenance: Mapping[str, Any],
    step: int = 0,
    seconds: float | None = None,
    parameters: int | None = None,
    message: str | None = None,
) -> RunRecord:
    """The run as it stands: what its folder says, if it has one, and how it ended."""
    lines = _lines(folder)
    tests = [line for line in lines if line["kind"] in ("validation", "test")]
    finals = [line for line in lines if line["kind"] == "final"]
    last = finals[-1] if finals and status == "finished" else {}
    summary = read_summary(folder) if folder is not None and status == "finished" else {}
    positions = tuple((n, x) for n, x in enumerate(last.get("loss_by_position", ())) if x is not None)
    return RunRecord(
        key=key,
        experiment=job.experiment,
        cell=job.cell,
        levels=dict(job.levels),
        seed=job.seed,
        attention=tuple(job.config["attention"]),
        order=job.order,
        state_bytes=job.state_bytes,
        status=status,
        message=message,
        steps=job.config["steps"],
        step=step,
        test_loss=_finite(last.get("loss")),
        accuracy=_finite(last.get("accuracy")),
        parameters=parameters or summary.get("parameters"),
        tokens_per_second=summary.get("tokens_per_second") or None,
        peak_gpu_bytes=summary.get("peak_gpu_bytes"),
        seconds=seconds,
        test_curve=tuple(
            (line["step"], line["loss"], line["accuracy"]) for line in tests if math.isfinite(line["loss"])
        ),
        train_curve=thinned(
            [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"], MOST_TRAIN_POINTS
        ),
        loss_by_position=thinned(positions, MOST_POSITIONS, name_first=True),
        config=dict(job.config),
        provenance=dict(provenance),
    )


def provenance_of(code: str, data_name: str, data_fingerprint: str | None) -> dict[str, Any]:
    """Where a number comes from."""
    facts = machine_facts()
    return {
        "commit": facts["commit"],
        "code": code,
        "data": {"name": data_name, "fingerprint": data_fingerprint},
        "machine": {
            "platform": facts["platform"],
            "cores": os.cpu_count(),
            "threads": facts["threads"],
            "gpu": facts["gpu"],
        },
        "versions": {"python": facts["python"], **facts["versions"]},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def read_summary(folder: Path) -> dict[str, Any]:
    """What the trainer wrote at the very end; empty before that."""
    try:
        return json.loads(RunFolder(folder).summary.read_text())
    except (OSError, ValueError):
        return {}


def _lines(folder: Path | None) -> list[dict[str, Any]]:
    file = RunFolder(folder).records if folder is not None else None
    return read_records(file) if file is not None and file.is_file() else []


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
