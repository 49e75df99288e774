"""`write_report`: from the records of studies to a folder with the page, tables and figures."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError
from maclaurin.files import write_file
from maclaurin.report.analysis import Analysis, analyse
from maclaurin.report.cell_tables import cost_table, parts_table, standing_entry
from maclaurin.report.effect_tables import (
    contributions_table,
    effects_table,
    ladder_gaps_table,
    ladder_slopes_table,
    ladder_tokens_table,
    ladder_values_table,
    pairs_table,
)
from maclaurin.report.formatting import markdown
from maclaurin.report.outcome import Outcome
from maclaurin.report.page import Article, figures_of
from maclaurin.report.sentences import (
    diverged_sentence,
    effect_sentence,
    interaction_sentences,
    status_sentence,
    waterfall_finding,
)
from maclaurin.report.statistics import Difference
from maclaurin.report.study_page import FIGURES, study_articles, study_page
from maclaurin.report.training_tables import settings_table, tuning_table
from maclaurin.report.verdict_tables import claims_table, forms_table
from maclaurin.study.find import read_study_file, source_file
from maclaurin.study.run_record import CellRecord, ExperimentRecord, RunRecord, StudyRecord, read_study

#: which of two records of the same run is kept
WORTH = {"finished": 0, "diverged": 1, "crashed": 2, "running": 3, "stopped": 4, "waiting": 5}


@final
@dataclass(frozen=True)
class Report:
    """What was written: the page, and one line of findings per study."""

    page: Path
    findings: tuple[str, ...]


def write_report(paths: Sequence[Path], out: Path | None = None, *, pdf: bool = True) -> Report:
    """Read studies, write the page, tables and figures into a folder (next to the first study's records)."""
    studies = read_studies(paths)
    analyses = analyse([with_current_claims(study, path) for path, study in studies])
    articles = study_articles(analyses)
    first = Path(paths[0])
    folder = out or (first if first.is_dir() else first.parent) / "report"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"a report is a folder, but {folder} is a file: choose another --out.")
    files = {
        "runs.csv": runs_csv(analyses),
        "summary.csv": summary_csv(analyses),
        "tables.md": tables_md(analyses),
        **figure_files(articles, pdf=pdf),
        "index.html": study_page(articles),  # last, as it refers to the others
    }
    _write_files(folder, files)
    return Report(folder / "index.html", tuple(analysis.headline for analysis in analyses))


# --------------------------------------------------------------------------------------- reading


def read_studies(paths: Sequence[Path]) -> list[tuple[Path, StudyRecord]]:
    """Every study once, with its path; parts of one study in several folders are merged."""
    if not paths:
        raise InputError("a report needs the folder of at least one study, such as runs/mini.")
    found: list[tuple[Path, StudyRecord]] = []
    for path in map(Path, paths):
        study = _read(path)
        same = next((i for i, (_, other) in enumerate(found) if _is_same(other, study)), None)
        if same is None:
            found.append((path, study))
        else:
            found[same] = (found[same][0], _together(found[same][1], study))
    return found


def _read(path: Path) -> StudyRecord:
    if not path.exists():
        raise InputError(f"there is no folder or file {path}: give the folder of a study, such as runs/mini.")
    study = read_study(path)
    if not study.experiments or not study.runs:
        raise InputError(
            f"{path} holds the study {study.name!r} without any runs, so there is nothing to report yet."
        )
    return study


def with_current_claims(study: StudyRecord, path: Path) -> tuple[StudyRecord, str]:
    """The study with the claims, waterfalls and ladder of its current study.py, and the name of that file.

    It is the file next to the records, else the one the study was run from. Records without either, or whose
    file now defines another study, keep the claims they were written with.
    """
    beside = (path if path.is_dir() else path.parent) / "study.py"
    file = beside if beside.is_file() else source_file(study.source)
    if file is None:
        return study, ""
    try:
        present = read_study_file(file)
    except InputError:
        return study, ""
    if present.name != study.name:
        return study, ""
    cells = {(e.name, cell.name) for e in study.experiments for cell in e.cells}
    claims = tuple(
        claim for claim in present.claims if all((claim.experiment, cell) in cells for cell in claim.cells)
    )
    ways = {e.name: e.waterfalls for e in present.experiments}
    experiments = tuple(
        dataclasses.replace(
            e,
            waterfalls=tuple(
                way for way in ways.get(e.name, ()) if {cell.name for cell in e.cells}.issuperset(way.cells)
            ),
        )
        for e in study.experiments
    )
    ladder = present.ladder if {e.name for e in study.experiments}.issuperset(present.ladder) else ()
    found = dataclasses.replace(study, claims=claims, experiments=experiments, ladder=ladder)
    return found, study.source or file.name


