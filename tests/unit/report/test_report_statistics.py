"""Paired differences against scipy and statsmodels, and against what intervals promise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from maclaurin.report.statistics import (
    Difference,
    Spread,
    holm,
    margin_on_scale,
    paired,
    spreads_differ,
    to_scale,
)

numbers = st.integers(-400, 400).map(lambda n: n / 64)
samples = st.lists(numbers, min_size=3, max_size=6)


def by_seed(values):
    return dict(enumerate(values))


@given(samples, st.data())
def test_a_difference_is_the_paired_t_test(first, data):
    second = data.draw(st.lists(numbers, min_size=len(first), max_size=len(first)))
    if np.std(np.subtract(first, second)) < 1e-6:
        return
    found = paired(by_seed(first), by_seed(second))
    test = stats.ttest_rel(first, second)
    assert found.value == pytest.approx(np.mean(np.subtract(first, second)))
    assert found.bounds == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert 2 * min(found.p_above(0), found.p_below(0)) == pytest.approx(test.pvalue, abs=1e-9)


@given(samples, st.data(), st.sampled_from([0.1, 1.0, 5.0]))
def test_equivalence_is_two_one_sided_tests(first, data, margin):
    second = data.draw(st.lists(numbers, min_size=len(first), max_size=len(first)))
    if np.std(np.subtract(first, second)) < 1e-6:
        return
    found = paired(by_seed(first), by_seed(second))
    p, _, _ = ttost_paired(np.array(first), np.array(second), -margin, margin)
    assert max(found.p_above(-margin), found.p_below(margin)) == pytest.approx(p, abs=1e-9)


def test_only_shared_seeds_count():
    assert paired({0: 1.0, 1: 2.0}, {2: 1.0}) is None
    found = paired({0: 1.0, 1: 3.0, 7: 9.0}, {0: 0.5, 1: 2.0, 8: 5.0})
    assert (found.value, found.n, found.df) == (0.75, 2, 1)


def test_one_seed_gives_a_number_and_no_interval():
    found = paired({0: 2.0}, {0: 1.0})
    assert (found.value, found.bounds, found.p_above(0), found.p_below(0)) == (1.0, None, 1.0, 1.0)


def test_runs_that_are_equal_are_surely_alike():
    found = paired({0: 2.5, 1: 2.6, 2: 2.4}, {0: 2.5, 1: 2.6, 2: 2.4})
    assert found.value == 0
    assert found.p_above(-0.01) < 1e-9


def test_a_difference_without_a_bound_is_never_surely_on_the_other_side():
    run_away = Difference(0.5, 0.01, 2, 3, unbounded=1)
    assert run_away.bounds[1] == math.inf
    assert run_away.p_below(1e9) == 1.0
    assert run_away.p_above(0) < 0.001
    assert (-run_away).p_above(-1e9) == 1.0
    assert Difference(math.inf, 0.0, 2, 3, unbounded=1).p_above(1e9) == 0.0


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_intervals_hold_what_they_say_whatever_the_spread_of_the_cell(spread):
    """95 % intervals hold the truth in 95 % of 2,000 made-up experiments."""
    rng, held = np.random.default_rng(2), 0
    for _ in range(2000):
        seeds = rng.normal(0, 5, 3)
        a, b = seeds + rng.normal(0, 0.3, 3), 1 + seeds + rng.normal(0, 0.3 * spread, 3)
        low, high = paired(by_seed(b), by_seed(a)).bounds
        held += low <= 1.0 <= high
    assert 0.94 <= held / 2000 <= 0.96


@given(samples, samples, st.lists(numbers, min_size=6, max_size=6))
def test_what_a_seed_adds_to_both_cells_changes_nothing(first, second, shifts):
    moved = [[v + shifts[s] for s, v in enumerate(row)] for row in (first, second)]
    before, after = paired(by_seed(first), by_seed(second)), paired(*map(by_seed, moved))
    assert after.value == pytest.approx(before.value, abs=1e-9)
    assert after.bounds == pytest.approx(before.bounds, abs=1e-6)


# ------------------------------------------------------------------------------------------ scales


def test_shares_are_compared_by_their_log_odds():
    assert to_scale(0.5, "logit") == 0
    assert to_scale(0.9, "logit") == pytest.approx(math.log(9))
    assert to_scale(1.0, "logit", answers=100) == pytest.approx(math.log(199))
    assert to_scale(0.0, "logit", answers=100) == pytest.approx(-math.log(199))
    assert to_scale(8.0, "log") == pytest.approx(math.log(8))
    assert to_scale(-3.0, "linear") == -3.0


@given(
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0)),
    st.floats(0.001, 0.2),
    st.sampled_from([64, 1000, 10**6]),
)
def test_a_margin_in_points_of_accuracy_is_the_same_margin_in_log_odds(reference, within, answers):
    """A value lies within the margin exactly if its distance to the reference does, also at 0 and 1."""
    low, high = margin_on_scale(reference, within, "logit", answers)
    assert low <= 0 <= high
    assert (low == -math.inf) == (reference - within <= 0)
    assert (high == math.inf) == (reference + within >= 1)
    half = 0.5 / answers
    for value in (0.0, 0.27, 0.5, 0.98, 1.0):
        distance = to_scale(value, "logit", answers) - to_scale(reference, "logit", answers)
        if reference - within > half and value < reference - within - half:
            assert distance < low
        if reference + within < 1 - half and value > reference + within + half:
            assert distance > high
    assert margin_on_scale(reference, within, "linear") == (-within, within)


# ------------------------------------------------------------------------------------------ others


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_that_of_statsmodels(ps):
    assert holm(ps) == (pytest.approx(list(multipletests(ps, method="holm")[1])) if ps else [])


def test_means_come_with_their_standard_deviation():
    assert Spread.of([]) is None
    assert Spread.of([2.0]) == Spread(2.0, None, 1)
    found = Spread.of([1.0, 2.0, 4.0])
    assert (found.mean, found.deviation) == (pytest.approx(7 / 3), pytest.approx(np.std([1, 2, 4], ddof=1)))


def test_different_spreads_are_noticed():
    rng = np.random.default_rng(0)
    assert spreads_differ([rng.normal(0, 1, 20), rng.normal(0, 20, 20)]) < 0.001
    assert spreads_differ([rng.normal(0, 1, 20), rng.normal(0, 1, 20)]) > 0.05
    assert spreads_differ([[1.0], [2.0]]) is None
