"""Claims held against runs."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.report.synthetic import experiment, study

from maclaurin.report.outcome import Outcome
from maclaurin.report.verdict import AGREES, DISAGREES, NOT_RUN, UNDECIDED, judge
from maclaurin.study import Alike, Behind, Ordered

WORDS = {"says": "so", "experiment": "lm"}


def outcomes(values, **options):
    made = experiment(values, **options)
    return {made[0].name: Outcome(study(made), made[0])}


def verdict(claim, values, *others, **options):
    """The judgement of a claim on a page where `others` stand too."""
    found = outcomes(values, **options)
    return judge([(claim, found), *((other, found) for other in others)])[0]


def alike(*cells, within=0.05):
    return Alike(cells=cells, within=within, because="test", **WORDS)


def behind(*cells):
    return Behind(cells=cells, **WORDS)


def ordered(*cells):
    return Ordered(cells=cells, **WORDS)


#: paired noise of about 0.003 around means of a 1.0, b 1.01, c 2.0, d 3.0
TABLE = {
    "a": [1.000, 1.210, 0.890],
    "b": [1.012, 1.217, 0.901],
    "c": [2.003, 2.208, 1.892],
    "d": [3.001, 3.213, 2.889],
}


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        (alike("a", "b"), AGREES),
        (alike("a", "c"), DISAGREES),
        (alike("a", "b", "c"), DISAGREES),
        (alike("a", "b", within=0.011), UNDECIDED),
        (alike("a", "c", within=1.0), UNDECIDED),
        (behind("a", "c", "d"), AGREES),
        (behind("c", "a"), DISAGREES),
        (behind("c", "d", "a"), DISAGREES),
        (ordered("d", "c", "a"), AGREES),
        (ordered("a", "c", "d"), DISAGREES),
    ],
)
def test_verdicts(claim, expected):
    assert verdict(claim, TABLE).verdict == expected


def test_an_interval_around_zero_is_no_proof_of_likeness():
    """What was called a tie before: wide intervals that contain zero."""
    noisy = {"a": [1.0, 1.2, 0.8], "b": [1.1, 1.0, 0.9]}
    found = verdict(alike("a", "b"), noisy)
    assert found.verdict == UNDECIDED
    assert "undecided: b" in found.notes


def test_an_order_says_which_neighbours_are_undecided():
    close = {**TABLE, "e": [1.03, 1.20, 0.86]}
    found = verdict(ordered("d", "a", "e"), close)
    assert found.verdict == UNDECIDED
    assert "undecided: a → e (1 of 2 comparisons)" in found.notes
    means, _, differences = found.ours.partition("; difference to the one before: ")
    assert means == "d 3.034 ± 0.165 → a 1.033 ± 0.163 → e 1.030 ± 0.170"
    assert differences.startswith("a −2.001 [−2.006, −1.996], e −0.003 [")


def test_a_claim_that_is_contradicted_lists_what_is_undecided_too():
    close = {**TABLE, "e": [1.03, 1.20, 0.86]}
    found = verdict(ordered("c", "d", "a", "e"), close)
    assert found.verdict == DISAGREES
    assert "contradicted by c → d" in found.notes
    assert "undecided: a → e (1 of 3 comparisons)" in found.notes


def test_a_claim_holds_only_if_every_pair_does():
    close = {**TABLE, "e": [1.03, 1.20, 0.86]}
    assert verdict(behind("a", "c", "e"), close).verdict == UNDECIDED
    assert verdict(behind("a", "c"), close).verdict == AGREES


def test_more_claims_on_a_page_ask_for_more():
    slight = {"a": [1.00, 1.21, 0.89], "b": [1.06, 1.29, 0.98]}
    assert verdict(behind("a", "b"), slight).verdict == AGREES
    found = verdict(behind("a", "b"), slight, *[alike("a", "b", within=0.02)] * 9)
    assert found.verdict == UNDECIDED
    assert "every comparison is decided alone, but not after correction for 10 claims" in found.notes


def test_a_contradiction_that_does_not_survive_the_correction_is_named():
    """The page said "undecided" without a reason, beside an interval that is clearly outside the margin."""
    slight = {"a": [1.00, 1.21, 0.89], "b": [1.06, 1.29, 0.98]}
    found = verdict(behind("b", "a"), slight, *[alike("a", "b", within=0.02)] * 9)
    assert found.verdict == UNDECIDED
    assert found.notes == ("contradicted by a alone, but not after correction for 10 claims",)


def test_a_claim_without_data_counts_in_the_correction():
    slight = {"a": [1.00, 1.21, 0.89], "b": [1.06, 1.29, 0.98]}
    absent = Behind(says="x", experiment="elsewhere", cells=("a", "b"))
    alone, beside = verdict(behind("a", "b"), slight), verdict(behind("a", "b"), slight, *[absent] * 9)
    assert beside.p == pytest.approx(10 * alone.p)


def test_higher_accuracies_are_better_and_compared_by_log_odds():
    values = {name: [1 - v / 4 for v in row] for name, row in TABLE.items()}
    assert verdict(behind("a", "c"), values, metric="accuracy").verdict == AGREES
    assert verdict(ordered("d", "c", "a"), values, metric="accuracy").verdict == AGREES
    assert verdict(ordered("a", "d"), values, metric="accuracy").verdict == DISAGREES
    assert "log-odds" in verdict(behind("a", "c"), values, metric="accuracy").ours
    near = {"a": [0.990, 0.992, 0.991], "b": [0.991, 0.992, 0.9905]}
    assert verdict(alike("a", "b", within=0.005), near, metric="accuracy").verdict == AGREES
    assert verdict(alike("a", "b", within=0.0005), near, metric="accuracy").verdict == UNDECIDED


def test_likeness_to_a_reference_that_is_always_right_is_judged_on_the_scale_of_the_differences():
    """The margin was clipped at 1e-9 and the differences at half an answer: 0.27 was like 1.0."""
    values = {"a": [1.0, 1.0, 1.0], "b": [0.26, 0.27, 0.28], "c": [0.999, 1.0, 0.9995], "d": [1.0] * 3}
    near = alike("a", "b", within=0.02)
    assert verdict(near, values, metric="accuracy").verdict == DISAGREES
    assert verdict(alike("a", "c", within=0.02), values, metric="accuracy").verdict == AGREES
    assert verdict(alike("a", "d", within=0.02), values, metric="accuracy").verdict == AGREES
    wrong = {name: [1 - v for v in row] for name, row in values.items()}
    assert verdict(near, wrong, metric="accuracy").verdict == DISAGREES
    assert verdict(alike("a", "d", within=0.02), wrong, metric="accuracy").verdict == AGREES


def test_one_seed_concludes_nothing():
    found = verdict(behind("a", "d"), {"a": [1.0], "d": [9.0]})
    assert found.verdict == UNDECIDED
    assert "one seed for d: no interval, so no conclusion" in found.notes


def test_cells_without_results_were_not_run():
    values = {**TABLE, "e": [None, None, None]}
    assert verdict(behind("a", "c", "e"), values).verdict == NOT_RUN
    assert verdict(behind("e", "a"), values).verdict == NOT_RUN
    assert verdict(behind("c", "a", "e"), values).verdict == DISAGREES
    assert "e has no finished run" in verdict(behind("a", "e"), values).notes


def test_an_experiment_that_is_not_there_was_not_run():
    found = judge([(alike("a", "b"), outcomes(TABLE, name="other"))])[0]
    assert (found.verdict, found.p) == (NOT_RUN, None)


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
    assert verdict(alike("a", "e"), values, **options).verdict == DISAGREES
    assert verdict(ordered("e", "a"), values, **options).verdict == AGREES
    assert verdict(ordered("a", "e"), values, **options).verdict == DISAGREES


def test_a_diverged_cell_is_not_like_a_reference_at_either_end():
    values = {"a": [0.01, 0.011, 0.009], "b": [None] * 3}
    options = {"metric": "accuracy", "statuses": all_diverged("b")}
    assert verdict(alike("a", "b"), values, **options).verdict == UNDECIDED
    assert verdict(alike("b", "a"), values, **options).verdict == DISAGREES


def test_one_divergence_spoils_likeness_but_proves_nothing_alone():
    values = {**TABLE, "b": [1.0, None, 0.89], "d": [3.0, None, 2.89]}
    options = {"statuses": {("b", 1): "diverged", ("d", 1): "diverged"}}
    assert verdict(alike("a", "b"), values, **options).verdict == UNDECIDED
    assert verdict(behind("a", "b"), values, **options).verdict == UNDECIDED
    assert verdict(behind("a", "d"), values, **options).verdict == AGREES


def test_two_cells_that_diverged_cannot_be_told_apart():
    values = {**TABLE, "e": [None] * 3, "f": [None] * 3}
    found = verdict(behind("e", "f"), values, statuses=all_diverged("e") | all_diverged("f"))
    assert found.verdict == UNDECIDED


def test_a_crash_is_reported_and_is_no_number():
    values = {**TABLE, "d": [3.001, None, 2.889]}
    found = verdict(behind("a", "d"), values, statuses={("d", 1): "crashed"})
    assert found.verdict == AGREES
    assert "d crashed in 1 of 3 runs" in found.notes


def test_equal_counts_of_answers_make_nothing_certain():
    """With few answers, equal differences are chance; their spread of zero had made them significant."""
    one_more = {"a": [0.95] * 3, "b": [0.925] * 3}
    right = {"a": [1.0] * 3, "b": [1.0] * 3}
    for values, claim in ((one_more, behind("a", "b")), (right, alike("a", "b", within=0.01))):
        record, runs = experiment(values, metric="accuracy")
        few = tuple((at, replace(run, metrics={**run.metrics, "scored_tokens": 40})) for at, run in runs)
        found = judge([(claim, {"lm": Outcome(study((record, few)), record)})])[0]
        assert found.verdict == UNDECIDED


numbers = st.integers(-64, 64).map(lambda n: n / 16)
rows = st.lists(numbers, min_size=3, max_size=3)
tables = st.fixed_dictionaries(dict.fromkeys("abcd", rows))
claims = st.sampled_from([alike("a", "b", "c", within=0.51), behind("a", "b", "c"), ordered("a", "b", "c")])


@given(table=tables, shifts=rows, claim=claims)
@pytest.mark.slow
def test_what_a_seed_adds_to_all_cells_changes_no_verdict(table, shifts, claim):
    moved = {name: [v + shifts[s] for s, v in enumerate(row)] for name, row in table.items()}
    assert verdict(claim, table).verdict == verdict(claim, moved).verdict


@given(table=tables, claim=claims)
def test_the_order_of_the_cells_in_the_experiment_changes_no_verdict(table, claim):
    assert verdict(claim, table).verdict == verdict(claim, dict(reversed(table.items()))).verdict


@given(table=tables)
def test_losses_and_their_negatives_as_accuracies_are_judged_alike(table):
    turned = {name: [-v for v in row] for name, row in table.items()}
    for claim in (behind("a", "b", "c"), ordered("a", "b", "c")):
        found = verdict(claim, turned, metric="accuracy", scale="linear")
        assert verdict(claim, table).verdict == found.verdict


@given(table=tables, claim=claims, factor=st.floats(1.5, 20))
def test_more_noise_never_helps_a_claim(table, claim, factor):
    """The same means with a wider spread: what was undecided stays undecided."""
    means = {name: sum(row) / 3 for name, row in table.items()}
    wider = {name: [means[name] + factor * (v - means[name]) for v in row] for name, row in table.items()}
    if verdict(claim, wider).verdict in (AGREES, DISAGREES):
        assert verdict(claim, table).verdict == verdict(claim, wider).verdict


@given(table=tables, claim=claims)
def test_a_single_seed_never_decides(table, claim):
    assert verdict(claim, {name: row[:1] for name, row in table.items()}).verdict == UNDECIDED


@given(table=tables, claim=claims)
def test_losing_a_cell_never_helps_a_claim(table, claim):
    """A cell that is not there can take a verdict away, and give none but the contradiction of the others."""
    full, part = verdict(claim, table).verdict, verdict(claim, {**table, "c": [None] * 3}).verdict
    assume(full != AGREES)
    assert part != AGREES
