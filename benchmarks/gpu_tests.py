"""Run the tests that need a GPU and record the result with date and machine.

    python benchmarks/gpu_tests.py        (or: make gpu-test)
    python benchmarks/gpu_tests.py --again

The second command repeats the tests that failed last time and records that beside the first result. Other
options are passed to pytest. Results go to benchmarks/results/gpu_tests.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from machine import stamp

RESULTS = Path(__file__).parent / "results" / "gpu_tests.json"
FOLDERS = ["tests/gpu", "tests/kernels", "tests/unit/test_models.py", "tests/unit/bench"]


def main() -> int:
    options = [option for option in sys.argv[1:] if option != "--again"]
    if "--again" not in sys.argv:
        code, found = run(FOLDERS, options)
        known = {"folders": FOLDERS, **found}
    else:
        known = json.loads(RESULTS.read_text())
        if not known["failed"]:
            print("nothing failed last time")
            return 0
        code, known["again"] = run(known["failed"], options)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(known, indent=1))
    return code


def run(tests: list[str], options: list[str]) -> tuple[int, dict[str, Any]]:
    """pytest's exit code, and a record with the machine, the number of passed tests and the failed ones."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [sys.executable, "-m", "pytest", "-m", ""]  # the exhaustive tests too
        command = [*pytest, *tests, f"--junitxml={report}", *side_by_side(), *options]
        code = subprocess.run(command, cwd=Path(__file__).parents[1], check=False).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        _named(case.get("classname", ""), case.get("name", ""))
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return code, {"machine": stamp(), **counts, "failed": failed}


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
