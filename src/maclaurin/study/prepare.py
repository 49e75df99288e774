"""From planned runs to tasks with keys: their data are opened, and prepared where they are not yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from maclaurin.code_version import code_version
from maclaurin.study.design import Study
from maclaurin.study.fingerprints import Fingerprints
from maclaurin.study.job import Job
from maclaurin.study.key import run_key
from maclaurin.study.plan import PlannedRun
from maclaurin.study.pool import Pool
from maclaurin.study.run_record import provenance_of
from maclaurin.study.runner import Task


def make_tasks(
    study: Study,
    runs: Sequence[PlannedRun],
    pool: Pool,
    *,
    study_lock: Path,
    threads: int | None,
    keep_models: bool,
) -> list[Task]:
    """One task per run."""
    fingerprints, code, marker = Fingerprints(), code_version(), pool.marker()
    provenance = cache(lambda name, fingerprint: provenance_of(code, name, fingerprint))
    metrics = {experiment.name: experiment.metric for experiment in study.experiments}
    tasks = []
    for run in runs:
        source = fingerprints.source(run.config)
        key = run_key(run.config, code, source.fingerprint)
        job = make_job(
            run,
            pool,
            key=key,
            data=source.fingerprint,
            marker=marker,
            study_lock=str(study_lock.absolute()),
            threads=threads,
            keep_models=keep_models,
        )
        tokens = run.config.steps * run.config.batch_size * source.length
        facts: dict[str, Any] = provenance(source.name, source.fingerprint)
        tasks.append(Task(job, key, tokens, metrics[run.experiment], facts))
    return tasks


def make_job(run: PlannedRun, pool: Pool, *, key: str | None = None, **more: Any) -> Job:
    """What a worker is told of a planned run."""
    return Job(
        key=key,
        experiment=run.experiment,
        cell=run.cell.name,
        levels=dict(run.cell.levels),
        seed=run.seed,
        config=run.config.to_dict(),
        order=run.facts.order,
        state_bytes=run.facts.state_bytes,
        pool=str(pool.root),
        code=code_version(),
        **more,
    )
