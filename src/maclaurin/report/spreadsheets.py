"""Everything a report counts with, as CSV: one line per run, one line per cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from maclaurin.report.analysis import Analysis
from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import Estimate
from maclaurin.report.tables import average, verdict_entry

RUN_FIELDS = (
    "key", "cell", "seed", "status", "message", "step", "steps", "test_loss", "accuracy", "order",
    "state_bytes", "parameters", "tokens_per_second", "peak_gpu_bytes", "seconds",
)  # fmt: skip


def runs_csv(analyses: list[Analysis]) -> str:
    """One line per run, with the level on each axis of any experiment."""
    studies = [analysis.study for analysis in analyses]
    axes = list(dict.fromkeys(axis for study in studies for e in study.experiments for axis in e.axes))
    rows = [
        {
            "study": study.name,
            "scale": study.scale,
            "experiment": run.experiment,
            **{field: getattr(run, field) for field in RUN_FIELDS},
            "attention": " ".join(run.attention),
            **{f"axis_{axis}": run.levels.get(axis) for axis in axes},
            **{name: run.provenance.get(name) for name in ("commit", "code", "date")},
        }
        for study in studies
        for run in study.runs
    ]
    return _csv(rows)


def summary_csv(analyses: list[Analysis]) -> str:
    """One line per cell."""
    return _csv(
        {"study": analysis.study.name, "scale": analysis.study.scale, **row}
        for analysis in analyses
        for outcome in analysis.outcomes.values()
        for row in _cells(outcome)
    )


def _cells(outcome: Outcome) -> Iterable[Mapping[str, Any]]:
    for cell in outcome.cells.values():
        verdict = verdict_entry(outcome, cell)
        done = [run for run in cell.runs if run.status == "finished"]
        low, high = cell.spread or (None, None)
        yield {
            "experiment": outcome.experiment.name,
            "metric": outcome.experiment.metric,
            "cell": cell.name,
            "attention": " ".join(cell.attention),
            "order": cell.order,
            "state_bytes": cell.state_bytes,
            "seeds_finished": len(cell.values),
            "seeds_diverged": len(cell.diverged),
            "seeds_crashed": len(cell.crashed),
            **_columns("mean", outcome.means[cell.name]),
            "min": low,
            "max": high,
            **_columns("difference", outcome.differences[cell.name]),
            "verdict": str(verdict),
            "tokens_per_second": average(done, lambda run: run.tokens_per_second),
            "seconds": average(done, lambda run: run.seconds),
            "parameters": average(done, lambda run: run.parameters),
            "peak_gpu_bytes": average(done, lambda run: run.peak_gpu_bytes),
        }


def _columns(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
