"""Claims held against runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.report.synthetic import experiment

from maclaurin.report.outcome import Outcome
from maclaurin.report.verdict import AGREES, DISAGREES, NOT_RUN, UNCLEAR, judge
from maclaurin.study.claim import Behind, Ordered, Tied

WORDS = {"says": "so", "source": "here", "paper": "1.0", "experiment": "lm"}


def verdict(claim, values, **options):
    record, runs = experiment(values, **options)
    return judge(claim, {"lm": Outcome(record, runs)})


def tied(*cells, within=0.05):
    return Tied(cells=cells, within=within, **WORDS)


def behind(*cells):
    return Behind(cells=cells, **WORDS)


def ordered(*cells):
    return Ordered(cells=cells, **WORDS)


#: noise of about 0.01 around means of a 1.0, b 1.01, c 2.0, d 3.0
TABLE = {
    "a": [1.00, 1.21, 0.89],
    "b": [1.02, 1.20, 0.91],
    "c": [2.01, 2.20, 1.90],
    "d": [3.00, 3.21, 2.89],
}


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (tied("a", "b"), AGREES),
        (tied("a", "c"), DISAGREES),
        (tied("a", "b", "c"), DISAGREES),
        (tied("a", "c", within=1.0), UNCLEAR),
        (behind("a", "c", "d"), AGREES),
        (behind("c", "a"), DISAGREES),
        (behind("a", "b", "c"), UNCLEAR),
        (ordered("d", "c", "a"), AGREES),
        (ordered("a", "c", "d"), DISAGREES),
        (ordered("b", "a"), UNCLEAR),
    ],
)
def test_verdicts(claim, expected):
    assert verdict(claim, TABLE).verdict == expected


def test_a_step_within_the_noise_is_allowed_and_said():
    found = verdict(ordered("d", "a", "b"), TABLE)
    assert found.verdict == AGREES
    assert found.notes == ("b has the worse mean than a, within the noise",)
    assert found.ours == "d 3.033 → a 1.033 → b 1.043"


def test_a_tie_by_wide_intervals_is_called_weak():
    found = verdict(tied("a", "b", within=0.02), TABLE)
    assert found.verdict == AGREES
    assert "weak: the interval of b reaches beyond ±0.02" in found.notes


def test_higher_accuracies_are_better():
    values = {name: [1 - v / 4 for v in row] for name, row in TABLE.items()}
    assert verdict(behind("a", "c"), values, metric="accuracy").verdict == AGREES
    assert verdict(ordered("d", "c", "a"), values, metric="accuracy").verdict == AGREES
    assert verdict(ordered("a", "d"), values, metric="accuracy").verdict == DISAGREES


def test_one_seed_concludes_nothing():
    found = verdict(behind("a", "d"), {"a": [1.0], "d": [9.0]})
    assert found.verdict == UNCLEAR
    assert "one seed only for d: no interval, so no conclusion" in found.notes


def test_cells_without_results_were_not_run():
    values = {**TABLE, "e": [None, None, None]}
    assert verdict(behind("a", "c", "e"), values).verdict == NOT_RUN
    assert verdict(behind("e", "a"), values).verdict == NOT_RUN
    assert verdict(behind("c", "a", "e"), values).verdict == DISAGREES
    assert "e has no finished run" in verdict(behind("a", "e"), values).notes


def test_an_experiment_that_is_not_there_was_not_run():
    record, runs = experiment(TABLE, name="other")
    assert judge(tied("a", "b"), {"other": Outcome(record, runs)}).verdict == NOT_RUN


def all_diverged(cell):
    return {(cell, seed): "diverged" for seed in range(3)}


def test_a_cell_that_diverged_is_the_worst():
    values = {**TABLE, "e": [None, None, None]}
    options = {"statuses": all_diverged("e")}
    found = verdict(behind("a", "e"), values, **options)
    assert found.verdict == AGREES
    assert "e diverged in 3 of 3 runs, which counts as worst" in found.notes
    assert "e diverged" in found.ours
    assert verdict(behind("e", "a"), values, **options).verdict == DISAGREES
    assert verdict(tied("a", "e"), values, **options).verdict == DISAGREES
    assert verdict(ordered("e", "a"), values, **options).verdict == AGREES
    assert verdict(ordered("a", "e"), values, **options).verdict == DISAGREES


def test_one_divergence_spoils_a_tie_but_proves_nothing_alone():
    values = {**TABLE, "b": [1.01, None, 0.88]}
    options = {"statuses": {("b", 1): "diverged"}}
    assert verdict(tied("a", "b"), values, **options).verdict == UNCLEAR
    assert verdict(behind("a", "b"), values, **options).verdict == UNCLEAR
    values = {**TABLE, "d": [3.0, None, 2.89]}
    assert verdict(behind("a", "d"), values, statuses={("d", 1): "diverged"}).verdict == AGREES


def test_two_cells_that_diverged_cannot_be_told_apart():
    values = {**TABLE, "e": [None] * 3, "f": [None] * 3}
    found = verdict(behind("e", "f"), values, statuses=all_diverged("e") | all_diverged("f"))
    assert found.verdict == UNCLEAR


def test_a_crash_is_said_and_is_no_number():
    values = {**TABLE, "d": [3.0, None, 2.89]}
    found = verdict(behind("a", "d"), values, statuses={("d", 1): "crashed"})
    assert found.verdict == AGREES
    assert "d crashed in 1 of 3 runs" in found.notes


numbers = st.integers(-64, 64).map(lambda n: n / 16)
rows = st.lists(numbers, min_size=3, max_size=3)
claims = st.sampled_from([tied("a", "b", "c", within=0.51), behind("a", "b", "c"), ordered("a", "b", "c")])


@given(table=st.fixed_dictionaries(dict.fromkeys("abcd", rows)), shifts=rows, claim=claims)
def test_what_a_seed_adds_to_all_cells_changes_no_verdict(table, shifts, claim):
    moved = {name: [v + shifts[s] for s, v in enumerate(row)] for name, row in table.items()}
    assert verdict(claim, table).verdict == verdict(claim, moved).verdict


@given(table=st.fixed_dictionaries(dict.fromkeys("abcd", rows)), claim=claims)
def test_the_order_of_the_cells_in_the_experiment_changes_no_verdict(table, claim):
    backwards = dict(reversed(table.items()))
    assert verdict(claim, table).verdict == verdict(claim, backwards).verdict


@given(table=st.fixed_dictionaries(dict.fromkeys("abcd", rows)))
def test_losses_and_their_negatives_as_accuracies_are_judged_alike(table):
    turned = {name: [-v for v in row] for name, row in table.items()}
    for claim in (behind("a", "b", "c"), ordered("a", "b", "c")):
        assert verdict(claim, table).verdict == verdict(claim, turned, metric="accuracy").verdict
