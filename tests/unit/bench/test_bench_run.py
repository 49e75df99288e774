"""A run keeps what it measured, whatever happens."""

import dataclasses
import json

import pytest
from tests.unit.bench.tiny import ROOFS, SETTING, tiny_case, tiny_step

from maclaurin.bench import bench_run as running
from maclaurin.bench.bench_record import read_bench
from maclaurin.bench.bench_run import BenchRun
from maclaurin.errors import InputError

CASES = [tiny_case("exp/sum"), tiny_case("exp/l2"), tiny_step()]
NAMES = [case.name for case in CASES]


@pytest.fixture(autouse=True)
def _known_roofs(monkeypatch):
    monkeypatch.setattr(running, "measure_roofs", lambda *arguments: ROOFS)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "results" / "bench.json"


def test_every_case_is_in_the_file_with_what_it_was_measured_on(out):
    ending = BenchRun(CASES, SETTING, out, resume=False).run(None)
    bench = read_bench(out)
    assert bench == ending.record
    assert [case.name for case in bench.cases] == NAMES
    assert {case.status for case in bench.cases} == {"measured"}
    assert bench.roofs == ROOFS
    assert bench.made["commit"]
    assert bench.made["versions"]["torch"]
    assert len(bench.made["code"]) == 64
    assert all(case.date and case.seconds > 0 for case in bench.cases)
    data = json.loads(out.read_text())["cases"][0]
    assert {"spec", "form", "size", "dtype", "backend", "own", "peers", "verdicts", "reached"} <= set(data)


def test_a_case_that_fails_stops_no_other(out, monkeypatch):
    known = running.measure_call

    def measure(case, setting, left_out):
        if case.spec == "exp/sum":
            raise RuntimeError("a kernel that does not compile\nwith many lines")
        return known(case, setting)

    monkeypatch.setattr(running, "measure_call", measure)
    bench = BenchRun(CASES, SETTING, out, resume=False).run(None).record
    assert [case.status for case in bench.cases] == ["failed", "measured", "measured"]
    assert bench.cases[0].own.note == "RuntimeError: a kernel that does not compile"


def test_interrupted_it_has_lost_nothing_and_goes_on(out, monkeypatch):
    known, measured = running.measure_call, []

    def measure(case, setting, left_out):
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(case.name)
        return known(case, setting)

    monkeypatch.setattr(running, "measure_call", measure)
    with pytest.raises(KeyboardInterrupt):
        BenchRun(CASES, SETTING, out, resume=False).run(None)
    first = read_bench(out)
    assert [case.name for case in first.cases] == NAMES[:1]
    monkeypatch.setattr(running, "measure_call", known)
    again = BenchRun(CASES, SETTING, out, resume=True)
    assert any("1 case of this machine" in line for line in again.notes)
    bench = again.run(None).record
    assert [case.name for case in bench.cases] == NAMES
    assert bench.cases[0] == first.cases[0]


def test_measured_again_a_case_is_replaced_and_the_others_stay(out):
    first = BenchRun(CASES, SETTING, out, resume=False).run(None).record
    second = BenchRun(CASES[:1], SETTING, out, resume=False).run(None).record
    assert sorted(case.name for case in second.cases) == sorted(NAMES)
    assert second.case_named(NAMES[1]) == first.case_named(NAMES[1])
    assert second.case_named(NAMES[0]) != first.case_named(NAMES[0])


def test_cases_of_another_code_are_not_kept(out, monkeypatch):
    BenchRun(CASES[:1], SETTING, out, resume=False).run(None)
    known = running.provenance()
    monkeypatch.setattr(running, "provenance", lambda packages: {**known, "code": "another"})
    again = BenchRun(CASES[1:2], SETTING, out, resume=True)
    assert any("from another machine, code or shape" in line for line in again.notes)
    assert [case.name for case in again.run(None).record.cases] == NAMES[1:2]


def test_once_the_time_is_spent_no_case_begins(out):
    bench = BenchRun(CASES, SETTING, out, resume=False).run(0.0).record
    assert bench.cases == ()
    assert list(read_bench(out).left_out) == NAMES


def test_a_gpu_that_does_not_answer_ends_the_run(out, monkeypatch):
    def wait(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(running, "measure_call", lambda case, setting, _: running.blank_record(case, setting))
    monkeypatch.setattr(type(SETTING), "wait", wait)
    ending = BenchRun(CASES, SETTING, out, resume=False).run(None)
    assert "illegal memory access" in ending.trouble
    assert [case.name for case in ending.record.cases] == NAMES[:1]
    assert list(ending.record.left_out) == NAMES[1:]


def test_a_file_of_something_else_is_not_overwritten(out):
    out.parent.mkdir()
    out.write_text('{"figures": []}')
    with pytest.raises(InputError, match=r"is not a benchmark of maclaurin: .*\. Choose another `out`"):
        BenchRun(CASES, SETTING, out, resume=False)
    assert out.read_text() == '{"figures": []}'


def test_the_setting_names_itself():
    assert SETTING.dtype_name == "float32"
    assert SETTING.gpu is None
    assert dataclasses.replace(SETTING, full_shapes=True).allowed_error == 1e-5
