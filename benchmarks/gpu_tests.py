"""Run the tests that need a GPU and keep their result with date and machine.

    python benchmarks/gpu_tests.py        (or: make gpu-test)
    python benchmarks/gpu_tests.py --again

The second runs those that failed last time once more, and keeps that beside the first result. Other options
are pytest's. Results go to benchmarks/results/gpu_tests.json.
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
    """pytest's exit code, and on which machine how many passed and which did not, as pytest names them."""
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
    """As pytest takes it; a file that cannot be read has no module, and its name is that of the file."""
    return f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py"


def side_by_side() -> list[str]:
    """Most of the time goes to compiling programs, which many processes do at once."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]


if __name__ == "__main__":
    sys.exit(main())
