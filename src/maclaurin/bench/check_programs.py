"""Check every program on this machine against the plain forms in float64, with gradients.

A compiler or a driver can make a correct program wrong. So each program of the table (programs/plan.py) runs
a few specs that it supports, at a length that is not a multiple of a tile, in each dtype it supports here.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from maclaurin.bench.judge import errors_of_piece, plain_output
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.programs.dispatch import attention
from maclaurin.programs.plan import PROGRAMS
from maclaurin.programs.program import Call, Program
from maclaurin.spec import AttentionSpec, parse
from maclaurin.testing.cases import Shape, TensorCase, random_tensors
from maclaurin.testing.tolerances import TOLERANCE_BEFORE_TIMING, relative_error
from maclaurin.wording import first_line

#: specs for the trials: each program runs the first few that it supports
SPECS = (
    "exp/sum",
    "exp/l2",
    "exp/len*out",
    "exp(clamp=5)/len",
    "exp*forget/sum",
    "poly(0)+window(40,sinks=1)/sum",
    "poly(0)+window(40,sinks=1,kept=32)/sum",
    "taylor(2)/sum",
    "taylor(4)/sum",
    "power(2)*forget/sum",
    "sigmoid(-1)/sum",
    "linear(elu1)/sum",
    "linear(identity)*forget",
    "taylor(2,about=mean)/sum",
    "taylor(2)/l2",
    "hermite(2)/len",
    "taylor(2,about=mean)+window(40,sinks=1)/sum",
)
SPECS_PER_PROGRAM = 3
#: not a multiple of a tile or a chunk
SHAPE = Shape(batch=2, tokens=301, kv_heads=2, group=2, d=64, e=64)
SMALL_SHAPE = Shape(batch=2, tokens=61, kv_heads=2, group=2, d=16, e=16)
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32,)}


@final
@dataclass(frozen=True)
class Finding:
    """One program on one spec: its largest errors, or why it could not be tried."""

    program: str
    spec: str
    dtype: str
    limit: float
    output_error: float | None = None
    gradient_error: float | None = None  # None if the program has no gradient
    problem: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether it ran, and all errors are within the limit."""
        return self.problem is None and self.largest_error <= self.limit

    @property
    def largest_error(self) -> float:
        """The largest error of output and gradients; infinite if it did not run."""
        return (
            float("inf") if self.output_error is None else max(self.output_error, self.gradient_error or 0.0)
        )


@final
@dataclass(frozen=True)
class Trial:
    """A program, a spec that it supports, and a dtype."""

    program: Program
    spec: AttentionSpec
    dtype: torch.dtype
    device: torch.device
    is_step: bool

    @property
    def title(self) -> str:
        """The program and the spec."""
        return f"{self.program.name}, {self.spec}"

    def run(self) -> Finding:
        """Compare the program with float64; an exception becomes a finding."""
        named = (self.program.name, str(self.spec), str(self.dtype).removeprefix("torch."))
        limit = TOLERANCE_BEFORE_TIMING[self.dtype]
        try:
            output, gradient = self._errors_of_step() if self.is_step else self._errors()
        except Exception as problem:
            return Finding(*named, limit, problem=f"{type(problem).__name__}: {first_line(problem)}")
        return Finding(*named, limit, output, gradient)

    def _errors(self) -> tuple[float, float]:
        case = self._case()
        direction = torch.randn_like(plain_output(self.spec, case.tensors)).to(self.dtype)
        errors = errors_of_piece(case, direction, self._output)
        output = errors.pop("output")
        return output, max(errors.values())

    def _case(self) -> TensorCase:
        return _case(self.program, self.spec, self.dtype, self.device)

    def _output(self, case: TensorCase) -> Tensor:
        return self.program.run(_call(case))[0]

    @torch.no_grad()
    def _errors_of_step(self) -> tuple[float, None]:
        """Errors of a step: the last token of a text, from the state of the earlier ones."""
        case = self._case()
        before, token = (case.map(lambda u, part=part: u[:, part]) for part in (slice(-1), slice(-1, None)))
        q, k, v, *gates = before.tensors.values()
        named = dict(zip(self.spec.gates, gates, strict=True))
        _, state = attention(q, k, v, self.spec, return_state=True, gates=named)
        y, _ = self.program.run(_call(token)._replace(state=state, return_state=True))
        return relative_error(y[:, 0], plain_output(self.spec, case.tensors)[:, -1]), None


