"""Contributions of parts, against all orders of adding them one by one."""

import itertools
import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maclaurin.errors import InputError
from maclaurin.study import Cell, Combination, Experiment, Waterfall, waterfall

SWITCHES = ("a", "b", "c", "d")
SUBSETS = [frozenset(s) for n in range(5) for s in itertools.combinations(SWITCHES, n)]


def name(on):
    return "".join(sorted(on)) or "none"


def total(weights, values):
    return sum(weight * values[cell] for cell, weight in weights.items())


def admissible(meaningful):
    """Every order whose combinations all have a meaning."""
    return [
        order
        for order in itertools.permutations(SWITCHES)
        if all(frozenset(order[:n]) in meaningful for n in range(len(order) + 1))
    ]


values_of_cells = st.lists(st.floats(-5, 5), min_size=16, max_size=16).map(
    lambda numbers: dict(zip(map(name, SUBSETS), numbers, strict=True))
)
without_meaning = st.sets(st.sampled_from([s for s in SUBSETS if 0 < len(s) < 4]), max_size=8)


@given(values_of_cells, without_meaning)
def test_a_contribution_is_the_mean_over_the_admissible_orders(values, missing):
    meaningful = set(SUBSETS) - missing
    orders = admissible(meaningful)
    assume(orders)
    way = waterfall("way", SWITCHES, lambda on: name(on) if on in meaningful else None)
    assert way.orders == len(orders)
    for switch in SWITCHES:
        steps = []
        for order in orders:
            before = frozenset(order[: order.index(switch)])
            steps.append(values[name(before | {switch})] - values[name(before)])
        assert total(way.contributions[switch], values) == pytest.approx(statistics.fmean(steps), abs=1e-9)


@given(values_of_cells, without_meaning)
def test_contributions_add_up_to_the_whole_gap(values, missing):
    meaningful = set(SUBSETS) - missing
    assume(admissible(meaningful))
    way = waterfall("way", SWITCHES, lambda on: name(on) if on in meaningful else None)
    found = sum(total(weights, values) for weights in way.contributions.values())
    assert found == pytest.approx(values[way.end] - values[way.start], abs=1e-9)


@given(values_of_cells)
def test_where_all_combinations_have_a_meaning_interactions_are_the_shapley_interaction_index(values):
    way = waterfall("way", SWITCHES, name)
    for pair in way.interactions:
        i, j = pair.first, pair.second
        expected = 0.0
        for on in (s for s in SUBSETS if not s & {i, j}):
            weight = math.factorial(len(on)) * math.factorial(4 - len(on) - 2) / math.factorial(3)
            corners = values[name(on | {i, j})] - values[name(on | {i})] - values[name(on | {j})]
            expected += weight * (corners + values[name(on)])
        assert total(pair.interaction_contrast, values) == pytest.approx(expected, abs=1e-9)
        sides = total(pair.beside, values) - total(pair.alone, values)
        assert total(pair.interaction_contrast, values) == pytest.approx(sides, abs=1e-9)


def test_switches_that_cannot_change_places_have_no_interaction():
    chain = {frozenset(): "0", frozenset("a"): "a", frozenset("ab"): "ab"}
    way = waterfall("chain", ("a", "b"), chain.get)
    assert way.orders == 1
    assert way.interactions == ()
    assert way.contributions == {"a": {"a": 1.0, "0": -1.0}, "b": {"ab": 1.0, "a": -1.0}}


def test_a_combination_that_leads_nowhere_counts_for_nothing():
    """b can be added first, but nothing can follow it."""
    cells = {frozenset(): "0", frozenset("a"): "a", frozenset("b"): "b", frozenset("ab"): "ab"}
    cells |= {frozenset("ac"): "ac", frozenset("abc"): "abc"}
    del cells[frozenset("ab")]
    way = waterfall("way", ("a", "b", "c"), cells.get)
    assert way.orders == 1
    assert not any("b" in weights for weights in way.contributions.values())


def test_a_switch_that_changes_nothing_brings_nothing():
    way = waterfall("way", ("a", "null"), lambda on: "with a" if "a" in on else "without")
    assert way.contributions["null"] == {}
    assert way.interactions == ()


@pytest.mark.parametrize(
    ("switches", "combinations", "words"),
    [
        (("a", "a"), (), "names a switch twice"),
        (("a",), (Combination(("c",), "x"),), "which is not one of a"),
        (("a",), (Combination(("a",), "x"), Combination(("a",), "y")), "two cells for one combination"),
        (("a", "b"), (Combination((), "0"), Combination(("a", "b"), "ab")), "no order of adding a, b"),
    ],
)
def test_invalid_waterfall_is_rejected(switches, combinations, words):
    with pytest.raises(InputError, match=words):
        Waterfall("way", switches, combinations)


def test_a_way_over_cells_that_an_experiment_lacks_is_an_error():
    way = waterfall("way", ("a",), lambda on: "there" if not on else "missing")
    with pytest.raises(InputError, match="uses missing"):
        Experiment(
            name="e",
            title="t",
            metric="loss",
            common={},
            cells=(Cell("there", {}),),
            seeds=(0,),
            baseline="there",
            waterfalls=(way,),
        )
