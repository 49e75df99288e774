"""A run's key, and records on disk: what is written is read, half-written ones are none."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.study.making import make_record, make_run, study_record

from maclaurin import InputError
from maclaurin.report.sentences import planned_runs
from maclaurin.study import Alike
from maclaurin.study.pool import Pool
from maclaurin.study.run_record import (
    CellTuning,
    FormsRecord,
    RunRecord,
    StudyRecord,
    Trial,
    Tuning,
    by_position,
    read_run,
    read_study,
    thinned,
    write_run,
    write_study,
)

# ------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "free", [{"keep": 9}, {"trackers": ["tensorboard"]}, {"checkpoint_every": 7}, {"log_every": 3}]
)
def test_keys_that_change_no_number_are_left_out(free):
    assert make_run(**free).key == make_run().key


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 2e-3}, {"seed": 1}, {"steps": 401}, {"attention": ["exp/l2"]}, {"device": "cuda"},
        {"data": "other"}, {"torch": "2.11"}, {"numerics": 2}, {"parts": "x"},
    ],
)  # fmt: skip
def test_what_changes_numbers_changes_the_key(change):
    assert make_run(**change).key != make_run().key


# ------------------------------------------------------------------------------------- files

numbers = st.floats(allow_nan=False, allow_infinity=False)
points = st.lists(st.tuples(st.integers(0, 9), numbers), max_size=3).map(tuple)
records = st.builds(
    RunRecord,
    run=st.builds(make_run, seed=st.integers(0, 9), lr=numbers),
    status=st.sampled_from(["finished", "diverged", "crashed", "stopped", "waiting", "running"]),
    message=st.none() | st.text(max_size=9),
    step=st.integers(0, 99),
    order=st.none() | st.integers(0, 10),
    state_bytes=st.none() | st.integers(0, 10**9),
    metrics=st.dictionaries(st.sampled_from(["loss", "accuracy"]), numbers),
    curves=st.dictionaries(st.sampled_from(["train_loss", "loss"]), points),
    loss_by_position=st.lists(st.tuples(st.integers(0, 9), st.none() | numbers), max_size=3).map(tuple),
    seconds=st.none() | numbers,
    provenance=st.just({"commit": None, "machine": {"gpu": None}}),
)


@given(records)
@pytest.mark.slow
def test_a_run_is_read_as_it_was_written(tmp_path_factory, record):
    file = tmp_path_factory.mktemp("run") / "record.json"
    write_run(record, file)
    assert read_run(file) == record


@given(st.lists(records, min_size=1, max_size=3), st.booleans())
@pytest.mark.slow
def test_a_study_is_read_as_it_was_written(tmp_path_factory, found, with_forms):
    folder = tmp_path_factory.mktemp("study")
    claim = Alike(says="s", experiment="e", cells=("a", "b"), within=0.1, because="r")
    forms = FormsRecord(agreement=({"spec": "exp/sum", "form": "chunked", "error": 1e-16},), series=())
    trial = Trial(rate=0.1, seed=1000, value=None, status="diverged", key="k", seconds=1.0, tokens=3)
    tuning = Tuning(
        metric="validation_loss",
        source="here",
        cells={"a": CellTuning(rate=0.1, trials=(trial,), subject="x")},
    )
    study = study_record({"a": dict(enumerate(found))})
    study = dataclasses.replace(
        study,
        claims=(claim,),
        forms=forms if with_forms else None,
        experiments=(dataclasses.replace(study.experiments[0], tuning=tuning),),
    )
    write_study(study, folder / "records.json")
    assert read_study(folder) == study


def test_labels_lead_to_runs_and_two_cells_may_share_one():
    shared = make_record(metrics={"loss": 1.0})
    study = study_record({"a": {0: shared}, "b": {0: shared}})
    assert len(study.runs) == 1
    assert [str(label) for label, _ in study.labelled()] == ["e · a · seed 0", "e · b · seed 0"]
    assert [str(label) for label, _ in study.having("finished")] == ["e · a · seed 0"]
    assert planned_runs(study) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "no schema number"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1}', "has schema 1, but"),
        ('{"schema": 2, "name": "x"}', "does not have the form"),
    ],
)
def test_a_file_that_is_no_study_is_one_clear_error(tmp_path, text, words):
    (tmp_path / "records.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_study(tmp_path)


@pytest.mark.slow
def test_shipped_records_are_readable():
    from pathlib import Path

    root = Path(__file__).parents[3] / "studies"
    for name, runs in (
        ("mini", 54),
        ("scale", 60),
        ("gap", 405),
        ("interactions", 120),
        ("orders", 95),
        ("parts", 99),
        ("recall", 57),
        ("paper_h200", 51),
        ("parts_h200", 65),
        ("ladder_h200", 63),
    ):
        study = read_study(root / name)
        assert isinstance(study, StudyRecord)
        assert len(list(study.labelled())) == runs
    shared = read_study(root / "gap")
    assert len(list(shared.labelled())) == 3 * len(shared.runs)  # experiments on one set of runs


# ------------------------------------------------------------------------------------- the pool


def test_a_damaged_result_is_none(tmp_path):
    entry = Pool(tmp_path).entry("k")
    assert entry.record() is None
    entry.write(make_record())
    assert entry.record() == make_record()
    entry.record_file.write_text(entry.record_file.read_text()[:40])
    assert entry.record() is None


def test_a_crashed_run_resumes_and_a_diverged_one_begins_anew(tmp_path):
    for status, resumes in (("crashed", True), ("diverged", False)):
        entry = Pool(tmp_path).entry(status)
        entry.write(make_record(status))
        (entry.path / "checkpoints").mkdir()
        entry.forget()
        assert entry.record() is None
        assert (entry.path / "checkpoints").exists() == resumes


def test_only_a_process_that_sees_the_pool_can_read_its_marker(tmp_path):
    pool = Pool(tmp_path / "pool")
    marker = pool.marker()
    assert pool.marker() == marker
    assert Pool(tmp_path / "pool").has_marker(marker)
    assert not Pool(tmp_path / "elsewhere").has_marker(marker)
    assert not pool.has_marker(None)


# ------------------------------------------------------------------------------------- curves

values = st.lists(st.floats(-1e6, 1e6), max_size=500)


@given(values, st.integers(1, 300))
def test_thinning_keeps_the_end_and_the_range(ys, most):
    given_points = [(i + 1, y) for i, y in enumerate(ys)]
    short = thinned(given_points, most)
    assert len(short) == min(most, len(given_points))
    assert [x for x, _ in short] == sorted({x for x, _ in short})
    if given_points:
        assert short[-1][0] == given_points[-1][0]
        slack = 1e-5 * (1 + max(map(abs, ys)))
        assert all(min(ys) - slack <= y <= max(ys) + slack for _, y in short)


def test_values_that_are_not_finite_are_left_out():
    assert thinned([(1, 2.0), (2, math.nan), (3, math.inf)], 9) == ((1, 2.0),)


def test_positions_that_nothing_is_scored_at_are_gaps_and_not_zeros():
    assert by_position([None, 2.0, None, 4.0]) == ((0, None), (1, 2.0), (2, None), (3, 4.0))
    long = by_position([None, 3.0] * 64)  # two positions per stretch, one of them scored
    assert len(long) == 64
    assert {value for _, value in long} == {3.0}
    assert by_position([None] * 6) == tuple((i, None) for i in range(6))
