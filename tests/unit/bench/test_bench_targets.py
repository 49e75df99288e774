"""Verdicts: reached, missed, or nobody knows."""

import math

import pytest

from maclaurin.bench.bench_record import Figures
from maclaurin.bench.targets import (
    FirstCall,
    IssuedWithin,
    Measured,
    MemoryAgainst,
    MemoryAtMost,
    ShareOfCopy,
    TimeAgainst,
    TimeAtMost,
)

OWN = Figures(
    "maclaurin",
    first_call_s=3.0,
    forward_ms=1.1,
    forward_backward_ms=4.0,
    peak_bytes=700 * 10**6,
    issue_us=100.0,
    cold_issue_us=250.0,
)
SDPA = Figures("cuDNN SDPA", forward_ms=1.0, forward_backward_ms=4.0, peak_bytes=400 * 10**6, issue_us=40.0)
ABSENT = Figures("fla chunk_linear_attn", note="cannot be imported here")


def measured(own=OWN, gpu="NVIDIA H200", full_shapes=True, share=0.7):
    return Measured(own, {"sdpa": SDPA, "chunk_linear_attn": ABSENT}, share, gpu, full_shapes)


@pytest.mark.parametrize(
    ("target", "value", "reached"),
    [
        (TimeAgainst(1.15, "sdpa", "forward"), 1.1, True),
        (TimeAgainst(1.05, "sdpa", "forward"), 1.1, False),
        (TimeAgainst(1.0, "sdpa", "forward+backward"), 1.0, True),
        (TimeAtMost(5), 4.0, True),
        (TimeAtMost(3), 4.0, False),
        (MemoryAgainst(1.5, "sdpa"), 1.75, False),
        (MemoryAgainst(2.0, "sdpa"), 1.75, True),
        (MemoryAtMost(0.8), 0.7, True),
        (MemoryAtMost(0.6), 0.7, False),
        (ShareOfCopy(0.6), 0.7, True),
        (ShareOfCopy(0.8), 0.7, False),
        (FirstCall(10), 3.0, True),
        (FirstCall(2), 3.0, False),
        (IssuedWithin(120), 100.0, True),
        (IssuedWithin(90), 100.0, False),
        (IssuedWithin(300, cold=True), 250.0, True),
        (IssuedWithin(200, cold=True), 250.0, False),
    ],
)
def test_a_value_is_held_against_its_limit(target, value, reached):
    verdict = target.judge(measured())
    assert verdict.value == pytest.approx(value)
    assert verdict.reached is reached
    assert verdict.limit == target.limit
    for other in (measured(gpu=None), measured(full_shapes=False)):
        assert target.judge(other).value == pytest.approx(value)
        assert target.judge(other).reached is None


def test_milliseconds_are_those_of_an_h200():
    verdict = TimeAtMost(5).judge(measured(gpu="NVIDIA A100"))
    assert (verdict.value, verdict.reached) == (4.0, None)
    assert TimeAgainst(1.15, "sdpa", "forward").judge(measured(gpu="NVIDIA A100")).reached is True


def test_cpu_time_is_also_given_relative_to_torch():
    assert IssuedWithin(120).judge(measured()).note == "2.5 × cuDNN SDPA"
    assert IssuedWithin(300, cold=True).judge(measured()).note == ""
    assert IssuedWithin(120).judge(measured(gpu="NVIDIA A100")).reached is None


def test_missing_peer_gives_no_verdict():
    verdict = TimeAgainst(1.0, "chunk_linear_attn", "forward").judge(measured())
    assert (verdict.value, verdict.reached, verdict.note) == (None, None, "cannot be imported here")


def test_a_case_without_figures_has_missed_its_targets():
    nothing = measured(own=Figures("maclaurin", note="out of memory"), share=None)
    targets = [
        TimeAgainst(1.15, "sdpa", "forward"),
        TimeAtMost(5),
        MemoryAtMost(0.8),
        ShareOfCopy(0.6),
        FirstCall(10),
    ]
    assert [target.judge(nothing).reached for target in targets] == [False] * 5


def test_more_than_nothing_is_infinitely_more():
    none_at_all = Figures("cuDNN SDPA", peak_bytes=0)
    found = Measured(OWN, {"sdpa": none_at_all}, None, "NVIDIA H200", True)
    verdict = MemoryAgainst(1.5, "sdpa").judge(found)
    assert (verdict.value, verdict.reached) == (math.inf, False)


def test_another_program_than_the_target_names_is_named():
    found = Measured(OWN, {"sdpa": Figures("torch SDPA", forward_ms=1.0)}, None, None, False)
    assert TimeAgainst(1.15, "sdpa", "forward").judge(found).note == "against torch SDPA"