#: processes on a GPU: most of the time is compilation, and each process takes half a gigabyte of GPU memory
MOST_PROCESSES = 12
#: errors that another trial may have caused: a program that broke the GPU's context for the whole process, or
#: too little memory for all trials together. Such trials are repeated alone
NOT_ITS_FAULT = ("CUDA error", "OutOfMemoryError")


def examine(device: torch.device, report: Callable[[float, str], None]) -> list[Finding]:
    """Run all trials; on a GPU in separate processes, so that one bad program cannot affect others."""
    planned = list(trials(device))
    if device.type != "cuda":
        found = []
        for number, trial in enumerate(planned, start=1):
            found.append(trial.run())
            report(number / len(planned), trial.title)
        return found
    found = _side_by_side(planned, report)
    suspects = [n for n, finding in enumerate(found) if _may_have_another_cause(finding)]
    for n in suspects:
        report(1.0, f"again, alone: {planned[n].title}")
        (found[n],) = _side_by_side([planned[n]], lambda share, title: None)
    return found


def _may_have_another_cause(finding: Finding) -> bool:
    return finding.problem is not None and any(text in finding.problem for text in NOT_ITS_FAULT)


def _side_by_side(planned: list[Trial], report: Callable[[float, str], None]) -> list[Finding]:
    """Findings in the order of the trials."""
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(planned))
    found: list[Finding | None] = [None] * len(planned)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(trial.run): n for n, trial in enumerate(planned)}
        for number, done in enumerate(as_completed(running), start=1):
            found[running[done]] = done.result()
            report(number / len(planned), planned[running[done]].title)
    return [finding for finding in found if finding is not None]


def trials(device: torch.device) -> Iterator[Trial]:
    """The trials for a device, program by program."""
    for program in PROGRAMS:
        for dtype in DTYPES.get(device.type, DTYPES["cpu"]):
            taken = 0
            for text in SPECS:
                found = _trial(program, parse(text), dtype, device)
                if found is not None and taken < SPECS_PER_PROGRAM:
                    taken += 1
                    yield found


def _trial(program: Program, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> Trial | None:
    """A trial on a whole text or on one more token; None if the program supports neither."""
    case = _case(program, spec, dtype, device).with_gradients()
    if program.refuses(_call(case)) is None:
        return Trial(program, spec, dtype, device, is_step=False)
    if not spec.has_finite_state:
        return None
    token = _case(program, spec, dtype, device).map(lambda u: u[:, -1:])
    with torch.no_grad():
        state = State.on_meta(spec, _call(token).inputs)
        step = _call(token)._replace(state=state, return_state=True)
        return None if program.refuses(step) else Trial(program, spec, dtype, device, is_step=True)


def _case(program: Program, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> TensorCase:
    """Inputs of a trial; small for plain programs, which have no tiles and can have huge states."""
    is_plain = program.backend == "torch"
    shape = SMALL_SHAPE if is_plain or device.type != "cuda" else SHAPE
    return random_tensors(spec, shape, 0, dtype, device=str(device))


def _call(case: TensorCase) -> Call:
    q, k, v = (case.tensors[name] for name in "qkv")
    gates = {name: u for name, u in case.tensors.items() if name not in "qkv"}
    scale = case.spec.kernel.default_scale(q.shape[3])
    return Call(case.spec, Inputs(q, k, v, gates), scale, q.device)
