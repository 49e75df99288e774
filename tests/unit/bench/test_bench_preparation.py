"""First calls in other processes before anything is timed."""

import dataclasses

import pytest
from tests.unit.bench.tiny import SETTING, record_of, tiny_case

from maclaurin.bench.bench_record import Figures, read_bench
from maclaurin.bench.bench_run import BenchRun
from maclaurin.bench.measure_case import OWN_NAME
from maclaurin.bench.preparation import Preparation, Prepared, late_calls
from maclaurin.bench.targets import FirstCall, Measured


def test_every_case_and_peer_is_called_once_in_other_processes(tmp_path):
    out = tmp_path / "bench.json"
    case = tiny_case(peers=("sdpa", "parallel"))
    run = BenchRun([case], SETTING, out, resume=False, without=("parallel",), preparation=Preparation(1, 120))
    run.run(None)
    assert set(run._prepared.seconds) == {(case.name, OWN_NAME), (case.name, "sdpa")}
    assert not run._prepared.late
    (found,) = read_bench(out).cases
    assert found.status == "measured"
    assert found.own.first_call_s >= run._prepared.seconds[case.name, OWN_NAME]
    assert found.peers["sdpa"].forward_ms > 0
    assert (found.peers["parallel"].note, found.peers["parallel"].forward_ms) == ("left out", None)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_peer_that_began_and_did_not_answer_is_left_out(processes, tmp_path):
    """With one process its first call has not begun when the time is up: nobody knows whether it is slow."""
    case = tiny_case(peers=("sdpa",))
    out = tmp_path / "bench.json"
    BenchRun([case], SETTING, out, resume=False, preparation=Preparation(processes, 0.0)).run(None)
    (found,) = read_bench(out).cases
    assert found.status == "measured"
    assert not found.own.first_call_shared
    assert (found.peers["sdpa"].forward_ms is None) == (processes == 2)
    assert found.peers["sdpa"].note == ("" if processes == 1 else "no first answer within 0 s")


def test_calls_begin_in_order():
    calls = [("a", "own"), ("a", "slow"), ("b", "own"), ("b", "slow"), ("c", "own")]
    assert late_calls(calls, {("a", "own"), ("b", "own")}, 2) == [("a", "slow"), ("b", "slow")]
    assert late_calls(calls, set(), 1) == [("a", "own")]
    assert late_calls(calls, set(calls), 2) == []


@pytest.mark.parametrize(("seconds", "expected"), [(0.4, (0.5, False)), (3.0, (3.0, True))])
def test_the_longer_first_call_counts(seconds, expected):
    prepared = Prepared({("a case", OWN_NAME): seconds})
    own = prepared.noted(record_of("a case")).own
    assert (own.first_call_s, own.first_call_shared) == expected


@pytest.mark.parametrize(
    ("seconds", "shared", "reached"),
    [(3.0, False, True), (30.0, False, False), (3.0, True, True), (30.0, True, None)],
)
def test_a_shared_first_call_can_only_pass(seconds, shared, reached):
    own = dataclasses.replace(Figures(OWN_NAME), first_call_s=seconds, first_call_shared=shared)
    assert FirstCall(10).judge(Measured(own, {}, None, "NVIDIA H200", True)).reached is reached
