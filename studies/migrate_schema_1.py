"""Converts records.json of schema 1 to schema 2, in place: python studies/migrate_schema_1.py FILE...

Numbers are copied, never computed. Four things change on the way:

- runs are stored once under a key, and labels refer to them; keys are new, with numerics version 0;
- the length of a row is the task's own length if it has one, as in current configs;
- a loss by position of exactly 0.0 means that nothing was scored there, and becomes null;
- claims are taken from the study.py beside the file, which have margins and published numbers.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from maclaurin.study.find import read_study_file
from maclaurin.study.metrics import METRICS
from maclaurin.study.run_record import (
    CellRecord,
    ExperimentRecord,
    FormsRecord,
    Run,
    RunRecord,
    StudyRecord,
    write_study,
)

NUMBERS = ("parameters", "tokens_per_second", "peak_gpu_bytes")


def run_record(old: dict[str, Any]) -> RunRecord:
    """One run without its labels."""
    provenance = dict(old["provenance"])
    data = provenance.pop("data")
    versions = provenance["versions"]
    run = Run(
        config=_resolved(old["config"]),
        data=data["fingerprint"],
        torch=".".join(versions["torch"].split(".")[:2]),
        numerics=0,
    )
    metrics = {name: float(old[name]) for name in NUMBERS if old[name] is not None}
    if old["test_loss"] is not None:
        metrics["loss"] = old["test_loss"]
    if old["accuracy"] is not None:
        metrics["accuracy"] = old["accuracy"]
    curves = {
        "train_loss": tuple((step, loss) for step, loss in old["train_curve"]),
        "loss": tuple((step, loss) for step, loss, _ in old["test_curve"]),
        "accuracy": tuple((step, accuracy) for step, _, accuracy in old["test_curve"]),
    }
    return RunRecord(
        run=run,
        status=old["status"],
        message=old["message"],
        step=old["step"],
        order=old["order"],
        state_bytes=old["state_bytes"],
        metrics=metrics,
        curves={name: points for name, points in curves.items() if points},
        loss_by_position=tuple((x, y if y != 0.0 else None) for x, y in old["loss_by_position"]),
        seconds=old["seconds"],
        provenance={**provenance, "data": data["name"]},
    )


def _resolved(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the task's own length=…, as in newer configs."""
    found = re.search(r"\blength=(\d+)", config["data"])
    return {**config, "length": int(found[1])} if found else config


def experiment_record(old: dict[str, Any], runs: list[dict[str, Any]]) -> ExperimentRecord:
    """An experiment whose cells refer to runs by key."""
    metric = METRICS[{"test_loss": "loss"}.get(old["metric"], old["metric"])]
    own = [run for run in runs if run["experiment"] == old["name"]]
    cells = tuple(
        CellRecord(
            name=name,
            levels=next((run["levels"] for run in own if run["cell"] == name), {}),
            runs={run["seed"]: run_record(run).key for run in own if run["cell"] == name},
        )
        for name in old["cells"]
    )
    return ExperimentRecord(
        name=old["name"],
        title=old["title"],
        metric=metric.name,
        metric_title=metric.title,
        higher_is_better=metric.higher_is_better,
        scale=metric.scale,
        baseline=old["baseline"],
        seeds=tuple(old["seeds"]),
        cells=cells,
        axes=tuple(old["axes"]),
    )


def migrate(file: Path) -> None:
    """One file."""
    old = json.loads(file.read_text(encoding="utf-8"))
    if old["schema"] != 1:
        raise SystemExit(f"{file} has schema {old['schema']}, not 1.")
    definition = file.parent / "study.py"
    study = read_study_file(definition) if definition.is_file() else None
    records = [run_record(run) for run in old["runs"]]
    forms = old["forms"]
    write_study(
        StudyRecord(
            name=old["name"],
            title=old["title"],
            question=old["question"],
            budget=old["budget"],
            source=f"studies/{file.parent.name}/study.py" if study is not None else "",
            scale=old["scale"],
            experiments=tuple(experiment_record(e, old["runs"]) for e in old["experiments"]),
            claims=study.claims if study is not None else (),
            runs={record.key: record for record in records},
            forms=FormsRecord(**{name: tuple(rows) for name, rows in forms.items()}) if forms else None,
        ),
        file,
    )
    print(f"{file}: {len(records)} runs")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        migrate(Path(argument))
