"""The file a job travels in to torchrun."""

from __future__ import annotations

import re
from pathlib import Path

from maclaurin.data.fingerprint import digest
from maclaurin.study.job import Job


def job_file(out: Path, job: Job) -> Path:
    """Where a job is written for torchrun: a readable name, and a digest that tells similar ones apart."""
    cell = re.sub(r"[^A-Za-z0-9]+", "-", f"{job.experiment}-{job.cell}").strip("-")
    mark = digest([job.experiment, job.cell])[:6]
    return out / "jobs" / f"{cell}-{mark}-seed-{job.seed}.json"
