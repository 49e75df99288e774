"""What a figure was measured on: stamped into every result file."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from maclaurin.code_version import code_version, commit

#: packages whose version may decide a figure
PACKAGES = ("maclaurin", "triton", "flash-linear-attention", "retention")


def stamp() -> dict[str, Any]:
    """Date, commit, versions and processor."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def full_stamp() -> dict[str, Any]:
    """The same with the digest of the code, which a dirty commit does not tell, and versions of the peers."""
    versions = {name: _version(name) for name in PACKAGES}
    cuda = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {**stamp(), "code": code_version(), "versions": {**versions, **cuda}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
