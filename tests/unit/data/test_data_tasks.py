"""Synthetic tasks: each row has the answer in it, and nowhere else is one asked."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.data import NOT_SCORED, DataConfig, DataError, open_source
from maclaurin.data.data_config import TASK_NAMES, open_task
from maclaurin.data.random_order import Draws
from maclaurin.data.splits import TEST, VALIDATION
from maclaurin.data.tasks import multiplication_table

indices = st.integers(0, 2**63)


def draws(index, stream=0, key="k"):
    return Draws(key, stream, index)


@given(indices, st.integers(1, 6), st.integers(0, 8), st.integers(0, 20), st.sampled_from([0.01, 1.0, 2.5]))
def test_recall_asks_for_the_value_that_came_with_the_key(index, pairs, queries, room, distance):
    length = 2 * pairs + 2 * (queries or pairs) - 1 + room
    task = open_task(f"mqar:pairs={pairs},vocab=33,queries={queries},distance={distance}", length)
    row = task.row(draws(index))
    value_of = dict(zip(row.tokens[0 : 2 * pairs : 2], row.tokens[1 : 2 * pairs : 2], strict=True))
    assert len(value_of) == pairs
    places = np.flatnonzero(row.targets != NOT_SCORED)
    assert len(places) == (queries or pairs)
    assert places[0] >= 2 * pairs
    assert [value_of[key] for key in row.tokens[places]] == row.targets[places].tolist()
    asked = np.unique(row.tokens[places], return_counts=True)[1]
    assert asked.max() - (asked.min() if len(asked) == pairs else 0) <= 1
    others = np.delete(row.tokens, [*range(2 * pairs), *places])
    assert not set(others.tolist()) & set(value_of)


def test_distance_is_a_dial_from_soon_to_anywhere():
    def mean_place(distance):
        task = open_task(f"mqar:pairs=4,distance={distance}", 128)
        return np.mean([np.flatnonzero(task.row(draws(i)).targets >= 0) for i in range(300)])

    soon, anywhere, late = mean_place(0.01), mean_place(1), mean_place(3)
    assert soon + 10 < anywhere < late - 10
    assert anywhere == pytest.approx(8 + 119 / 2, abs=4)


@given(indices, st.integers(3, 40), st.integers(3, 20))
def test_induction_asks_what_followed_the_special_token(index, length, vocab):
    row = open_task(f"induction:vocab={vocab}", length).row(draws(index))
    first, last = np.flatnonzero(row.tokens == 0)
    assert last == length - 1
    assert row.targets[-1] == row.tokens[first + 1]
    assert np.all(row.targets[:-1] == NOT_SCORED)


@given(indices, st.integers(1, 10), st.integers(0, 20))
def test_copying_asks_for_the_tokens_in_their_order(index, count, room):
    row = open_task(f"copy:tokens={count},vocab=9", 2 * count + room).row(draws(index))
    assert row.targets[row.tokens == 1].tolist() == row.tokens[row.tokens > 1].tolist()
    assert np.sum(row.tokens == 1) == np.sum(row.targets != NOT_SCORED) == count
    assert np.all(row.targets[:-count] == NOT_SCORED)


@given(indices, st.integers(1, 40))
def test_parity_is_the_running_sum_of_bits(index, length):
    row = open_task("parity", length).row(draws(index))
    assert row.targets.tolist() == (np.cumsum(row.tokens) % 2).tolist()


@given(indices)
def test_states_are_permutations_applied_one_after_the_other(index):
    row = open_task("state:group=S5", 30).row(draws(index))
    elements = list(itertools.permutations(range(5)))
    state = tuple(range(5))
    for token, target in zip(row.tokens, row.targets, strict=True):
        state = tuple(elements[token][place] for place in state)
        assert elements[target] == state


@pytest.mark.parametrize(
    ("name", "order", "commutes"), [("Z2", 2, True), ("Z7", 7, True), ("S3", 6, False), ("A5", 60, False)]
)
def test_the_groups_are_groups(name, order, commutes):
    table = multiplication_table(name)
    every = np.arange(order)
    assert table.shape == (order, order)
    assert np.array_equal(table[0], every)
    assert np.array_equal(table[:, 0], every)
    assert all(set(row) == set(every) for row in table)
    assert np.array_equal(table[table[:, :, None], every], table[every[:, None, None], table])
    assert np.array_equal(table, table.T) == commutes


@pytest.mark.parametrize("name", TASK_NAMES)
def test_rows_have_the_length_and_stay_in_the_vocabulary(name):
    source = open_source(DataConfig(data=name, length=64))
    batch = source.train_batch(5, 16)
    assert batch.tokens.shape == batch.targets.shape == (16, 64)
    assert batch.documents is None
    assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < source.vocab_size
    assert int(batch.targets.max()) < source.vocab_size
    assert source.tokens_per_epoch is None
    for split in (VALIDATION, TEST):
        rows = sum(len(b.tokens) for b in source.held_out_batches(split, 100))
        assert rows == source.held_out_rows(split)
    assert len(np.unique(batch.tokens.numpy(), axis=0)) == 16


def test_an_own_length_goes_before_the_general_one():
    assert open_source(DataConfig(data="mqar:length=100,pairs=3")).length == 100
    assert open_source(DataConfig(data="mqar:pairs=3", length=70)).length == 70


def test_rows_and_fingerprint_are_the_same_on_every_machine():
    source = open_source(DataConfig(data="mqar:pairs=2,vocab=16,length=12", seed=3))
    row = source.train_row(10**12)
    assert (row.tokens.tolist(), row.targets.tolist(), source.fingerprint) == GOLDEN


def test_everything_that_changes_rows_changes_the_fingerprint():
    configs = [
        ("mqar", 0),
        ("mqar", 1),
        ("mqar:pairs=4", 0),
        ("mqar:distance=1", 0),
        ("mqar:length=90", 0),
        ("parity", 0),
    ]
    prints = {open_source(DataConfig(data=data, seed=seed)).fingerprint for data, seed in configs}
    assert len(prints) == len(configs)
    assert open_source(DataConfig(data="mqar:pairs=8")).fingerprint in prints


def test_draws_share_nothing_between_rows_sides_and_keys():
    streams = [draws(1), draws(2), draws(1, stream=1), draws(1, key="other")]
    words = np.concatenate([stream._words(1000) for stream in streams])
    assert len(np.unique(words)) == 4000


@given(indices, st.integers(1, 50), st.data())
def test_distinct_numbers_are_distinct(index, bound, data):
    count = data.draw(st.integers(0, bound))
    for chosen in (
        draws(index).distinct_below(bound, count),
        draws(index).distinct_weighted(np.arange(1.0, bound + 1), count),
    ):
        assert len(chosen) == count
        assert set(chosen.tolist()) <= set(range(bound))
        assert len(set(chosen.tolist())) == count


def test_draws_are_fair():
    counts = np.bincount(draws(0).below(10, 100_000), minlength=10)
    assert len(counts) == 10
    assert np.all(np.abs(counts - 10_000) < 400)
    weighted = np.bincount([draws(i).distinct_weighted(np.array([1.0, 3.0]), 1)[0] for i in range(2000)])
    assert weighted[1] == pytest.approx(1500, abs=80)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("mqar:pairs=8,length=30", r"length=30 is too short: 8 pairs and 8 queries need 31 .* Use length=31"),
        ("mqar:pairs=8,vocab=15", "Use vocab=16 or more"),
        ("mqar:pairs=0", "nothing to recall"),
        ("mqar:distance=0", "must be above 0"),
        ("mqar:queries=-1", "must not be negative"),
        ("mqar:pair=8", r"no option 'pair'; it has length, pairs.*Did you mean pairs"),
        ("mqar:pairs=many", "pairs must be an integer, not 'many'"),
        ("mqar:distance=far", "distance must be a number, not 'far'"),
        ("mqar:pairs", "'pairs' is not an option; options are written name=value"),
        ("mqar:pairs=1,pairs=2", "pairs is given twice"),
        ("induction:length=2", "Use length=3 or more"),
        ("induction:vocab=2", "Use vocab=3"),
        ("copy:tokens=9,length=17", "Use length=18 or more"),
        ("copy:tokens=0", "nothing to copy"),
        ("copy:vocab=3", "Use vocab=4"),
        ("state:group=S9", "no group 'S9'"),
        ("state:group=Q8", "no group 'Q8'"),
        ("state:group=Z1", "no group 'Z1'"),
        ("parity:length=0", "Use length=1"),
    ],
)  # fmt: skip
def test_bad_options_are_errors_that_say_what_would_work(written, message):
    with pytest.raises(DataError, match=message):
        open_source(DataConfig(data=written))


@pytest.mark.parametrize(
    "written",
    [
        "mqar:pairs=8,length=31",
        "mqar:pairs=8,vocab=16",
        "copy:tokens=9,length=18",
        "induction:length=3,vocab=3",
    ],
)
def test_the_least_that_is_said_to_work_works(written):
    assert open_source(DataConfig(data=written)).train_batch(0, 4).scored > 0


GOLDEN = (
    [2, 9, 1, 14, 2, 8, 9, 14, 9, 10, 1, 11],
    [-100, -100, -100, -100, 9, -100, -100, -100, -100, -100, 14, -100],
    "03bd9873a5816bbbb63566669dc564883d9828d1f433bee704b522641ac2d88e",
)
