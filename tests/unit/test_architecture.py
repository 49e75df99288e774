"""docs/architecture.md names every file of the core once and no other; no two modules share a name."""

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


def test_no_two_modules_have_the_same_name():
    """Apart from a fused program and its kernels, programs/x.py and programs/triton/x.py."""
    homes: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        if path.name != "__init__.py":
            homes.setdefault(path.name, []).append(path.relative_to(ROOT).parent.as_posix())
    shared = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert {name: found for name, found in shared.items() if found != ["programs", "programs/triton"]} == {}
