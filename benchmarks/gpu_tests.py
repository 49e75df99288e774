"""Run the tests that need a GPU and keep their result with date and machine.

    python benchmarks/gpu_tests.py        (or: make gpu-test)

Results go to benchmarks/results/gpu_tests.json.
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

from machine import stamp

RESULTS = Path(__file__).parent / "results" / "gpu_tests.json"
FOLDERS = ["tests/gpu", "tests/kernels", "tests/compiled", "tests/unit/test_models.py", "tests/unit/bench"]


def main() -> int:
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *FOLDERS,
            f"--junitxml={report}",
            *side_by_side(),
            *sys.argv[1:],
        ]
        code = subprocess.run(command, cwd=root, check=False).returncode
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    data = {"machine": stamp(), "folders": FOLDERS, **counts, "failed": failed}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data, indent=1))
    return code


def side_by_side() -> list[str]:
    """Most of the time goes to compiling programs, which many processes do at once."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "worksteal"]


if __name__ == "__main__":
    sys.exit(main())
