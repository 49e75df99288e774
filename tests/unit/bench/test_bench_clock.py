"""Medians, in turns, for about as long as asked."""

import contextlib
import gc
import itertools

import pytest
import torch

from maclaurin.bench import clock
from maclaurin.bench.clock import (
    CALLS_IN_A_LOOP,
    COLD_LOOPS,
    ROUNDS,
    cold_issue_microseconds,
    issue_microseconds,
    peak_bytes_beyond,
    timings,
)

CPU = torch.device("cpu")


@pytest.fixture
def ticking(monkeypatch):
    """Calls that take as long as they say, on a clock that only they move."""
    now = [0.0]
    order = []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def make(name, *milliseconds):
        durations = itertools.cycle(milliseconds)

        def call():
            order.append(name)
            now[0] += 1e-3 * next(durations)

        return call

    make.order = order
    return make


def test_the_median_counts_and_the_first_call_does_not(ticking):
    call = ticking("a", 50.0, *[1.0] * 1000)
    found = timings({"a": call}, CPU, 30)["a"]
    assert found.median == pytest.approx(1.0)
    assert found.spread == pytest.approx(0.0)


def test_samples_fill_the_budget_in_rounds(ticking):
    found = timings({"a": ticking("a", 2.0)}, CPU, 30)["a"]
    assert found.samples == 15
    assert timings({"a": ticking("a", 0.001)}, CPU, 30)["a"].samples == ROUNDS * clock.MOST_SAMPLES_IN_A_ROUND
    assert timings({"a": ticking("a", 500.0)}, CPU, 30)["a"].samples == ROUNDS


def test_a_very_slow_call_is_timed_once_and_has_no_spread(ticking):
    found = timings({"a": ticking("a", 2000.0)}, CPU, 30)["a"]
    assert (found.samples, found.spread) == (1, None)
    assert len(ticking.order) == 2


def test_they_take_turns(ticking):
    timings({"a": ticking("a", 10.0), "b": ticking("b", 10.0)}, CPU, 30)
    assert "".join(ticking.order) == "aabb" + "ab" * ROUNDS


def test_spread_is_half_the_distance_of_the_quartiles(ticking):
    found = timings({"a": ticking("a", 1.0, 2.0, 3.0)}, CPU, 400)["a"]
    assert found.median == pytest.approx(2.0)
    assert found.spread == pytest.approx(0.5)


def test_garbage_collection_is_off_while_timing():
    seen = []
    timings({"a": lambda: seen.append(gc.isenabled())}, CPU, 0.01)
    assert not any(seen)
    assert gc.isenabled()


def test_memory_is_not_measured_on_a_processor():
    assert peak_bytes_beyond(list, CPU) is None


def test_cpu_time_of_a_call_is_taken_with_an_idle_gpu(ticking, monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(len(ticking.order)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    call = ticking("a", 0.05, 0.02, 0.02)
    assert issue_microseconds(call, torch.device("cuda"), count=3) == pytest.approx(20)
    assert waits == [0, 1, 2]
    assert issue_microseconds(call, CPU) is None


def test_cold_cpu_time_is_per_call_of_a_loop_after_a_pause(ticking, monkeypatch):
    waits, pauses = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(len(ticking.order)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(clock.time, "sleep", pauses.append)
    loop = [0.2, *[0.02] * (CALLS_IN_A_LOOP - 1)]
    call = ticking("a", *loop * COLD_LOOPS)
    assert cold_issue_microseconds(call, torch.device("cuda")) == pytest.approx(1e3 * sum(loop) / len(loop))
    assert waits == [CALLS_IN_A_LOOP * n for n in range(COLD_LOOPS)]
    assert len(pauses) == COLD_LOOPS
    assert cold_issue_microseconds(call, CPU) is None