def _is_same(one: StudyRecord, other: StudyRecord) -> bool:
    if (one.name, one.scale, one.source) != (other.name, other.scale, other.source):
        return False
    ours = {e.name: e for e in one.experiments}
    shared = [(ours[e.name], e) for e in other.experiments if e.name in ours]
    return all((a.metric, a.baseline, a.axes) == (b.metric, b.baseline, b.axes) for a, b in shared)


def _together(one: StudyRecord, other: StudyRecord) -> StudyRecord:
    runs: dict[str, RunRecord] = {}
    every = (*one.runs.items(), *other.runs.items())
    for key, record in sorted(every, key=lambda item: WORTH[item[1].status]):
        runs.setdefault(key, record)
    experiments = {e.name: e for e in one.experiments}
    for e in other.experiments:
        experiments[e.name] = _joined(experiments[e.name], e, runs) if e.name in experiments else e
    return dataclasses.replace(
        one,
        experiments=tuple(experiments.values()),
        claims=tuple({claim.says: claim for claim in (*one.claims, *other.claims)}.values()),
        runs=runs,
        forms=one.forms or other.forms,
        ladder=one.ladder or other.ladder,
    )


def _joined(
    one: ExperimentRecord, other: ExperimentRecord, runs: Mapping[str, RunRecord]
) -> ExperimentRecord:
    cells = {cell.name: cell for cell in one.cells}
    for cell in other.cells:
        cells[cell.name] = _joined_cell(cells[cell.name], cell, runs) if cell.name in cells else cell
    seeds = tuple(sorted({*one.seeds, *other.seeds}))
    added = tuple(sorted({*one.added_seeds, *other.added_seeds}))
    return dataclasses.replace(one, cells=tuple(cells.values()), seeds=seeds, added_seeds=added)


def _joined_cell(one: CellRecord, other: CellRecord, runs: Mapping[str, RunRecord]) -> CellRecord:
    """The cell with the runs of both; of two runs with the same seed, a finished one is preferred."""
    keys = dict(one.runs)
    for seed, key in other.runs.items():
        if seed not in keys or WORTH[runs[key].status] < WORTH[runs[keys[seed]].status]:
            keys[seed] = key
    return dataclasses.replace(one, runs=keys)


# ----------------------------------------------------------------------------------- spreadsheets


def runs_csv(analyses: Sequence[Analysis]) -> str:
    """One line per run: labels, every metric it recorded, and the level on each axis of any experiment."""
    studies = [analysis.study for analysis in analyses]
    axes = list(dict.fromkeys(axis for study in studies for e in study.experiments for axis in e.axes))
    metrics = sorted({name for study in studies for record in study.runs.values() for name in record.metrics})
    rows = []
    for study in studies:
        levels = {(e.name, cell.name): cell.levels for e in study.experiments for cell in e.cells}
        rows += [
            {
                "study": study.name,
                "scale": study.scale,
                "experiment": label.experiment,
                "cell": label.cell,
                "seed": label.seed,
                "key": record.key,
                "status": record.status,
                "message": record.message,
                "step": record.step,
                "steps": record.run.steps,
                "attention": " ".join(record.run.attention),
                "lr": record.run.config.get("lr"),
                "tokens": record.run.tokens,
                "order": record.order,
                "state_bytes": record.state_bytes,
                "seconds": record.seconds,
                **{name: record.metrics.get(name) for name in metrics},
                **{f"axis_{axis}": levels[label.experiment, label.cell].get(axis) for axis in axes},
                "torch": record.run.torch,
                "numerics": record.run.numerics,
                "commit": record.provenance.get("commit"),
                "date": record.provenance.get("date"),
            }
            for label, record in study.labelled()
        ]
    return _csv(rows)


def summary_csv(analyses: Sequence[Analysis]) -> str:
    """One line per cell."""
    return _csv(
        {"study": analysis.study.name, "scale": analysis.study.scale, **row}
        for analysis in analyses
        for outcome in analysis.outcomes.values()
        for row in _cells(outcome)
    )


