"""Copy tables of the studies' reports into docs/results.md, so that nobody types a number.

    python docs/fill_results.py [--check]

A marker names a report, a heading of its tables.md, and optionally a heading below it:

    <!-- table: mini / Next token of Python's standard library / Learning rates -->
    (the table; replaced by the first one under that heading)
    <!-- end of table -->

A heading is named by how it begins. With --check nothing is written; the exit code is 1 if a table differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
MARKED = re.compile(r"(<!-- table: (?P<source>.+?) -->\n)(?P<table>.*?)(<!-- end of table -->)", re.DOTALL)


def main() -> int:
    """Fill the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    page = DOCS / "results.md"
    before = page.read_text(encoding="utf-8")
    after = filled(before)
    if parser.parse_args().check:
        return int(before != after)
    page.write_text(after, encoding="utf-8")
    return 0


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
            raise SystemExit(f"results.md: reports/{report}/tables.md has no heading {mark} {heading}…")
        text = re.split(r"^#{1,%d} " % depth, found[0], flags=re.MULTILINE)[0] if depth > 2 else found[0]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    if table is None:
        raise SystemExit(f"results.md: there is no table under {source}")
    return table[0]


if __name__ == "__main__":
    sys.exit(main())
