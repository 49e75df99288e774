"""The tables of docs/results.md are those of the reports, which are made from the committed records."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*options):
    command = [sys.executable, str(ROOT / "docs" / "build_reports.py"), *options]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_tables_are_up_to_date():
    assert run("--check").returncode == 0, "run `make docs`"
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8").count("<!-- table: ") >= 4
