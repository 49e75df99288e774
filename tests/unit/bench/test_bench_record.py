"""The file of a benchmark: what is written is read back, and other files are refused."""

import dataclasses
import json
import math

import pytest
from tests.unit.bench.tiny import bench_of, record_of

from maclaurin.bench.bench_record import Figures, Verdict, read_bench, write_bench
from maclaurin.errors import InputError

VERDICTS = (Verdict("a", 1.0, 2.0, True), Verdict("b", None, 1.0, None, "no peer"))


def test_what_is_written_is_read_back(tmp_path):
    case = record_of(peers={"sdpa": Figures("cuDNN SDPA", forward_ms=1.0)}, verdicts=VERDICTS)
    bench = bench_of(case, left_out=("another",))
    file = tmp_path / "folder" / "bench.json"
    write_bench(bench, file)
    assert read_bench(file) == bench
    assert [path.name for path in file.parent.iterdir()] == ["bench.json"]


def test_an_infinite_error_is_null_in_the_file(tmp_path):
    file = tmp_path / "bench.json"
    write_bench(bench_of(record_of(own=Figures("maclaurin", error=math.inf, note="wrong"))), file)
    assert json.loads(file.read_text())["cases"][0]["own"]["error"] is None


@pytest.mark.parametrize(
    ("marks", "reached"),
    [((True, True), True), ((True, None), None), ((None, False), False), ((True, False), False), ((), None)],
)
def test_a_case_reaches_its_targets_if_it_reaches_all(tmp_path, marks, reached):
    case = record_of(verdicts=tuple(Verdict("a", 1.0, 1.0, mark) for mark in marks))
    assert case.reached is reached
    write_bench(bench_of(case), tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text())["cases"][0]["reached"] is reached


def test_a_case_measured_again_takes_the_place_of_its_old_record():
    old, new, other = record_of("a"), record_of("a", tokens=7), record_of("b")
    bench = bench_of(old, other).with_case(new)
    assert bench.cases == (other, new)
    assert bench.case_named("a") is new
    assert bench.case_named("c") is None


def test_records_belong_together_if_machine_code_and_shapes_are_the_same():
    bench = bench_of()
    later = dataclasses.replace(bench, made={**bench.made, "date": "2027-01-01"})
    assert bench.is_of(later)
    assert not bench.is_of(dataclasses.replace(bench, made={**bench.made, "commit": "def"}))
    assert not bench.is_of(dataclasses.replace(bench, full_shapes=False))
    assert not bench.is_of(dataclasses.replace(bench, device="cuda"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is not a benchmark of maclaurin"),
        ("{", "is not a benchmark of maclaurin"),
        ('{"machine": {}, "figures": []}', "is not a benchmark of maclaurin"),
        ('{"schema": 99}', "has schema 99"),
        ('{"schema": 1, "made": {}}', "does not have the form of a benchmark"),
        ('{"schema": 1, "made": {}, "device": "cpu", "full_shapes": true, "roofs": null, "cases": [], '
         '"left_out": [], "colour": 1}', "does not have the form of a benchmark"),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text, words):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_bench(tmp_path / "bench.json")


def test_no_file_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(InputError, match=r"make one with maclaurin bench --out"):
        read_bench(tmp_path / "bench.json")
