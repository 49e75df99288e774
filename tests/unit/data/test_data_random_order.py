"""The shuffled order that is never stored."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.data import DataError
from maclaurin.data.random_order import Permutation

sizes = st.integers(1, 3000)
keys = st.text(max_size=8)


@given(sizes, keys)
def test_every_place_is_taken_once(size, key):
    places = Permutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(places), np.arange(size))


@given(sizes, keys, st.data())
def test_one_index_alone_goes_where_it_goes_among_all(size, key, data):
    permutation = Permutation(size, key)
    index = data.draw(st.integers(0, size - 1))
    assert permutation(np.array([index]))[0] == permutation(np.arange(size))[index]


@given(st.integers(30, 3000), keys, keys)
def test_other_keys_give_other_orders(size, one, other):
    same = np.array_equal(Permutation(size, one)(np.arange(size)), Permutation(size, other)(np.arange(size)))
    assert same == (one == other)


def test_huge_orders_cost_nothing():
    size = 10**15
    places = Permutation(size, "k")(np.array([0, 1, size - 1]))
    assert len(set(places.tolist())) == 3
    assert all(0 <= place < size for place in places)


def test_every_index_goes_everywhere_about_as_often():
    size, trials = 7, 7000
    first = [int(Permutation(size, f"key {i}")(np.array([3]))[0]) for i in range(trials)]
    counts = np.bincount(first, minlength=size)
    chi_squared = float(((counts - trials / size) ** 2 / (trials / size)).sum())
    assert chi_squared < 22.5  # 0.1 % of fair orders are worse


def test_neighbours_do_not_stay_together():
    places = Permutation(4096, "k")(np.arange(4096))
    assert np.mean(np.abs(np.diff(places)) < 64) < 0.05


def test_the_order_is_the_same_on_every_machine():
    assert Permutation(10, "train, seed 0, epoch 0")(np.arange(10)).tolist() == GOLDEN


def test_an_index_outside_is_an_error():
    with pytest.raises(DataError, match=r"lie in 0 … 4"):
        Permutation(5, "k")(np.array([5]))
    with pytest.raises(DataError, match="at least one"):
        Permutation(0, "k")


GOLDEN = [7, 3, 5, 1, 2, 0, 9, 6, 4, 8]
