"""benchmarks/gpu_tests.py runs every file that has a test for a GPU."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def folders():
    """FOLDERS of the script, read from its source."""
    for statement in ast.parse((ROOT / "benchmarks/gpu_tests.py").read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "FOLDERS":
            return ast.literal_eval(statement.value)
    raise AssertionError("the script has no FOLDERS")


def test_no_gpu_test_is_left_out():
    marked = "mark" + ".gpu"  # in two pieces, so that this file is not found
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if marked in file.read_text()]
    covered = [ROOT / folder for folder in folders()]
    assert files
    assert all(path.exists() for path in covered)
    assert [f for f in files if not any(f.is_relative_to(path) for path in covered)] == []