def _cells(outcome: Outcome) -> Iterator[Mapping[str, Any]]:
    for cell in outcome.cells.values():
        spread, first = cell.spread, cell.first
        yield {
            "experiment": outcome.experiment.name,
            "metric": outcome.experiment.metric,
            "cell": cell.name,
            "attention": " ".join(cell.attention),
            "lr": first.run.config.get("lr") if first else None,
            "order": cell.order,
            "state_bytes": cell.state_bytes,
            "seeds_finished": len(cell.values),
            "seeds_diverged": len(cell.diverged),
            "seeds_crashed": len(cell.crashed),
            "mean": spread.mean if spread else None,
            "standard_deviation": spread.deviation if spread else None,
            "min": min(cell.values.values(), default=None),
            "max": max(cell.values.values(), default=None),
            **_difference(outcome.differences[cell.name]),
            "difference_scale": outcome.experiment.scale,
            "verdict": str(standing_entry(outcome, cell)),
            "seconds": cell.average("seconds"),
            "parameters": cell.average("parameters"),
            "training_flops": cell.average("training_flops"),
            "peak_gpu_bytes": cell.average("peak_gpu_bytes"),
        }


def _difference(difference: Difference | None) -> dict[str, float | None]:
    value = difference.value if difference else None
    low, high = (difference.bounds if difference else None) or (None, None)
    return {"difference": value, "difference_low": low, "difference_high": high}


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


# ------------------------------------------------------------------------------ Markdown and figures


def tables_md(analyses: Sequence[Analysis]) -> str:
    """Findings, parts, effects, cost and claims of every study, as one Markdown file."""
    return "\n".join(part for analysis in analyses for part in _study_md(analysis))


def _study_md(analysis: Analysis) -> Iterator[str]:
    study = analysis.study
    yield f"# {study.title}\n\n{study.question}\n\n{status_sentence(study)}.\n"
    yield "\n".join(f"- {s}" for s in analysis.findings) + "\n"
    if study.forms is not None:
        yield "## The form\n\n" + markdown(forms_table(study.forms))
    if analysis.ladder is not None and analysis.ladder.has_lines:
        yield "## The ladder\n\n" + markdown(ladder_slopes_table(analysis.ladder))
        yield markdown(ladder_gaps_table(analysis.ladder))
        yield markdown(ladder_values_table(analysis.ladder))
        if (during := ladder_tokens_table(analysis.ladder)) is not None:
            yield "During training, on validation data:\n\n" + markdown(during)
    for name, outcome in analysis.outcomes.items():
        yield f"## {outcome.experiment.title}\n\n" + markdown(parts_table(outcome))
        for way in analysis.waterfalls.get(name, []):
            if not way.parts:
                yield f"### {way.waterfall.title}\n\n{waterfall_finding(way)}\n"
                continue
            yield f"### {way.waterfall.title}\n\n" + markdown(contributions_table(way))
            sentences = [*interaction_sentences(way), *filter(None, [diverged_sentence(way)])]
            yield "\n".join(f"- {sentence}" for sentence in sentences) + "\n"
            if way.interactions:
                yield markdown(pairs_table(way))
        has_own_runs = outcome in analysis.with_own_runs
        if has_own_runs and (tuning := tuning_table(outcome)) is not None:
            yield "### Learning rates\n\n" + markdown(tuning)
        if (factorial := analysis.factorials.get(name)) is not None:
            yield "\n".join(f"- {effect_sentence(factorial, effect)}" for effect in factorial.effects) + "\n"
            yield markdown(effects_table(factorial))
        for title, table in (("Settings", settings_table(outcome)), ("Cost", cost_table(outcome))):
            if has_own_runs and table.rows:
                yield f"### {title}\n\n" + markdown(table)
    if analysis.judgements:
        yield "## The claims\n\n" + markdown(claims_table(analysis.judgements))


def figure_files(articles: Sequence[Article], *, pdf: bool) -> dict[str, str | bytes]:
    """File name → content for every figure of a page, under the names that the page uses."""
    files: dict[str, str | bytes] = {}
    for drawn in figures_of(articles):
        files[drawn.file] = drawn.figure.svg
        if pdf:
            files[str(Path(drawn.file).with_suffix(".pdf"))] = drawn.figure.pdf
    return files


def _write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write the files one after the other, then delete figures of an earlier report."""
    try:
        for name, content in files.items():
            write_file(folder / name, content)
    except OSError as problem:
        raise InputError(f"{folder} cannot be written: {problem.strerror}.") from None
    for file in (folder / FIGURES).glob("*"):
        if file.suffix in (".svg", ".pdf", ".png") and str(file.relative_to(folder)) not in files:
            file.unlink()
