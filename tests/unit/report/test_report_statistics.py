"""The block model against sums done by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.report.distributions import t_quantile
from maclaurin.report.statistics import BlockFit


def values_of(table):
    return {(c, s): v for c, row in table.items() for s, v in enumerate(row) if v is not None}


#: residuals by hand: cells 1, 3, 5 and seeds −0.5, 0.5 plus (0, 0), (+0.1, −0.1), (−0.1, +0.1)
TABLE = {"a": [0.5, 1.5], "b": [2.6, 3.4], "c": [4.4, 5.6]}


def test_pooled_noise_by_hand():
    fit = BlockFit(values_of(TABLE))
    assert fit.df == 2
    assert fit.sigma == pytest.approx(math.sqrt(0.04 / 2))
    assert fit.restless == frozenset()


def test_mean_and_difference_by_hand():
    fit = BlockFit(values_of(TABLE))
    t, sigma = t_quantile(0.975, 2), math.sqrt(0.02)
    mean, difference = fit.mean("b"), fit.difference("b", "a")
    assert mean.value == pytest.approx(3.0)
    assert mean.high - mean.value == pytest.approx(t * sigma / math.sqrt(2))
    assert difference.value == pytest.approx(2.0)
    assert difference.value - difference.low == pytest.approx(t * sigma)
    assert (mean.n, difference.n) == (2, 2)


def test_a_missing_run_is_made_good_by_its_seed():
    """Without noise, the mean of a cell that lacks a seed is the mean it would have had."""
    table = {"a": [1.0, 2.0, 3.0], "b": [2.0, 3.0, 4.0], "c": [5.0, None, 7.0]}
    fit = BlockFit(values_of(table))
    assert fit.df == 8 - 5
    assert fit.mean("c").value == pytest.approx(6.0)
    assert fit.difference("c", "a").value == pytest.approx(4.0)
    assert fit.mean("c").half_width > fit.mean("a").half_width


def test_one_seed_gives_numbers_and_no_interval():
    fit = BlockFit(values_of({"a": [1.0], "b": [2.0]}))
    assert fit.sigma is None
    assert (fit.mean("a").value, fit.mean("a").low) == (1.0, None)
    assert (fit.difference("b", "a").value, fit.difference("b", "a").high) == (1.0, None)


def test_one_seed_of_a_cell_gives_no_interval_though_others_have_two():
    fit = BlockFit(values_of({"a": [1.0, 1.1], "b": [2.0, 2.3], "c": [3.0, None]}))
    assert fit.mean("a").has_interval
    assert not fit.mean("c").has_interval
    assert not fit.difference("c", "a").has_interval


def test_cells_that_share_no_seed_and_no_neighbour_cannot_be_compared():
    fit = BlockFit(values_of({"a": [1.0, 1.2, None, None], "b": [None, None, 2.0, 2.1]}))
    assert fit.difference("a", "b") is None
    assert fit.mean("a").value == pytest.approx(1.1)


def test_a_cell_that_jumps_about_does_not_hide_in_the_pool():
    rng = np.random.default_rng(0)
    table = {f"c{i}": list(i + rng.normal(0, 0.01, 3)) for i in range(8)}
    table["wild"] = [3.0, 4.5, 2.0]
    fit = BlockFit(values_of(table))
    assert fit.restless == {"wild"}
    assert fit.sigma < 0.02
    own = np.array(table["wild"]) - np.array(table["c0"])
    expected = t_quantile(0.975, 2) * own.std(ddof=1) / math.sqrt(3)
    assert fit.difference("wild", "c0").half_width == pytest.approx(expected)
    assert fit.mean("wild").half_width > 1


def test_steady_cells_are_seldom_called_restless():
    rng = np.random.default_rng(1)
    calls = sum(
        bool(BlockFit(values_of({str(c): rng.normal(0, 1, 3) for c in range(8)})).restless)
        for _ in range(200)
    )
    assert calls <= 8


def test_intervals_hold_what_they_say():
    """95 % intervals of a difference hold the truth in 95 % of 800 made-up experiments."""
    rng, held = np.random.default_rng(2), 0
    for _ in range(800):
        seeds = rng.normal(0, 5, 2)
        table = {
            c: list(m + seeds + rng.normal(0, 0.3, 2))
            for c, m in (("a", 0.0), ("b", 1.0), ("c", 1.0), ("d", 2.0))
        }
        difference = BlockFit(values_of(table)).difference("b", "a")
        held += difference.low <= 1.0 <= difference.high
    assert 0.93 <= held / 800 <= 0.97


numbers = st.integers(-400, 400).map(lambda n: n / 64)


@st.composite
def tables(draw, missing=False):
    cells, seeds = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    entry = st.one_of(numbers, st.none()) if missing else numbers
    return {f"c{i}": draw(st.lists(entry, min_size=seeds, max_size=seeds)) for i in range(cells)}


@given(table=tables(), shifts=st.lists(numbers, min_size=4, max_size=4))
def test_what_a_seed_adds_to_all_cells_changes_no_difference(table, shifts):
    before = BlockFit(values_of(table))
    moved = {c: [v + shifts[s] for s, v in enumerate(row)] for c, row in table.items()}
    after = BlockFit(values_of(moved))
    for cell in table:
        one, two = before.difference(cell, "c0"), after.difference(cell, "c0")
        assert two.value == pytest.approx(one.value, abs=1e-7)
        assert two.low == one.low if one.low is None else two.low == pytest.approx(one.low, abs=1e-6)


@given(table=tables())
def test_complete_designs_give_plain_means(table):
    fit = BlockFit(values_of(table))
    for cell, row in table.items():
        assert fit.mean(cell).value == pytest.approx(np.mean(row), abs=1e-9)
        assert fit.difference(cell, "c0").value == pytest.approx(
            np.mean(row) - np.mean(table["c0"]), abs=1e-9
        )


@given(table=tables(missing=True))
def test_differences_turn_around_and_never_fail(table):
    fit = BlockFit(values_of(table))
    for cell in fit.cells:
        there, back = fit.difference(cell, fit.cells[0]), fit.difference(fit.cells[0], cell)
        assert (there is None) == (back is None)
        if there is not None:
            assert there.value == pytest.approx(-back.value, abs=1e-7)
            assert there.n == back.n
