"""`BenchRun`: measures the chosen cases one after the other and writes each result before the next."""

from __future__ import annotations

import dataclasses
import datetime
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from maclaurin.bench.bench_record import BenchRecord, CaseRecord, Roofs, read_bench, write_bench
from maclaurin.bench.clock import free_memory
from maclaurin.bench.measure_case import blank_record, failed, judged, measure_call, measure_step, reason_of
from maclaurin.bench.preparation import Preparation, Prepared
from maclaurin.bench.setting import Setting, measure_roofs
from maclaurin.bench.table import line_of
from maclaurin.bench.workloads import Case
from maclaurin.errors import InputError
from maclaurin.machine import BENCHMARKED_PACKAGES, provenance
from maclaurin.progress_bar import report_progress
from maclaurin.report.formatting import counted


@final
@dataclass(frozen=True)
class Ending:
    """The record at the end, and why the run ended early if it did."""

    record: BenchRecord
    trouble: str = ""


@final
class BenchRun:
    """Runs the chosen cases in one setting and keeps their results in one file."""

    def __init__(
        self,
        cases: Sequence[Case],
        setting: Setting,
        out: Path,
        *,
        resume: bool,
        without: Collection[str] = (),
        preparation: Preparation | None = None,
    ) -> None:
        self._setting, self._out = setting, out
        self._without, self._preparation = without, preparation
        self._prepared = Prepared()
        self._record, self.notes = _beginning(setting, out)
        self._cases = [c for c in cases if not (resume and self._record.case_named(c.name) is not None)]
        if skipped := len(cases) - len(self._cases):
            self.notes.append(f"{counted(skipped, 'case')} of this machine and this code are kept.")

    def run(self, minutes: float | None) -> Ending:
        """Measure until all cases are done; after the given minutes no further case begins."""
        if self._setting.device.type == "cuda":
            torch.cuda.set_device(self._setting.device)
        deadline = None if minutes is None else time.perf_counter() + 60 * minutes
        waiting = list(self._cases)
        if not waiting:
            return Ending(self._record)
        if self._preparation is not None:
            self._prepared = self._preparation.run(waiting, self._setting, self._without)
            print(self._prepared, file=sys.stderr, flush=True)
        roofs = self._measure_roofs()
        trouble = ""
        total = len(waiting)
        with report_progress("measuring") as report:
            while waiting and not trouble and (deadline is None or time.perf_counter() < deadline):
                case = waiting.pop(0)
                done = total - len(waiting)
                report((done - 1) / total, case.name)
                found = self._measured(case, roofs)
                self._keep(self._record.with_case(found))
                report.say(f"{done}/{total} {line_of(found)}")
                trouble = self._trouble_of_device()
        self._keep(dataclasses.replace(self._record, left_out=tuple(case.name for case in waiting)))
        return Ending(self._record, trouble)

    def _measure_roofs(self) -> Roofs:
        roofs = measure_roofs(self._setting.device, self._setting.dtype, self._setting.budget_ms)
        free_memory(self._setting.device)
        self._record = dataclasses.replace(self._record, roofs=roofs)
        return roofs

    def _measured(self, case: Case, roofs: Roofs) -> CaseRecord:
        begun = time.perf_counter()
        try:
            if case.kind == "step":
                found = measure_step(case, self._setting, roofs)
            else:
                found = measure_call(case, self._setting, self._left_out(case))
        except Exception as problem:  # any error of a case is recorded; the other cases still run
            found = failed(blank_record(case, self._setting), problem)
        found = self._prepared.noted(found)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = dataclasses.replace(found, date=now, seconds=round(time.perf_counter() - begun, 4))
        return judged(found, case, self._setting)

    def _left_out(self, case: Case) -> dict[str, str]:
        """Peers that are not measured, and why."""
        unwanted = {key: "left out" for key in case.peers if key in self._without}
        return {**self._prepared.late_peers(case), **unwanted}

    def _keep(self, record: BenchRecord) -> None:
        self._record = record
        write_bench(record, self._out)

    def _trouble_of_device(self) -> str:
        """Why the device is unusable, or empty: after an illegal access the next cases would fail too."""
        try:
            free_memory(self._setting.device)
            self._setting.wait()
        except RuntimeError as problem:
            return reason_of(problem)
        return ""


def _beginning(setting: Setting, out: Path) -> tuple[BenchRecord, list[str]]:
    """The record to continue (the file's if machine, code and shapes are the same), and notes for users."""
    fresh = BenchRecord(provenance(BENCHMARKED_PACKAGES), setting.device.type, setting.full_shapes)
    notes = [] if setting.full_shapes else ["Small shapes: ratios are shown, targets are for the full ones."]
    if not out.is_file():
        return fresh, notes
    try:
        known = read_bench(out)
    except InputError as problem:
        raise InputError(f"{problem} Choose another `out`, or remove the file.") from None
    if known.is_of(fresh):
        return dataclasses.replace(fresh, cases=known.cases, roofs=known.roofs), notes
    notes.append(f"{out} is from another machine, code or shape: it is replaced.")
    return fresh, notes
