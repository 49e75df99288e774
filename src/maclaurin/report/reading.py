"""From the paths a user names to the studies of a report."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from maclaurin.errors import InputError, MaclaurinError
from maclaurin.study.record import ExperimentRecord, RunRecord, StudyRecord, read_study

#: which of two records of the same run is kept
_WORTH = {"finished": 0, "diverged": 1, "crashed": 2, "stopped": 3, "waiting": 4}


def read_studies(paths: list[Path]) -> list[StudyRecord]:
    """Every study once: parts of one study that lie in several folders are put together."""
    if not paths:
        raise InputError("a report needs the folder of at least one study, such as runs/mini.")
    studies: list[StudyRecord] = []
    for study in map(_read, paths):
        same = next((i for i, other in enumerate(studies) if _same_study(other, study)), None)
        if same is None:
            studies.append(study)
        else:
            studies[same] = _together(studies[same], study)
    return studies


def default_folder(path: Path) -> Path:
    """Where the report of a study goes: beside its records."""
    return (path if path.is_dir() else path.parent) / "report"


def _read(path: Path) -> StudyRecord:
    if not path.exists():
        raise InputError(f"there is no folder or file {path}: name the folder of a study, such as runs/mini.")
    try:
        study = read_study(path)
    except MaclaurinError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise InputError(
            f"{path} says it is a study, but its records do not have the expected form ({problem!r}): "
            "it was changed by hand or written by another version."
        ) from None
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}.") from None
    if not study.experiments or not study.runs:
        raise InputError(
            f"{path} holds the study {study.name!r} without any runs, so there is nothing to report yet."
        )
    return study


def _same_study(one: StudyRecord, other: StudyRecord) -> bool:
    if (one.name, one.scale) != (other.name, other.scale):
        return False
    ours = {e.name: e for e in one.experiments}
    shared = [(ours[e.name], e) for e in other.experiments if e.name in ours]
    return all((a.metric, a.baseline, a.axes) == (b.metric, b.baseline, b.axes) for a, b in shared)


def _together(one: StudyRecord, other: StudyRecord) -> StudyRecord:
    experiments = {e.name: e for e in one.experiments}
    for e in other.experiments:
        experiments[e.name] = _joined(experiments[e.name], e) if e.name in experiments else e
    runs: dict[tuple[str, str, int], RunRecord] = {}
    for run in sorted((*one.runs, *other.runs), key=lambda run: _WORTH[run.status]):
        runs.setdefault((run.experiment, run.cell, run.seed), run)
    return dataclasses.replace(
        one,
        experiments=tuple(experiments.values()),
        claims=tuple(dict.fromkeys((*one.claims, *other.claims))),
        runs=tuple(runs.values()),
        forms=one.forms or other.forms,
    )


def _joined(one: ExperimentRecord, other: ExperimentRecord) -> ExperimentRecord:
    return dataclasses.replace(
        one,
        cells=tuple(dict.fromkeys((*one.cells, *other.cells))),
        seeds=tuple(sorted({*one.seeds, *other.seeds})),
    )
