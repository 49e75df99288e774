"""First calls of all cases and peers, in several processes, before anything is timed.

Compilation takes most of the time of a benchmark on a GPU, and uses one core. The processes fill the caches
on disk (triton's, inductor's); the benchmark itself then loads what they compiled.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from maclaurin.bench.bench_record import CaseRecord, Figures
from maclaurin.bench.measure_case import OWN_NAME, first_call, reason_of
from maclaurin.bench.setting import Setting
from maclaurin.bench.workloads import Case
from maclaurin.report.formatting import counted

#: peers that take longest until their first answer, so they begin first
_SLOW = ("power_retention", "chunk_linear_attn", "fused_chunk_based", "flex")


class _Job(NamedTuple):
    case: Case
    #: our program, or a peer
    key: str
    setting: Setting


class _Done(NamedTuple):
    case: str
    key: str
    seconds: float | None
    problem: str


@final
@dataclass(frozen=True)
class Prepared:
    """Durations of the first calls, and the calls that did not finish in time."""

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    late: dict[tuple[str, str], str] = field(default_factory=dict)
    problems: int = 0
    total_s: float = 0.0

    def late_peers(self, case: Case) -> dict[str, str]:
        """Peers of a case that were not ready in time: measuring them would wait for their compilation."""
        return {key: self.late[case.name, key] for key in case.peers if (case.name, key) in self.late}

    def noted(self, record: CaseRecord) -> CaseRecord:
        """The record with the first calls of the other processes, where these were longer."""
        peers = {key: self._noted(figures, record.name, key) for key, figures in record.peers.items()}
        return dataclasses.replace(record, own=self._noted(record.own, record.name, OWN_NAME), peers=peers)

    def _noted(self, figures: Figures, case: str, key: str) -> Figures:
        seconds = self.seconds.get((case, key), 0.0)
        if figures.first_call_s is None or seconds <= figures.first_call_s:
            return figures
        return dataclasses.replace(figures, first_call_s=seconds, first_call_shared=True)

    def __str__(self) -> str:
        late = f", {len(self.late)} not ready in time" if self.late else ""
        failed = f", {counted(self.problems, 'error')}" if self.problems else ""
        return f"{counted(len(self.seconds), 'first call')} in {self.total_s:.0f} s{late}{failed}"


@final
@dataclass(frozen=True)
class Preparation:
    """Call every case and peer once, in several processes, within a time limit."""

    processes: int
    seconds: float

    def run(self, cases: Sequence[Case], setting: Setting, without: Collection[str]) -> Prepared:
        """Steps are left out: they are a small part of the time, and start from a state."""
        begun = time.perf_counter()
        keys = [(case, key) for case in cases if case.kind != "step" for key in (OWN_NAME, *case.peers)]
        jobs = [_Job(case, key, setting) for case, key in keys if key not in without]
        jobs.sort(key=lambda job: job.key not in _SLOW)
        seconds: dict[tuple[str, str], float] = {}
        finished: set[tuple[str, str]] = set()
        problems, processes = 0, max(1, min(self.processes, len(jobs)))
        pool = multiprocessing.get_context("spawn").Pool(processes, _begin)
        try:
            results = pool.imap_unordered(_call_once, jobs)
            for _ in jobs:
                done = results.next(max(0.0, self.seconds - (time.perf_counter() - begun)))
                finished.add((done.case, done.key))
                problems += bool(done.problem)
                if done.seconds is not None:
                    seconds[done.case, done.key] = done.seconds
        except multiprocessing.TimeoutError:
            pass
        finally:
            pool.terminate()
            pool.join()
        late = late_calls([(job.case.name, job.key) for job in jobs], finished, processes)
        why = f"no first answer within {self.seconds:g} s"
        return Prepared(seconds, dict.fromkeys(late, why), problems, time.perf_counter() - begun)


def late_calls(
    calls: Sequence[tuple[str, str]], finished: Collection[tuple[str, str]], processes: int
) -> list[tuple[str, str]]:
    """Calls that began and did not end. They begin in order, one in each process, so later ones did not."""
    return [call for call in calls[: len(finished) + processes] if call not in finished]


def _begin() -> None:
    """One core for each process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    torch.set_num_threads(1)


def _call_once(job: _Job) -> _Done:
    """Any error is found again when the case is measured, and recorded there."""
    from maclaurin.bench.clock import free_memory

    try:
        return _Done(job.case.name, job.key, first_call(job.case, job.setting, job.key), "")
    except Exception as problem:
        return _Done(job.case.name, job.key, None, reason_of(problem))
    finally:
        free_memory(job.setting.device)
