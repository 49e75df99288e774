"""A report on disk: whole files, or none."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

from maclaurin.errors import InputError
from maclaurin.report.analysis import Analysis
from maclaurin.report.documents import tables_md
from maclaurin.report.page import page
from maclaurin.report.reading import default_folder, read_studies
from maclaurin.report.sentences import headline
from maclaurin.report.spreadsheets import runs_csv, summary_csv

NO_FIGURES = "figures need matplotlib: pip install 'maclaurin[plot]'; everything else is written."


@final
@dataclass(frozen=True)
class Report:
    """What was written: the page, one line of findings per study, and what is missing, if anything is."""

    page: Path
    findings: tuple[str, ...]
    missing: str | None


def write_report(paths: list[Path], out: Path | None = None) -> Report:
    """Read studies, write the page, tables and figures into a folder (beside the first study's records)."""
    analyses = [Analysis(study) for study in read_studies(paths)]
    folder = default_folder(paths[0]) if out is None else out
    missing = None
    with _whole(folder) as partial:
        (partial / "runs.csv").write_text(runs_csv(analyses))
        (partial / "summary.csv").write_text(summary_csv(analyses))
        (partial / "tables.md").write_text(tables_md(analyses))
        try:
            from maclaurin.report.figures import draw_all
        except ModuleNotFoundError as problem:
            if problem.name is None or problem.name.split(".")[0] != "matplotlib":
                raise
            missing = NO_FIGURES
        else:
            draw_all(analyses, partial / "figures")
        (partial / "index.html").write_text(page(analyses))
    found = tuple(headline(analysis.study, analysis.judgements) for analysis in analyses)
    return Report(folder / "index.html", found, missing)


@final
class _whole:
    """A folder to write into; its files are moved to their place at the end, the page last."""

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"a report is a folder, and {folder} is a file: name another with --out.")
        self._folder = folder

    def __enter__(self) -> Path:
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=".report-", dir=self._folder.parent))
        except OSError as problem:
            raise InputError(f"{self._folder} cannot be written: {problem.strerror}.") from None
        return self._partial

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                files = [file for file in sorted(self._partial.rglob("*")) if file.is_file()]
                for file in sorted(files, key=lambda file: file.name == "index.html"):
                    target = self._folder / file.relative_to(self._partial)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(target)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
