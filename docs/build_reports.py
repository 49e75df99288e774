"""The reports of studies and of small memories, made from committed results, and what docs/ shows of them.

    python docs/build_reports.py            (or: make docs)
    python docs/build_reports.py --check    exit code 1 if a page of docs has other tables

Whole reports (page, figures, CSV files) go to build/reports/STUDY; they are built again only if the records
or the code have changed, and `make site` puts them on the site. Kept in git, under docs/reports/STUDY, are
tables.md and the figures that README.md or a page of docs/ shows.

docs/results.md and docs/memory.md get their tables from there. A marker names a report, a heading of its
tables.md, and optionally a heading below it:

    <!-- table: mini / Next token of Python's standard library / Learning rates -->
    (the table; replaced by the first one under that heading)
    <!-- end of table -->

A heading is named by how it begins.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILT = ROOT / "build" / "reports"
MARKED = re.compile(r"(<!-- table: (?P<source>.+?) -->\n)(?P<table>.*?)(<!-- end of table -->)", re.DOTALL)


def main() -> int:
    """Build the reports and fill docs/, or check the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    pages = {page: page.read_text(encoding="utf-8") for page in (DOCS / "results.md", DOCS / "memory.md")}
    if parser.parse_args().check:
        return int(any(text != filled(text) for text in pages.values()))
    for report in build_reports():
        keep_linked(report)
    for page, text in pages.items():
        page.write_text(filled(text), encoding="utf-8")
    return 0


# --------------------------------------------------------------------------------------------------- reports


def build_reports() -> list[Path]:
    """The folders of all reports, one per study with records; those that are out of date are built first."""
    from maclaurin.files import locked

    studies = sorted(file.parent for file in (ROOT / "studies").glob("*/records.json"))
    BUILT.parent.mkdir(exist_ok=True)
    with locked(BUILT.with_suffix(".lock")):
        if old := [study for study in studies if not _is_current(study)]:
            with ProcessPoolExecutor(min(len(old), os.cpu_count() or 1), get_context("spawn")) as pool:
                list(pool.map(_build, old))
        _build_memory(BUILT / "memory")
    return [*(BUILT / study.name for study in studies), BUILT / "memory"]


def _build_memory(folder: Path) -> None:
    """The pages of small memories (benchmarks/memory_pages.py)."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        write_report = importlib.import_module("memory_pages").write_report
    finally:
        sys.path.pop(0)
    write_report(folder)


def _is_current(study: Path) -> bool:
    made_from = BUILT / study.name / ".made_from"
    return made_from.exists() and made_from.read_text(encoding="utf-8") == _fingerprint(study)


def _build(study: Path) -> None:
    from maclaurin.report import write_report

    folder = BUILT / study.name
    shutil.rmtree(folder, ignore_errors=True)
    write_report([study], folder, pdf=False)
    (folder / ".made_from").write_text(_fingerprint(study), encoding="utf-8")


def _fingerprint(study: Path) -> str:
    """A hash of the study, of what studies share, and of the library."""
    found = hashlib.sha256(_library_hash())
    for file in sorted([*study.rglob("*.json"), *study.glob("*.py"), *study.parent.glob("*.py")]):
        found.update(file.read_bytes())
    return found.hexdigest()


@functools.cache
def _library_hash() -> bytes:
    found = hashlib.sha256()
    for file in sorted((ROOT / "src" / "maclaurin").rglob("*.py")):
        found.update(file.read_bytes())
    return found.digest()


def keep_linked(report: Path) -> None:
    """Copy tables.md and the figures that a page shows to docs/reports."""
    kept = DOCS / "reports" / report.name
    shutil.rmtree(kept, ignore_errors=True)
    (kept / "figures").mkdir(parents=True)
    shutil.copyfile(report / "tables.md", kept / "tables.md")
    for figure in sorted((report / "figures").glob("*.svg")):
        if f"reports/{report.name}/figures/{figure.name}" in _pages():
            shutil.copyfile(figure, kept / "figures" / figure.name)


@functools.cache
def _pages() -> str:
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


# ---------------------------------------------------------------------------------------------------- tables


def filled(page: str) -> str:
    """The page with every marked table replaced."""
    return MARKED.sub(lambda found: found[1] + table_of(found["source"]) + found[4], page)


def table_of(source: str) -> str:
    """The first table under the named headings of a report."""
    report, *headings = source.split(" / ")
    text = (DOCS / "reports" / report / "tables.md").read_text(encoding="utf-8")
    for depth, heading in enumerate(headings, start=2):
        mark = "#" * depth
        sections = re.split(rf"^{mark} ", text, flags=re.MULTILINE)[1:]
        found = [section for section in sections if section.startswith(heading)]
        if not found:
            raise SystemExit(f"reports/{report}/tables.md has no heading {mark} {heading}…")
        text = re.split(r"^#{1,%d} " % depth, found[0], flags=re.MULTILINE)[0] if depth > 2 else found[0]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    if table is None:
        raise SystemExit(f"there is no table under {source}")
    return table[0]


if __name__ == "__main__":
    sys.exit(main())
