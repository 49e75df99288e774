"""Run the tests that need a GPU and record the result with date and machine.

    python benchmarks/gpu_tests.py [--minutes 8]        (or: make gpu-test)
    python benchmarks/gpu_tests.py --again
    python benchmarks/gpu_tests.py --since tests/kernels/test_kept_keys.py

With --minutes, pytest is interrupted after that time; the tests that have run are recorded, and that it was
stopped. The second command repeats the tests that failed last time and records that next to the first result.
The third runs some tests, those of code that has changed, and adds the result to the list `since`.
Other options are passed to pytest. Results go to benchmarks/results/gpu_tests.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from machine import stamp

RESULTS = Path(__file__).parent / "results" / "gpu_tests.json"
FOLDERS = [
    "tests/gpu",
    "tests/kernels",
    "tests/unit/test_head_groups.py",
    "tests/unit/test_models.py",
    "tests/unit/bench",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--since", nargs="+", metavar="TEST")
    parser.add_argument("--minutes", type=float)
    given, options = parser.parse_known_args()
    if given.since:
        known = json.loads(RESULTS.read_text())
        code, found = run(given.since, options, given.minutes)
        known.setdefault("since", []).append({"tests_of": given.since, **found})
    elif not given.again:
        code, found = run(FOLDERS, options, given.minutes)
        known = {"folders": FOLDERS, **found}
    else:
        known = json.loads(RESULTS.read_text())
        if not known["failed"]:
            print("nothing failed last time")
            return 0
        code, known["again"] = run(known["failed"], options, given.minutes)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(known, indent=1))
    return code


def run(tests: list[str], options: list[str], minutes: float | None) -> tuple[int, dict[str, Any]]:
    """pytest's exit code, and a record with the machine, the number of passed tests and the failed ones."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-m", ""]  # the exhaustive tests too
        command = [*pytest, *tests, f"--junitxml={report}", *side_by_side(), *options]
        code, stopped = _run_for(command, minutes)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        _named(case.get("classname", ""), case.get("name", ""))
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return code, {"machine": stamp(), **counts, "stopped_after_minutes": stopped, "failed": failed}


def _run_for(command: list[str], minutes: float | None) -> tuple[int, float | None]:
    """The exit code, and after how many minutes the process was interrupted, if it was."""
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    try:
        return process.wait(None if minutes is None else 60 * minutes), None
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait(), minutes


def _named(module: str, name: str) -> str:
    """The test id for pytest; a file that cannot be imported has no module, and its name is the file's."""
    return f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py"


def side_by_side() -> list[str]:
    """Options for parallel tests: most of the time is compilation, which many processes can share."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]


if __name__ == "__main__":
    sys.exit(main())
