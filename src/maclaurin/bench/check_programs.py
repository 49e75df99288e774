"""Check every program on this machine against the plain forms in float64, with gradients.

A compiler or a driver can make a correct program wrong. So each program of the table (programs/plan.py) runs
a few specs that it supports, at a length that is not a multiple of a tile, in each dtype it supports here.
One of them also runs with large heads in large groups, and with heads of an odd size.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal, final

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
#: by device: how many specs each program runs in a dtype. Most of the time is compilation, and fp16 is
#: compiled like bf16
SPECS_PER_PROGRAM = {
    "cuda": {torch.bfloat16: 3, torch.float16: 1, torch.float32: 3},
    "cpu": {torch.float32: 3},
}
#: lengths are not a multiple of a tile or a chunk
SHAPE = Shape(batch=2, tokens=301, kv_heads=2, group=2, d=64, e=64)
SMALL_SHAPE = Shape(batch=2, tokens=61, kv_heads=2, group=2, d=16, e=16)
#: for one spec in the first dtype: grouped heads of 128, and heads of an odd size
OTHER_SHAPES = (
    Shape(batch=1, tokens=191, kv_heads=2, group=4, d=128, e=128),
    Shape(batch=1, tokens=77, kv_heads=1, group=3, d=33, e=33),
)
OTHER_SMALL_SHAPES = (
    Shape(batch=1, tokens=53, kv_heads=2, group=4, d=8, e=8),
    Shape(batch=1, tokens=47, kv_heads=1, group=3, d=7, e=5),
)


@final
@dataclass(frozen=True)
class Finding:
    """One program on one spec: its largest errors, or why it could not be tried."""

    program: str
    spec: str
    dtype: str
    shape: Shape
    limit: float
    output_error: float | None = None
    gradient_error: float | None = None  # None if the program has no gradient
    problem: str | None = None

    @property
    def title(self) -> str:
        """The spec, and the size of its heads if that is not the usual one."""
        return self.spec if self.shape in (SHAPE, SMALL_SHAPE) else f"{self.spec}, d={self.shape.d}"

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


#: what a program computes: a whole text, one more token after a state, or the last query over all keys
Kind = Literal["text", "step", "query"]


@final
@dataclass(frozen=True)
class Trial:
    """A program, a spec that it supports, a shape and a dtype."""

    program: Program
    spec: AttentionSpec
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    kind: Kind = "text"

    @property
    def title(self) -> str:
        """The program and the spec."""
        return f"{self.program.name}, {self.spec}"

    def run(self) -> Finding:
        """Compare the program with float64; an exception becomes a finding."""
        named = (self.program.name, str(self.spec), str(self.dtype).removeprefix("torch."), self.shape)
        limit = TOLERANCE_BEFORE_TIMING[self.dtype]
        try:
            if self.kind == "text":
                output, gradient = self._errors()
            else:
                output, gradient = self._error_of_last(), None
        except Exception as problem:
            return Finding(*named, limit, problem=f"{type(problem).__name__}: {first_line(problem)}")
        return Finding(*named, limit, output, gradient)

    def _errors(self) -> tuple[float, float]:
        case = self.case()
        direction = torch.randn_like(plain_output(self.spec, case.tensors)).to(self.dtype)
        errors = errors_of_piece(case, direction, self._output)
        output = errors.pop("output")
        return output, max(errors.values())

    def case(self) -> TensorCase:
        """The tensors of the text."""
        return random_tensors(self.spec, self.shape, 0, self.dtype, device=str(self.device))

    def _output(self, case: TensorCase) -> Tensor:
        return self.program.run(_call(case))[0]

    @torch.no_grad()
    def _error_of_last(self) -> float:
        """The error of the last token of a text, as a step or as one query; these have no gradients."""
        case = self.case()
        if self.kind == "query":
            call = _call(_last_query(case))
        else:
            state = self._state_before(case)
            call = _call(_tokens(case, slice(-1, None)))._replace(state=state, return_state=True)
        y, _ = self.program.run(call)
        return relative_error(y[:, 0], plain_output(self.spec, case.tensors)[:, -1])

    def _state_before(self, case: TensorCase) -> State:
        """The state of all tokens but the last."""
        q, k, v, *gates = _tokens(case, slice(-1)).tensors.values()
        named = dict(zip(self.spec.gates, gates, strict=True))
        return attention(q, k, v, self.spec, return_state=True, gates=named)[1]


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
        usual, others = _shapes(program, device)
        specs = SPECS_PER_PROGRAM.get(device.type, SPECS_PER_PROGRAM["cpu"])
        for dtype, most in specs.items():
            yield from itertools.islice(_trials(program, usual, dtype, device), most)
        for shape in others:
            yield from itertools.islice(_trials(program, shape, next(iter(specs)), device), 1)


def _shapes(program: Program, device: torch.device) -> tuple[Shape, tuple[Shape, ...]]:
    """The usual shape and the others; small for plain programs, which have no tiles and often huge states."""
    is_small = program.backend == "torch" or device.type != "cuda"
    return (SMALL_SHAPE, OTHER_SMALL_SHAPES) if is_small else (SHAPE, OTHER_SHAPES)


def _trials(program: Program, shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    """Trials of all specs that the program supports at this shape."""
    for text in SPECS:
        found = _supported(Trial(program, parse(text), shape, dtype, device))
        if found is not None:
            yield found


def _supported(trial: Trial) -> Trial | None:
    """The trial as the first kind that the program supports; None if there is none."""
    case, program = trial.case(), trial.program
    if program.refuses(_call(case.with_gradients())) is None:
        return trial
    with torch.no_grad():
        if program.refuses(_call(_last_query(case))) is None:
            return dataclasses.replace(trial, kind="query")
        if not trial.spec.has_finite_state:
            return None
        step = _call(_tokens(case, slice(-1, None)))
        step = step._replace(state=State.on_meta(trial.spec, step.inputs), return_state=True)
        return None if program.refuses(step) else dataclasses.replace(trial, kind="step")


def _tokens(case: TensorCase, part: slice) -> TensorCase:
    """Some tokens of a text."""
    return case.map(lambda u: u[:, part])


def _last_query(case: TensorCase) -> TensorCase:
    """The last query and its gates, with the keys and values of all tokens."""
    of_queries = {"q", *(a.name for a in case.spec.arguments if a.tokens == "query")}
    tensors = {name: u[:, -1:] if name in of_queries else u for name, u in case.tensors.items()}
    return dataclasses.replace(case, tensors=tensors)


def _call(case: TensorCase) -> Call:
    q, k, v = (case.tensors[name] for name in "qkv")
    gates = {name: u for name, u in case.tensors.items() if name not in "qkv"}
    scale = case.spec.kernel.default_scale(q.shape[3])
    return Call(case.spec, Inputs(q, k, v, gates), scale, q.device)
