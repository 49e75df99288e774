"""One recurrent step: does it move its state as fast as the device copies memory?

Steps go round over several states that together outgrow the cache, as between two tokens of one text the rest
of a model would have emptied it. On a GPU they are timed as called, and replayed as a CUDA graph, which is
how a server runs them and where launching does not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from maclaurin.bench.cases import Case
from maclaurin.bench.clock import timings
from maclaurin.bench.inputs import draw_inputs
from maclaurin.bench.judge import Errors, all_finite, exact_row
from maclaurin.bench.measure import OWN_NAME, planned_record, reason_of, refused
from maclaurin.bench.record import CaseRecord, Figures, Roofs
from maclaurin.bench.setting import Setting
from maclaurin.bench.work import work_of_step
from maclaurin.forms.state import State
from maclaurin.programs.dispatch import plan
from maclaurin.spec import parse
from maclaurin.testing.cases import TensorCase
from maclaurin.testing.tolerances import relative_error

#: tokens in the state before the steps that are looked at
TOKENS_BEFORE = 64
#: bytes of all states together, several times any cache
COLD_BYTES = {"cuda": 256 << 20, "cpu": 0}

Step = tuple[Tensor, State]


@torch.no_grad()
def measure_step(case: Case, setting: Setting, roofs: Roofs) -> CaseRecord:
    """The second of two steps is checked, so that the state the first one returned is too."""
    spec = parse(case.spec)
    whole = dataclasses.replace(case.size, tokens=TOKENS_BEFORE + 2)
    text = draw_inputs(spec, whole, setting.dtype, setting.device)
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

    device, budget = setting.device, setting.budget_ms
    called = timings({"called": go_round}, device, budget)["called"]
    own = dataclasses.replace(
        record.own,
        forward_ms=called.median / number,
        spread=called.spread,
        samples=called.samples,
    )
    if device.type == "cuda":
        try:
            replay = _as_graph(go_round)
            replayed = timings({"replayed": replay}, device, budget)["replayed"]
            own = dataclasses.replace(own, graph_ms=replayed.median / number)
        except Exception as problem:  # then the step stands as it is called
            own = dataclasses.replace(own, note=f"no CUDA graph: {reason_of(problem)}")
    best = min(ms for ms in (own.forward_ms, own.graph_ms) if ms is not None)
    rate = 2 * state.nbytes / (1e-3 * best)
    return dataclasses.replace(
        record, status="measured", own=own, share_of_copy=rate / roofs.copy_bytes_per_s
    )


def _step(token: TensorCase, state: State, form: str) -> Step:
    return token(state=state, return_state=True, form=form)


def _error_of_last(text: TensorCase, y: Tensor) -> float:
    """Of the last token's output in the first and the last sequence."""
    if not all_finite([y]):
        return math.inf
    sequences, last = sorted({0, y.shape[0] - 1}), text.length - 1
    return max(relative_error(y[b, 0], exact_row(text, text.spec, b, last)) for b in sequences)


def _as_graph(run: Callable[[], list[Step]]) -> Callable[[], object]:
    """Captured once; what it returned lives as long as the graph that writes there.

    A step that waits for the device cannot be captured, and trying to would leave the process unsound: it is
    refused before.
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
