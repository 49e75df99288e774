"""The version of the code that made a number: commit, and a digest of the packages a run depends on."""

from __future__ import annotations

import hashlib
import subprocess
from functools import lru_cache
from pathlib import Path

#: Version of the numerics of training. Raise it with every change after which the same run, with the same
#: config, data and torch, ends in another loss, unless only rounding differs. Results of other versions are
#: not reused.
NUMERICS_VERSION = 2

#: editing these may change a number; editing commands, studies or reports may not
PACKAGES = ("spec", "forms", "programs", "layers", "models", "data", "training", "errors.py")

#: keys of a training config that change no number
FREE_KEYS = ("keep", "trackers", "checkpoint_every", "log_every")


@lru_cache(maxsize=1)
def code_version() -> str:
    """Digest of the source that results depend on."""
    return digest_of_source(Path(__file__).parent)


def digest_of_source(package: Path) -> str:
    """SHA-256 over names and contents of the Python files in PACKAGES."""
    total = hashlib.sha256()
    for name in PACKAGES:
        place = package / name
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        for file in files:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return total.hexdigest()


def commit() -> str | None:
    """The commit of this package's source; None if it is installed, even inside another git repository."""
    source = Path(__file__)
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None  # git does not track this file, so the repository belongs to another project
    return _git(source.parent, "describe", "--always", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git, or None if it fails."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, encoding="utf-8"
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
