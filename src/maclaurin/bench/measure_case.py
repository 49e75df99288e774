"""One case: the first call, the check against float64, and for a correct result times and memory.

Calls are timed forward and with their gradients. A recurrent step is timed on several states that together
are larger than the cache, since the rest of a model would evict them between two tokens. On a GPU both are
also replayed as a CUDA graph, which measures the time of the GPU without launches by the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from maclaurin.bench.bench_record import CaseRecord, Figures, Roofs
from maclaurin.bench.clock import (
    cold_issue_microseconds,
    free_memory,
    issue_microseconds,
    peak_bytes_beyond,
    timings,
)
from maclaurin.bench.judge import Errors, all_finite, error_of_rows, errors_of_piece, exact_row, piece_of
from maclaurin.bench.peers import Implementation, make_peer
from maclaurin.bench.setting import Setting, shape_of
from maclaurin.bench.targets import PEER_TITLES, Measured
from maclaurin.bench.workloads import Case, Work, packed_cuts, work_of_call, work_of_step
from maclaurin.errors import MaclaurinError
from maclaurin.forms.attend import Form
from maclaurin.forms.state import State
from maclaurin.programs.dispatch import plan
from maclaurin.programs.plan import Plan
from maclaurin.spec import parse
from maclaurin.testing.cases import TensorCase, draw_direction, draw_inputs
from maclaurin.testing.tolerances import relative_error

OWN_NAME = "maclaurin"
NONE_LEFT_OUT: Mapping[str, str] = {}
#: lengths of the part whose gradients are checked: the first that runs on the same program as the full case
PIECE_TOKENS = (512, 2048, 8192)


class CannotCheck(MaclaurinError):
    """No part of a case runs on the program of the full case, so its gradients cannot be checked."""


#: folders of an absolute path, which are removed: records are shared between machines
_ABSOLUTE = re.compile(r"(?<!\S)/(?:[^\s/]+/)+([^\s/]*)")


def reason_of(problem: Exception) -> str:
    """An error in one line, with file names instead of paths."""
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    first = _ABSOLUTE.sub(r"\1", (str(problem).strip().splitlines() or [""])[0])
    return first if isinstance(problem, MaclaurinError) else f"{type(problem).__name__}: {first}"


def blank_record(case: Case, setting: Setting) -> CaseRecord:
    """The record of a case before anything is measured."""
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
    """The record of a case whose form, program and work are known."""
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
    """A wrong result: the record has its error instead of times."""
    note = f"wrong (error {errors.largest:.1e} of {errors.worst}, allowed {setting.allowed_error:g})"
    own = dataclasses.replace(record.own, error=errors.largest, worst=errors.worst, note=note)
    return dataclasses.replace(record, status="wrong", own=own)


def failed(record: CaseRecord, problem: Exception) -> CaseRecord:
    """A case that did not run: the record has the reason instead of times."""
    own = dataclasses.replace(record.own, note=reason_of(problem))
    return dataclasses.replace(record, status="failed", own=own)


def measure_call(case: Case, setting: Setting, left_out: Mapping[str, str] = NONE_LEFT_OUT) -> CaseRecord:
    """Output and gradients of one call; the work of packed texts is counted as that of equal rows.

    `left_out`: peers that are not measured, and why.
    """
    comparison, chosen = _comparison(case, setting)
    work = work_of_call(comparison.inputs.spec, chosen.form.value, case.size, setting.dtype.itemsize)
    record = planned_record(case, setting, chosen, work)
    try:
        return _compared(record, comparison, chosen, left_out)
    except Exception as problem:  # the plan is already known, so it is recorded
        return failed(record, problem)


def first_call(case: Case, setting: Setting, key: str) -> float | None:
    """Call a case, or one of its peers, once, including the checks that precede timing.

    Afterwards caches on disk have its programs. Returns the seconds of the first call; None for a peer that
    is not available or not correct.
    """
    comparison, chosen = _comparison(case, setting)
    if key != OWN_NAME:
        return comparison.peer(key)[1].first_call_s
    seconds, _ = comparison.examine(comparison.own())
    comparison.errors_of_piece(chosen)
    return seconds


def _comparison(case: Case, setting: Setting) -> tuple[_Comparison, Plan]:
    """A case with its tensors, and our plan for it."""
    shape = shape_of(case.size)
    inputs = draw_inputs(parse(case.spec), shape, setting.dtype, setting.device)
    inputs = inputs.map(torch.Tensor.requires_grad_)
    kind = _PackedComparison if case.kind == "packed" else _Comparison
    comparison = kind(case, inputs, draw_direction(shape, setting.dtype, setting.device), setting)
    return comparison, comparison.plan_of(inputs, case.form)


def _compared(
    record: CaseRecord, comparison: _Comparison, chosen: Plan, left_out: Mapping[str, str]
) -> CaseRecord:
    own = comparison.own()
    seconds, errors = comparison.examine(own)
    errors = Errors({**errors.found, **comparison.errors_of_piece(chosen)})
    if not errors.within(comparison.setting.dtype):
        return refused(record, errors, comparison.setting)
    examined = {OWN_NAME: (own, Figures(OWN_NAME, errors.largest, errors.worst, seconds))}
    peers = dict(record.peers)
    for key in comparison.case.peers:
        if key in left_out:
            peers[key] = dataclasses.replace(peers[key], note=left_out[key])
            continue
        implementation, peers[key] = comparison.peer(key)
        if implementation is not None:
            examined[key] = (implementation, peers[key])
    figures = comparison.measure(examined)
    own_figures = figures.pop(OWN_NAME)
    return dataclasses.replace(record, status="measured", own=own_figures, peers={**peers, **figures})


def _lengths_of_pieces(chosen: Plan) -> list[int]:
    """Lengths of several chunks if there are chunks, so that states between them are checked too."""
    least = 4 * (chosen.chunk_size or 0) if chosen.form is Form.CHUNKED else 0
    return [tokens for tokens in PIECE_TOKENS if tokens >= min(least, PIECE_TOKENS[-1])]


@dataclass(frozen=True)
class _Comparison:
    """Maclaurin and the peers on the same tensors."""

    case: Case
    inputs: TensorCase
    direction: Tensor
    setting: Setting

    def plan_of(self, inputs: TensorCase, form: str) -> Plan:
        """The plan of `attention` for these tensors."""
        q, k, v = (inputs.tensors[name] for name in "qkv")
        return plan(q, k, v, inputs.spec, form=form, causal=self.case.causal)

    def own(self) -> Implementation:
        """Maclaurin, as a user calls it."""
        leaves = tuple(self.inputs.tensors.values())
        options = {"form": self.case.form, "causal": self.case.causal}
        return Implementation(OWN_NAME, lambda: self.inputs.output(**options), leaves, self.inputs.spec)

    def examine(self, implementation: Implementation) -> tuple[float, Errors]:
        """Seconds of the first call with gradients, and errors of some rows of its output."""
        begun = time.perf_counter()
        y, *gradients = implementation.forward_backward(self.direction)
        self.setting.wait()
        seconds = time.perf_counter() - begun
        errors = {}
        if implementation.means is not None:
            errors["output"] = error_of_rows(self.inputs, implementation.means, y, causal=self.case.causal)
        if not all_finite(gradients):
            errors["gradients"] = float("inf")
        return seconds, Errors(errors)

    def errors_of_piece(self, chosen: Plan) -> dict[str, float]:
        """Errors of output and gradients, on a part of the case that has the same form and program."""
        form, causal, kv_heads = chosen.form.value, self.case.causal, self.case.size.kv_heads
        for tokens in _lengths_of_pieces(chosen):
            piece = self.inputs.map(lambda t, n=tokens: piece_of(t, n, kv_heads))
            if self.plan_of(piece, form).program is chosen.program:
                direction = piece_of(self.direction, tokens, kv_heads)
                found = errors_of_piece(
                    piece, direction, lambda case: case.output(form=form, causal=causal), causal=causal
                )
                return {f"{name} of a piece": error for name, error in found.items()}
        raise CannotCheck(
            f"no piece of {PIECE_TOKENS[-1]} tokens or fewer runs on {chosen.backend} like the full case, so "
            "its gradients cannot be checked"
        )

    def peer(self, key: str) -> tuple[Implementation | None, Figures]:
        """The peer, if it is available and correct, and its figures so far."""
        blank = Figures(PEER_TITLES[key])
        try:
            implementation = make_peer(key, self.inputs)
            seconds, errors = self.examine(implementation)
        except Exception as problem:  # any error of a peer is recorded; everything else continues
            blank = dataclasses.replace(blank, note=reason_of(problem))
            free_memory(self.setting.device)
            return None, blank
        figures = dataclasses.replace(blank, name=implementation.name, first_call_s=seconds)
        if not errors.found:
            note = "computes another function: not checked"
            return implementation, dataclasses.replace(figures, note=note)
        figures = dataclasses.replace(figures, error=errors.largest, worst=errors.worst)
        if not errors.within(self.setting.dtype):
            note = f"wrong (error {errors.largest:.1e})"
            return None, dataclasses.replace(figures, first_call_s=None, note=note)
        return implementation, figures

    def measure(self, examined: dict[str, tuple[Implementation, Figures]]) -> dict[str, Figures]:
        """Times in turns, then the memory of each."""
        forward = {key: implementation.forward for key, (implementation, _) in examined.items()}
        both = {key: self._both(implementation) for key, (implementation, _) in examined.items()}
        forward_times = timings(forward, self.setting.device, self.setting.budget_ms)
        both_times = timings(both, self.setting.device, self.setting.budget_ms)
        (replayed_forward, _), (replayed, reasons) = self._replayed(forward), self._replayed(both)
        found = {}
        for key, (_, figures) in examined.items():
            found[key] = dataclasses.replace(
                figures,
                forward_ms=forward_times[key].median,
                forward_backward_ms=both_times[key].median,
                spread=both_times[key].spread,
                samples=both_times[key].samples,
                graph_ms=replayed_forward.get(key),
                graph_forward_backward_ms=replayed.get(key),
                note=figures.note or reasons.get(key, ""),
                peak_bytes=peak_bytes_beyond(both[key], self.setting.device),
                issue_us=issue_microseconds(forward[key], self.setting.device),
                cold_issue_us=cold_issue_microseconds(forward[key], self.setting.device),
            )
        return found

    def _replayed(self, calls: Mapping[str, Callable[[], object]]) -> tuple[dict[str, float], dict[str, str]]:
        """Milliseconds of each call replayed as a CUDA graph; for the others, why they were not captured."""
        if self.setting.device.type != "cuda":
            return {}, {}
        graphs: dict[str, Callable[[], object]] = {}
        reasons: dict[str, str] = {}
        for key, call in calls.items():
            try:
                graphs[key] = _as_graph(call)
            except RuntimeError as problem:  # it waits for the GPU, or there is no memory for another
                reasons[key] = f"no CUDA graph: {reason_of(problem)}"
        times = timings(graphs, self.setting.device, self.setting.budget_ms / 2)
        graphs.clear()
        free_memory(self.setting.device)
        return {key: timing.median for key, timing in times.items()}, reasons

    def _both(self, implementation: Implementation) -> Callable[[], list[Tensor]]:
        return lambda: implementation.forward_backward(self.direction)


@final
@dataclass(frozen=True)
class _PackedComparison(_Comparison):
    """All tokens as one row of texts of uneven length; peers get the same tokens as equal rows."""

    @property
    def cuts(self) -> Tensor:
        """On the device, as a data loader would provide them."""
        size = self.case.size
        found = packed_cuts(size.batch, size.batch * size.tokens)
        return torch.tensor(found, dtype=torch.int32, device=self.setting.device)

    def plan_of(self, inputs: TensorCase, form: str) -> Plan:
        """What `attention` does with the packed row."""
        q, k, v = (_one_row(inputs.tensors[name]) for name in "qkv")
        return plan(q, k, v, inputs.spec, form=form, cu_seqlens=self.cuts)

    def own(self) -> Implementation:
        """Our call on all tensors as one packed row; its rows are not the peers', so a piece is checked."""
        cuts, leaves = self.cuts, tuple(self.inputs.tensors.values())
        return Implementation(OWN_NAME, lambda: self._output(self.inputs, cuts), leaves, None)

    def _output(self, inputs: TensorCase, cuts: Tensor) -> Tensor:
        batch, tokens = inputs.tensors["q"].shape[:2]
        y = inputs.map(_one_row).output(form=self.case.form, cu_seqlens=cuts)
        return y.view(batch, tokens, *y.shape[2:])

    def errors_of_piece(self, chosen: Plan) -> dict[str, float]:
        """Some rows of the first and the last text; output and gradients of two texts in a piece."""
        row, cuts = self.inputs.map(lambda t: _one_row(t.detach())), self.cuts.tolist()
        with torch.no_grad():
            y = row.output(form=self.case.form, cu_seqlens=self.cuts)
        errors = {
            f"output of text {n}": error_of_rows(row.tokens(a, b), row.spec, y[:, a:b])
            for n, (a, b) in ((0, cuts[:2]), (len(cuts) - 2, cuts[-2:]))
        }
        tokens, kv_heads = min(PIECE_TOKENS[0], cuts[-1]), self.case.size.kv_heads
        piece = row.map(lambda t: piece_of(t, tokens, kv_heads))
        direction = piece_of(_one_row(self.direction), tokens, kv_heads)
        found = errors_of_piece(
            piece,
            direction,
            lambda case: self._two_texts(case, chosen.form.value),
            cuts=_cuts_of_two_texts(tokens),
        )
        return {**errors, **{f"{name} of a piece": error for name, error in found.items()}}

    def _two_texts(self, piece: TensorCase, form: str) -> Tensor:
        cuts = torch.tensor(_cuts_of_two_texts(piece.length), dtype=torch.int32, device=self.setting.device)
        return piece.output(form=form, cu_seqlens=cuts)


