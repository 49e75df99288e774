"""docs/architecture.md names every file of the core exactly once, and no file that is not there."""

import re
from collections import Counter
from pathlib import Path

import maclaurin

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOT = Path(maclaurin.__file__).parent
PACKAGES = ("spec", "forms", "programs", "programs/triton", "layers", "models")


def test_every_file_is_named_once():
    files = {f"{package}/{path.name}" for package in PACKAGES for path in (ROOT / package).glob("*.py")}
    files = {name for name in files if not name.endswith("/__init__.py")}
    named = Counter(re.findall(rf"(?:{'|'.join(sorted(PACKAGES, reverse=True))})/\w+\.py", PAGE))
    assert sorted(files - set(named)) == [], "missing from the page"
    assert sorted(set(named) - files) == [], "named, but not there"
    assert [name for name, times in named.items() if times > 1] == [], "named more than once"


def test_a_program_and_its_kernels_share_a_name():
    shared = {path.name for path in (ROOT / "programs/triton").glob("*.py")}
    fused = re.findall(r"\| `programs/(\w+\.py)` \| `programs/triton/(\w+\.py)`", PAGE)
    assert fused
    assert all(program == kernels and kernels in shared for program, kernels in fused)
