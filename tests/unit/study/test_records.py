"""Records on disk: what is written is read, half-written ones are none."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from maclaurin.study import Tied
from maclaurin.study.pool import Pool
from maclaurin.study.record import (
    ExperimentRecord,
    FormsRecord,
    RunRecord,
    StudyRecord,
    read_study,
    run_from_json,
    run_to_json,
    write_study,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
runs = st.builds(
    RunRecord,
    key=st.text("0123456789abcdef", min_size=4, max_size=8),
    experiment=st.just("e"),
    cell=st.text(max_size=5),
    levels=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    seed=st.integers(0, 9),
    attention=st.tuples(st.just("exp/sum")),
    order=st.none() | st.integers(0, 10),
    state_bytes=st.none() | st.integers(0, 10**9),
    status=st.sampled_from(["finished", "diverged", "crashed", "stopped", "waiting"]),
    message=st.none() | st.text(max_size=9),
    steps=st.integers(1, 99),
    test_loss=st.none() | numbers,
    test_curve=st.lists(st.tuples(st.integers(0, 9), numbers, numbers), max_size=3).map(tuple),
    train_curve=st.lists(st.tuples(st.integers(0, 9), numbers), max_size=3).map(tuple),
    loss_by_position=st.just(()),
    config=st.just({"attention": ["exp/sum"], "lr": 0.1}),
    provenance=st.just({"commit": None}),
)


@given(runs)
def test_a_run_is_read_as_it_was_written(run):
    assert run_from_json(run_to_json(run)) == run


@given(st.lists(runs, max_size=3), st.booleans())
def test_a_study_is_read_as_it_was_written(tmp_path_factory, found, with_forms):
    folder = tmp_path_factory.mktemp("study")
    claim = Tied(says="s", source="p", paper="n", experiment="e", cells=("a", "b"), within=0.1)
    forms = FormsRecord(agreement=({"spec": "exp/sum", "form": "chunked", "error": 1e-16},), series=())
    record = StudyRecord(
        name="n", title="t", question="q", budget="b", scale=0.5,
        experiments=(
            ExperimentRecord(
                name="e", title="t", metric="accuracy", baseline="a", cells=("a", "b"), seeds=(0, 1), axes=()
            ),
        ),
        claims=(claim,), runs=tuple(found), forms=forms if with_forms else None,
    )  # fmt: skip
    write_study(record, folder / "records.json")
    assert read_study(folder) == record


def one(status):
    return RunRecord(
        key="k", experiment="e", cell="c", levels={}, seed=0, attention=("exp/sum",), order=None,
        state_bytes=None, status=status, steps=3, config={}, provenance={},
    )  # fmt: skip


def test_a_damaged_result_is_none(tmp_path):
    entry = Pool(tmp_path).entry("k")
    assert entry.record() is None
    entry.write(one("finished"))
    assert entry.record() == one("finished")
    entry.record_file.write_text(entry.record_file.read_text()[:40])
    assert entry.record() is None


def test_a_crashed_run_is_taken_up_again_and_a_diverged_one_begins_anew(tmp_path):
    for status, goes_on in (("crashed", True), ("diverged", False)):
        entry = Pool(tmp_path).entry(status)
        entry.write(one(status))
        (entry.path / "checkpoints").mkdir()
        entry.forget()
        assert entry.record() is None
        assert (entry.path / "checkpoints").exists() == goes_on


def test_only_who_sees_the_pool_can_read_its_marker(tmp_path):
    pool = Pool(tmp_path / "pool")
    marker = pool.marker()
    assert pool.marker() == marker
    assert Pool(tmp_path / "pool").is_marked(marker)
    assert not Pool(tmp_path / "elsewhere").is_marked(marker)
    assert not pool.is_marked(None)


def test_a_record_says_all_its_fields():
    assert set(run_to_json(one("waiting"))) == {field.name for field in dataclasses.fields(RunRecord)}
