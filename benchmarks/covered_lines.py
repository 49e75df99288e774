"""Which share of the library's lines the tests run, in all and by package.

    python benchmarks/covered_lines.py [TESTS …]        (or: make coverage)

Runs what `make test` runs and adds up the lines of all processes; this is slower than the tests alone. The
result goes to benchmarks/results/coverage.json, unless only some tests are named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from machine import stamp

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"
INTERPRETED = "tests/kernels"


def main() -> int:
    tests = sys.argv[1:]
    interpreted = [test for test in tests if test.startswith(INTERPRETED)] if tests else [INTERPRETED]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "COVERAGE_FILE": str(Path(folder) / "lines")}
        codes = [_pytest(tests, environment)]
        if interpreted:
            codes.append(_pytest(interpreted, {**environment, "TRITON_INTERPRET": "1"}))
        report = Path(folder) / "report.json"
        subprocess.run(_coverage("json", "-q", "-o", str(report)), env=environment, cwd=ROOT, check=True)
        covered = json.loads(report.read_text())
    found = {
        "machine": stamp(),
        "total": _share(covered["totals"]),
        "packages": _by_package(covered["files"]),
    }
    print(json.dumps(found, indent=1))
    if not tests and not any(codes):
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return max(codes)


def _pytest(tests: list[str], environment: dict[str, str]) -> int:
    """Run tests with two processes and add their lines to those recorded before."""
    options = ["-n", "2", "--dist", "worksteal", "--cov", "--cov-append", "--cov-report="]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


def _coverage(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coverage", *arguments]


def _by_package(files: dict[str, Any]) -> dict[str, float]:
    """Percent of lines run in each package; `maclaurin` for the files that are in none."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: {"covered_lines": 0, "num_statements": 0})
    for name, found in files.items():
        inside = name.replace("\\", "/").split("maclaurin/")[-1]
        package = inside.split("/")[0] if "/" in inside else "maclaurin"
        for key in sums[package]:
            sums[package][key] += found["summary"][key]
    return {package: _share(total) for package, total in sorted(sums.items())}


def _share(total: dict[str, int]) -> float:
    return round(100 * total["covered_lines"] / max(1, total["num_statements"]), 1)


if __name__ == "__main__":
    sys.exit(main())
