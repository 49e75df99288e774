"""Two studies beside each other."""

import pytest
from tests.unit.study.making import make_record, study_record

from maclaurin.study.diff import diff_studies


def one_cell(*records):
    return study_record({"a": {record.run.seed: record for record in records}})


def test_two_studies_are_compared_cell_by_cell():
    before = study_record({"a": {s: make_record(seed=s, metrics={"loss": 1.0 + s}) for s in (0, 1)}})
    after = study_record(
        {
            "a": {0: make_record(seed=0, lr=0.5, metrics={"loss": 2.0})},
            "b": {0: make_record("crashed", seed=0, steps=3)},
        }
    )
    a, b = diff_studies(before, after)
    assert a.before == (1.5, pytest.approx(0.7071, abs=1e-4), 2)
    assert a.after == (2.0, None, 1)
    assert a.changed == ("lr: 0.001 → 0.5",)
    assert (b.before, b.after, b.changed) == (None, None, ())


def test_seeds_that_both_have_are_paired():
    before = one_cell(*(make_record(seed=s, metrics={"loss": 1.0 + s}) for s in (0, 1, 2)))
    after = one_cell(*(make_record(seed=s, metrics={"loss": 1.5 + s}) for s in (1, 2, 3)))
    (found,) = diff_studies(before, after)
    assert found.by_seed == {1: (2.0, 2.5), 2: (3.0, 3.5)}


def test_data_versions_and_divergence_are_differences():
    before = one_cell(make_record(seed=0), make_record(seed=1))
    after = one_cell(
        make_record(seed=0, data="e", torch="2.14", numerics=2), make_record("diverged", seed=1, data="e")
    )
    (found,) = diff_studies(before, after)
    assert found.changed == (
        "data: d → e",
        "torch: 2.13 → 2.14",
        "numerics: 1 → 2",
        "diverged: 0 of 2 → 1 of 2",
    )


def test_a_key_that_is_newer_than_a_record_is_no_difference_by_itself():
    before, after = one_cell(make_record()), one_cell(make_record(lora=False, equal_start=False, test=True))
    assert diff_studies(before, after)[0].changed == ()
    (found,) = diff_studies(before, one_cell(make_record(equal_start=True, lr=0.5)))
    assert found.changed == ("lr: 0.001 → 0.5", "equal_start: not set → True")
