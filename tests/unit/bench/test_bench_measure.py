"""From a case to its record: numbers for right results, words for all others."""

import math

import pytest
import torch
from tests.unit.bench.tiny import ROOFS, SETTING, tiny_case, tiny_step

from maclaurin.bench import measure_case as measure
from maclaurin.bench import peers
from maclaurin.bench.measure_case import judged, measure_call, measure_step, reason_of
from maclaurin.bench.peers import Implementation
from maclaurin.testing import cases as tensor_cases

RIGHT = tensor_cases.attention


def outputs_times(factor, only=lambda options: True):
    """The library with its outputs changed."""

    def attend(*arguments, **options):
        found = RIGHT(*arguments, **options)
        if not only(options):
            return found
        return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor

    return attend


def test_a_right_result_gets_its_numbers():
    case = tiny_case(peers=("sdpa",))
    record = measure_call(tiny_case(spec="exp/sum", peers=("parallel", "chunk_linear_attn")), SETTING)
    assert record.status == "measured"
    assert (record.form, record.backend) == ("parallel", "sdpa")
    assert 0 < record.own.error < 1e-5
    assert record.own.forward_ms > 0
    assert record.own.forward_backward_ms > 0
    assert record.own.samples >= 3
    assert record.own.first_call_s > 0
    assert record.own.peak_bytes is None, "there is no allocator to ask on a CPU"
    assert record.peers["parallel"].forward_ms > 0
    missing = record.peers["chunk_linear_attn"]
    assert missing.forward_ms is None
    assert missing.note.startswith("cannot be imported here")
    assert judged(measure_call(case, SETTING), case, SETTING).reached is None, "targets are for a GPU"


@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_wrong_result_is_not_timed(monkeypatch, factor):
    monkeypatch.setattr(tensor_cases, "attention", outputs_times(factor))
    record = measure_call(tiny_case(peers=("parallel",)), SETTING)
    assert record.status == "wrong"
    assert record.own.note.startswith("wrong (error ")
    for figures in (record.own, *record.peers.values()):
        assert (figures.forward_ms, figures.forward_backward_ms, figures.first_call_s) == (None,) * 3


def test_packed_texts_are_measured_beside_equal_rows_and_checked_one_by_one(monkeypatch):
    case = tiny_case(spec="taylor(2)/sum", kind="packed", peers=("equal_rows",))
    record = measure_call(case, SETTING)
    assert record.status == "measured"
    assert 0 < record.own.error < 1e-5
    assert record.peers["equal_rows"].forward_backward_ms > 0
    wrong = outputs_times(1.001, only=lambda options: "cu_seqlens" in options)
    monkeypatch.setattr(tensor_cases, "attention", wrong)
    assert measure_call(case, SETTING).status == "wrong"


def test_non_finite_gradients_at_full_length_are_rejected(monkeypatch):
    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, u):
            return u.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * math.nan if grad.shape[1] > 16 else grad

    def attend(q, **options):
        return RIGHT(Spoiled.apply(q), **options)

    monkeypatch.setattr(tensor_cases, "attention", attend)
    monkeypatch.setattr(measure, "PIECE_TOKENS", (16,))
    record = measure_call(tiny_case(), SETTING)
    assert record.status == "wrong"
    assert "of gradients" in record.own.note


def test_a_case_that_cannot_run_says_why_and_what_was_planned(monkeypatch):
    def attend(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB\nand more")

    monkeypatch.setattr(tensor_cases, "attention", attend)
    record = measure_call(tiny_case(), SETTING)
    assert (record.status, record.own.note, record.backend) == ("failed", "out of memory", "sdpa")


def test_a_piece_that_takes_another_program_is_no_check(monkeypatch):
    known = measure.plan

    def plan(q, *arguments, **options):
        found = known(q, *arguments, **options)
        if q.shape[1] == 24 and q.shape[0] == 2 and q.requires_grad:
            return found
        return known(q, q, q, "exp(clamp=5)/len", form="parallel")

    monkeypatch.setattr(measure, "plan", plan)
    record = measure_call(tiny_case(), SETTING)
    assert record.status == "failed"
    assert "runs on sdpa like the full case, so its gradients cannot be checked" in record.own.note


def test_wrong_peer_is_reported_and_not_timed(monkeypatch):
    def wrong(case):
        return Implementation("wrong", lambda: case.output() * 2, tuple(case.tensors.values()), case.spec)

    def failing(case):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setitem(peers._MAKERS, "sdpa", wrong)
    monkeypatch.setitem(peers._MAKERS, "flex", failing)
    record = measure_call(tiny_case(peers=("sdpa", "flex", "parallel")), SETTING)
    assert record.status == "measured"
    assert record.peers["sdpa"].note == "wrong (error 1.0e+00)"
    assert record.peers["sdpa"].forward_ms is None
    assert record.peers["flex"].note == "RuntimeError: no kernel"
    assert record.peers["parallel"].forward_ms > 0


def test_a_peer_with_an_answer_of_its_own_is_timed_and_said_to_be_unchecked(monkeypatch):
    def other(case):
        return Implementation("other", lambda: case.output() * 2, tuple(case.tensors.values()), None)

    monkeypatch.setitem(peers._MAKERS, "power_retention", other)
    figures = measure_call(tiny_case(peers=("power_retention",)), SETTING).peers["power_retention"]
    assert figures.error is None
    assert figures.forward_ms > 0
    assert "not checked" in figures.note


@pytest.mark.parametrize("form", ["auto", "chunked", "recurrent"])
def test_every_form_of_a_polynomial(form):
    record = measure_call(tiny_case(spec="taylor(2)/sum", form=form), SETTING)
    assert record.status == "measured"
    assert record.form in (("parallel",) if form == "auto" else (form,))


# ------------------------------------------------------------------------------------------- steps


def test_a_step_is_timed_against_a_copy():
    record = measure_step(tiny_step(), SETTING, ROOFS)
    assert record.status == "measured"
    numbers = 2 * 2 * (45 * 9) * 4  # sequences, heads, features × columns, bytes
    assert record.state_traffic == 2 * (numbers + 2 * 8)
    assert record.own.forward_ms > 0
    rate = record.state_traffic / (1e-3 * record.own.forward_ms)
    assert record.share_of_copy == pytest.approx(rate / ROOFS.copy_bytes_per_s)


def test_a_wrong_step_gets_no_number(monkeypatch):
    monkeypatch.setattr(tensor_cases, "attention", outputs_times(1.001))
    record = measure_step(tiny_step(), SETTING, ROOFS)
    assert (record.status, record.own.forward_ms, record.share_of_copy) == ("wrong", None, None)


def test_a_step_that_returns_a_wrong_state_gets_no_number(monkeypatch):
    def attend(*arguments, **options):
        y, state = RIGHT(*arguments, **options)
        return y, state.map(lambda t: t * 2 if t.is_floating_point() else t) if options.get(
            "state"
        ) else state

    monkeypatch.setattr(tensor_cases, "attention", attend)
    record = measure_step(tiny_step(spec="linear(identity)"), SETTING, ROOFS)
    assert record.status == "wrong"


def test_a_reason_names_files_without_their_folders():
    """Records are committed and read elsewhere."""
    problem = RuntimeError("cannot clone to /home/someone/peers/cutlass: 1/2 done\nand more")
    assert reason_of(problem) == "RuntimeError: cannot clone to cutlass: 1/2 done"
