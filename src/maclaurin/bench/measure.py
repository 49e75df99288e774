"""One case: the first call, the judgement, and only for a right result the times and the memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from maclaurin.bench.cases import Case
from maclaurin.bench.clock import timings
from maclaurin.bench.contender import Contender
from maclaurin.bench.inputs import draw_direction, draw_inputs
from maclaurin.bench.judge import Errors, all_finite, error_of_rows, errors_of_piece, piece_of
from maclaurin.bench.memory import free_memory, peak_bytes_beyond
from maclaurin.bench.peers import make_peer
from maclaurin.bench.record import CaseRecord, Figures
from maclaurin.bench.setting import Setting
from maclaurin.bench.targets import PEER_TITLES, Measured
from maclaurin.bench.work import Work, work_of_call
from maclaurin.errors import MaclaurinError
from maclaurin.forms.attend import Form
from maclaurin.programs.dispatch import plan
from maclaurin.programs.plan import Plan
from maclaurin.spec import parse
from maclaurin.testing.cases import TensorCase

OWN_NAME = "maclaurin"
#: lengths of the piece whose gradients are checked: the first that takes the same program as the whole
PIECE_TOKENS = (512, 2048, 8192)


class CannotCheck(MaclaurinError):
    """No piece of a case takes the program that the case takes, so its gradients cannot be judged."""


def reason_of(problem: Exception) -> str:
    """An error in one line."""
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    first = (str(problem).strip().splitlines() or [""])[0]
    return first if isinstance(problem, MaclaurinError) else f"{type(problem).__name__}: {first}"


def blank_record(case: Case, setting: Setting) -> CaseRecord:
    """A case of which nothing is known yet."""
    return CaseRecord(
        name=case.name,
        group=case.group,
        in_sweep=case.in_sweep,
        spec=case.spec,
        asked_form=case.form,
        size=case.size,
        dtype=setting.dtype_name,
        status="failed",
        own=Figures(OWN_NAME),
        peers={key: Figures(PEER_TITLES[key], note="not measured") for key in case.peers},
    )


def planned_record(case: Case, setting: Setting, chosen: Plan, work: Work) -> CaseRecord:
    """A case of which form, program and work are known."""
    return dataclasses.replace(
        blank_record(case, setting),
        form=chosen.form.value,
        backend=chosen.backend,
        flops=work.flops,
        moved_bytes=work.moved_bytes,
    )


def judged(record: CaseRecord, case: Case, setting: Setting) -> CaseRecord:
    """The record with a verdict on every target."""
    measured = Measured(record.own, record.peers, record.share_of_copy, setting.gpu, setting.full_shapes)
    return dataclasses.replace(record, verdicts=tuple(target.judge(measured) for target in case.targets))


def refused(record: CaseRecord, errors: Errors, setting: Setting) -> CaseRecord:
    """A wrong result: its error stands where its times would."""
    note = f"wrong (error {errors.largest:.1e} of {errors.worst}, allowed {setting.allowed_error:g})"
    own = dataclasses.replace(record.own, error=errors.largest, worst=errors.worst, note=note)
    return dataclasses.replace(record, status="wrong", own=own)


def failed(record: CaseRecord, problem: Exception) -> CaseRecord:
    """A case that did not run: the reason stands where its times would."""
    own = dataclasses.replace(record.own, note=reason_of(problem))
    return dataclasses.replace(record, status="failed", own=own)


def measure_call(case: Case, setting: Setting) -> CaseRecord:
    """Output and gradients of one call."""
    spec = parse(case.spec)
    inputs = draw_inputs(spec, case.size, setting.dtype, setting.device).map(torch.Tensor.requires_grad_)
    race = _Race(case, inputs, draw_direction(case.size, setting.dtype, setting.device), setting)
    chosen = race.plan_of(inputs, case.form)
    work = work_of_call(spec, chosen.form.value, case.size, setting.dtype.itemsize)
    record = planned_record(case, setting, chosen, work)
    try:
        return _raced(record, race, chosen)
    except Exception as problem:  # the plan is known already, so it is told
        return failed(record, problem)


def _raced(record: CaseRecord, race: _Race, chosen: Plan) -> CaseRecord:
    own = race.own()
    seconds, errors = race.examine(own)
    errors = Errors({**errors.found, **race.errors_of_piece(chosen)})
    if not errors.within(race.setting.dtype):
        return refused(record, errors, race.setting)
    examined = {OWN_NAME: (own, Figures(OWN_NAME, errors.largest, errors.worst, seconds))}
    peers = dict(record.peers)
    for key in race.case.peers:
        contender, peers[key] = race.peer(key)
        if contender is not None:
            examined[key] = (contender, peers[key])
    figures = race.measure(examined)
    own_figures = figures.pop(OWN_NAME)
    return dataclasses.replace(record, status="measured", own=own_figures, peers={**peers, **figures})


def _lengths_of_pieces(chosen: Plan) -> list[int]:
    """Long enough for several chunks where there are chunks, so that states between them are checked too."""
    least = 4 * (chosen.chunk_size or 0) if chosen.form is Form.CHUNKED else 0
    return [tokens for tokens in PIECE_TOKENS if tokens >= min(least, PIECE_TOKENS[-1])]


@final
@dataclass(frozen=True)
class _Race:
    """Ourselves and the peers on the same tensors."""

    case: Case
    inputs: TensorCase
    direction: Tensor
    setting: Setting

    def plan_of(self, inputs: TensorCase, form: str) -> Plan:
        """What `attention` does with such tensors."""
        q, k, v = (inputs.tensors[name] for name in "qkv")
        return plan(q, k, v, inputs.spec, form=form)

    def own(self) -> Contender:
        """Ourselves, as a user calls us."""
        leaves = tuple(self.inputs.tensors.values())
        return Contender(OWN_NAME, lambda: self.inputs.output(form=self.case.form), leaves, self.inputs.spec)

    def examine(self, contender: Contender) -> tuple[float, Errors]:
        """Seconds of the first call with its gradients, and how wrong some rows of its output are."""
        begun = time.perf_counter()
        y, *gradients = contender.forward_backward(self.direction)
        self.setting.wait()
        seconds = time.perf_counter() - begun
        errors = {}
        if contender.means is not None:
            errors["output"] = error_of_rows(self.inputs, contender.means, y)
        if not all_finite(gradients):
            errors["gradients"] = float("inf")
        return seconds, Errors(errors)

    def errors_of_piece(self, chosen: Plan) -> dict[str, float]:
        """Of output and gradients, on a piece that takes the same form and program."""
        form = chosen.form.value
        for tokens in _lengths_of_pieces(chosen):
            piece = self.inputs.map(lambda t, n=tokens: piece_of(t, n))
            if self.plan_of(piece, form).backend == chosen.backend:
                direction = piece_of(self.direction, tokens)
                found = errors_of_piece(piece, direction, lambda case: case.output(form=form))
                return {f"{name} of a piece": error for name, error in found.items()}
        raise CannotCheck(
            f"no piece of {PIECE_TOKENS[-1]} tokens or fewer runs on {chosen.backend}, as the whole does, so "
            "its gradients cannot be checked"
        )

    def peer(self, key: str) -> tuple[Contender | None, Figures]:
        """The peer, if it is there and right, and what is known of it so far."""
        blank = Figures(PEER_TITLES[key])
        try:
            contender = make_peer(key, self.inputs)
            seconds, errors = self.examine(contender)
        except Exception as problem:  # whatever a peer does is noted, and stops nobody else
            blank = dataclasses.replace(blank, note=reason_of(problem))
            free_memory(self.setting.device)
            return None, blank
        figures = dataclasses.replace(blank, name=contender.name, first_call_s=seconds)
        if not errors.found:
            return contender, dataclasses.replace(figures, note="computes something of its own: not checked")
        figures = dataclasses.replace(figures, error=errors.largest, worst=errors.worst)
        if not errors.within(self.setting.dtype):
            note = f"wrong (error {errors.largest:.1e})"
            return None, dataclasses.replace(figures, first_call_s=None, note=note)
        return contender, figures

    def measure(self, examined: dict[str, tuple[Contender, Figures]]) -> dict[str, Figures]:
        """Times in turns, then the memory of each."""
        forward = {key: contender.forward for key, (contender, _) in examined.items()}
        both = {key: self._both(contender) for key, (contender, _) in examined.items()}
        forward_times = timings(forward, self.setting.device, self.setting.budget_ms)
        both_times = timings(both, self.setting.device, self.setting.budget_ms)
        found = {}
        for key, (_, figures) in examined.items():
            found[key] = dataclasses.replace(
                figures,
                forward_ms=forward_times[key].median,
                forward_backward_ms=both_times[key].median,
                spread=both_times[key].spread,
                samples=both_times[key].samples,
                peak_bytes=peak_bytes_beyond(both[key], self.setting.device),
            )
        return found

    def _both(self, contender: Contender) -> Callable[[], list[Tensor]]:
        return lambda: contender.forward_backward(self.direction)