def _one_row(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1)[None]


def _cuts_of_two_texts(tokens: int) -> list[int]:
    """Cuts of two texts, the first a third of all."""
    return [0, tokens // 3, tokens]


#: tokens in the state before the measured steps
TOKENS_BEFORE = 64
#: bytes of all states together, several times any cache
COLD_BYTES = {"cuda": 256 << 20, "cpu": 0}

Step = tuple[Tensor, State]


@torch.no_grad()
def measure_step(case: Case, setting: Setting, roofs: Roofs) -> CaseRecord:
    """Time one step. The second of two steps is checked, and with it the state that the first returned."""
    spec = parse(case.spec)
    shape = shape_of(dataclasses.replace(case.size, tokens=TOKENS_BEFORE + 2))
    text = draw_inputs(spec, shape, setting.dtype, setting.device)
    state = text.tokens(0, TOKENS_BEFORE).state()
    token, last = (text.tokens(t, t + 1) for t in (TOKENS_BEFORE, TOKENS_BEFORE + 1))
    q, k, v = (token.tensors[name] for name in "qkv")
    chosen = plan(q, k, v, spec, state=state, return_state=True, form=case.form)
    work = work_of_step(spec, case.size, setting.dtype.itemsize)
    record = planned_record(case, setting, chosen, work)
    record = dataclasses.replace(record, state_traffic=2 * state.nbytes)
    begun = time.perf_counter()
    _, after = _step(token, state, case.form)
    setting.wait()
    seconds = time.perf_counter() - begun
    y, _ = _step(last, after, case.form)
    errors = Errors({"output of the second step": _error_of_last(text, y)})
    if not errors.within(setting.dtype):
        return refused(record, errors, setting)
    own = Figures(OWN_NAME, errors.largest, errors.worst, seconds)
    return _timed(dataclasses.replace(record, own=own), token, state, setting, roofs)


def _timed(record: CaseRecord, token: TensorCase, state: State, setting: Setting, roofs: Roofs) -> CaseRecord:
    number = max(1, math.ceil(COLD_BYTES[setting.device.type] / state.nbytes))
    states = [state.clone() for _ in range(number)]

    def go_round() -> list[Step]:
        return [_step(token, each, record.asked_form) for each in states]

    def one_step() -> Step:
        return _step(token, states[0], record.asked_form)

    device, budget = setting.device, setting.budget_ms
    called = timings({"called": go_round}, device, budget)["called"]
    own = dataclasses.replace(
        record.own,
        forward_ms=called.median / number,
        issue_us=issue_microseconds(one_step, device),
        cold_issue_us=cold_issue_microseconds(one_step, device),
        spread=called.spread,
        samples=called.samples,
    )
    if device.type == "cuda":
        try:
            replay = _as_graph(go_round)
            replayed = timings({"replayed": replay}, device, budget)["replayed"]
            own = dataclasses.replace(own, graph_ms=replayed.median / number)
        except Exception as problem:  # then only the direct call is timed
            own = dataclasses.replace(own, note=f"no CUDA graph: {reason_of(problem)}")
    best = min(ms for ms in (own.forward_ms, own.graph_ms) if ms is not None)
    rate = 2 * state.nbytes / (1e-3 * best)
    return dataclasses.replace(
        record, status="measured", own=own, share_of_copy=rate / roofs.copy_bytes_per_s
    )


def _step(token: TensorCase, state: State, form: str) -> Step:
    return token(state=state, return_state=True, form=form)


def _error_of_last(text: TensorCase, y: Tensor) -> float:
    """The error of the last token's output in the first and the last sequence."""
    if not all_finite([y]):
        return math.inf
    sequences, last = sorted({0, y.shape[0] - 1}), text.length - 1
    return max(relative_error(y[b, 0], exact_row(text, text.spec, b, last)) for b in sequences)


def _as_graph(run: Callable[[], object]) -> Callable[[], object]:
    """Capture a call; its outputs live as long as the graph that writes to them.

    A call that synchronises with the device cannot be captured, and an attempt would break the process: this
    is an error before the attempt.
    """
    before = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(before)
    with torch.cuda.stream(side), _waiting_is_an_error():
        run()
    before.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = run()
    except RuntimeError:
        torch.cuda.set_stream(before)
        raise

    def replay() -> object:
        graph.replay()
        return kept

    return replay


@contextlib.contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    known = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(known)
