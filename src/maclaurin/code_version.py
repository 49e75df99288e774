"""Which code made a number: its version, the commit, and a digest of the packages a run depends on."""

from __future__ import annotations

import hashlib
import subprocess
from functools import lru_cache
from pathlib import Path

import maclaurin

#: Version of the numbers that training gives. Raise it with every change after which the same run, with the
#: same config, data and torch, ends in another loss. Results of other versions are not reused.
NUMERICS_VERSION = 1

#: editing these may change a number; editing commands, studies or reports may not
ROOMS = ("spec", "forms", "backends", "layers", "models", "data", "training", "errors.py")


@lru_cache(maxsize=1)
def code_version() -> str:
    """The version of the installed package."""
    return digest_of_source(Path(maclaurin.__file__).parent)


def digest_of_source(package: Path) -> str:
    """SHA-256 over names and contents of the Python files of those packages."""
    total = hashlib.sha256()
    for room in ROOMS:
        place = package / room
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        for file in files:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return total.hexdigest()


def commit() -> str | None:
    """Which state of the code this is, where it lies in a git checkout."""
    here = Path(__file__).parent
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
