"""Do fused programs access memory out of bounds? Runs compute-sanitizer's memcheck on small shapes.

    python benchmarks/sanitize.py        (or: make gpu-sanitize)

Each line of SMALL_SHAPES is a process, and all run in parallel: sanitized kernels are many times slower, and
most of the time is compilation. Each tensor is allocated from the driver, so that no other tensor lies
behind it. Results go to benchmarks/results/sanitizer.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import stamp

RESULTS = Path(__file__).parent / "results" / "sanitizer.json"
#: its place in the toolkit, if it is not on the path
TOOLKIT = "/usr/local/cuda/bin/compute-sanitizer"
#: file of tests/kernels → which of its tests, as pytest -k takes it
SMALL_SHAPES = [
    ("test_softmax_score_mod.py", "every_length and bfloat16 and (63 or 65)"),
    ("test_softmax_score_mod.py", "strong_forgetting and float16"),
    ("test_packed.py", "sequence_of_exp and bfloat16"),
    ("test_polynomial_quadratic.py", "every_length and bfloat16 and (1] or 63 or 65)"),
    ("test_polynomial_linear.py", "every_length and bfloat16 and (16-63 or 16-65 or 64-65)"),
    ("test_polynomial_linear.py", "heads_of_order_3 and (2 or 17)"),
    ("test_polynomial_linear.py", "every_length and float16 and not bfloat16 and (16-1] or 32-65)"),
    ("test_polynomial_linear.py", "in_pieces"),
    ("test_row_gain.py", "every_length and bfloat16 and (1] or 63 or 65)"),
    ("test_state_step.py", "token_by_token and [9- and (linear or hermite or l2)"),
    ("test_state_step.py", "two_launches or other or half"),
    ("test_taylor_attention.py", "every_pair and dtype2"),
    ("test_taylor_attention.py", "test_chunks or in_pieces"),
    ("test_polynomial_quadratic.py", "every_kind and bfloat16 and forget"),
    ("test_window_tail.py", "long_as and bfloat16"),
    ("test_window_tail.py", "goes_on_from and float32 and window"),
]


def main() -> int:
    options = _options()
    tool = shutil.which("compute-sanitizer") or (TOOLKIT if Path(TOOLKIT).is_file() else None)
    if tool is None:
        sys.exit("compute-sanitizer was not found: it comes with the CUDA toolkit (put it on the PATH)")
    with tempfile.TemporaryDirectory() as folder:
        running = [
            (tests, _start(tool, tests, options.seconds, Path(folder) / str(n)))
            for n, tests in enumerate(SMALL_SHAPES)
        ]
        found = [_found(f"{file} -k '{chosen}'", *process) for (file, chosen), process in running]
    RESULTS.write_text(json.dumps({"machine": stamp(), "found": found}, indent=1) + "\n")
    for line in found:
        print(line)
    return 0 if all(_is_clean(line) for line in found) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="compute-sanitizer on the tests of fused programs.")
    parser.add_argument("--seconds", type=int, default=600, help="stop each process after this time")
    return parser.parse_args()


def _start(
    tool: str, tests: tuple[str, str], seconds: int, log: Path
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the tests under the sanitizer; returns the process and its log file."""
    file, chosen = tests
    command = [
        "timeout", str(seconds), tool, "--tool", "memcheck", sys.executable, "-m", "pytest",
        f"tests/kernels/{file}", "-k", chosen, "-p", "no:cacheprovider",
    ]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=Path(__file__).parents[1], env=environment, stdout=output, stderr=subprocess.STDOUT
        ), log


def _found(tests: str, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """How many tests passed and how many errors the sanitizer found; None if it did not finish."""
    process.wait()
    text = log.read_text(errors="replace")
    passed, failed = (_number(rf"(\d+) {word}", text) for word in ("passed", "failed"))
    errors = _number(r"SUMMARY: (\d+) error", text)
    line = {"tests": tests, "passed": passed or 0, "failed": failed or 0, "errors": errors}
    return line if _is_clean(line) else {**line, "end_of_output": text[-1500:]}


def _is_clean(line: dict[str, Any]) -> bool:
    return line["passed"] > 0 and line["failed"] == 0 and line["errors"] == 0


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


if __name__ == "__main__":
    sys.exit(main())
