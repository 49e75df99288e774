"""The batch of a step: the same for every number of processes, reached without those before it."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maclaurin.data import NOT_SCORED, DataError
from maclaurin.data.splits import TEST, VALIDATION

TASK = "mqar:pairs=2,vocab=16,length=16"
steps = st.integers(0, 10**6)


@pytest.fixture(params=["text", "task"])
def source(request, open_data):
    return open_data() if request.param == "text" else open_data(data=TASK)


def rows_of(batch):
    return [tuple(row) for row in torch.cat([batch.tokens, batch.targets], dim=1).tolist()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(step=steps, eighths=st.integers(1, 3))
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_batch_of_one_process(source, world, step, eighths):
    whole = source.train_batch(step, 4 * eighths)
    shares = [source.train_batch(step, 4 * eighths, rank=rank, world=world) for rank in range(world)]
    assert torch.equal(torch.cat([share.tokens for share in shares]), whole.tokens)
    assert torch.equal(torch.cat([share.targets for share in shares]), whole.targets)


def test_an_epoch_visits_every_row_once_and_the_next_in_another_order(open_data):
    source = open_data()
    rows = len(source._train)
    first, second = source.train_row_numbers(0, rows), source.train_row_numbers(rows, rows)
    assert sorted(first) == sorted(second) == list(range(rows))
    assert not np.array_equal(first, second)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.integers(1, 50), st.integers(0, 40))
def test_batch_size_does_not_change_the_order(open_data, batch_size, step):
    source = open_data()
    expected = source.train_row_numbers(0, (step + 1) * batch_size)[step * batch_size :]
    batch = source.train_batch(step, batch_size)
    assert [source.train_row(int(n)).tokens.tolist() for n in expected] == batch.tokens.tolist()


def test_an_epoch_scores_every_training_token_once(open_data):
    source = open_data()
    batch = source.train_batch(0, len(source._train))
    assert batch.scored == source.tokens_per_epoch


def test_the_seed_changes_the_order_of_training_but_not_of_evaluation(open_data):
    one, other = open_data(seed=1), open_data(seed=2)
    assert rows_of(one.train_batch(0, 8)) != rows_of(other.train_batch(0, 8))
    for split in (VALIDATION, TEST):
        first, second = one.held_out_batches(split, 4), other.held_out_batches(split, 4)
        assert [rows_of(b) for b in first] == [rows_of(b) for b in second]


def test_opening_again_gives_the_same_batches(open_data):
    assert rows_of(open_data().train_batch(17, 8)) == rows_of(open_data().train_batch(17, 8))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("limit", [None, 1, 7, 10**6])
@pytest.mark.parametrize("split", [VALIDATION, TEST])
def test_all_ranks_together_evaluate_every_row_once(source, world, limit, split):
    rows = source.held_out_rows(split)
    wanted = [source.held_out_row(split, n) for n in range(min(rows, limit or rows))]
    by_rank = [
        list(source.held_out_batches(split, 8, limit, rank=rank, world=world)) for rank in range(world)
    ]
    assert len({tuple(batch.tokens.shape[0] for batch in batches) for batches in by_rank}) == 1
    seen = [row for group in zip(*by_rank, strict=True) for batch in group for row in rows_of(batch)]
    scored = [row for row in seen if any(target != NOT_SCORED for target in row[source.length :])]
    assert scored == [(*row.tokens.tolist(), *row.targets.tolist()) for row in wanted]


def test_no_row_is_in_two_splits(source):
    rows = len(source._train) if source.tokens_per_epoch else 2000
    trained = set(rows_of(source.train_batch(0, rows)))
    validation, test = (
        set(itertools.chain.from_iterable(rows_of(batch) for batch in batches))
        for batches in (source.held_out_batches(VALIDATION, 64), source.held_out_batches(TEST, 64))
    )
    assert validation
    assert test
    assert len(trained | validation | test) == len(trained) + len(validation) + len(test)


def test_a_batch_that_cannot_be_shared_is_an_error(source):
    with pytest.raises(DataError, match=r"10 rows cannot be shared equally by 4 processes.*such as 12"):
        source.train_batch(0, 10, world=4)
    with pytest.raises(DataError, match="cannot be shared equally by 4"):
        next(source.held_out_batches(TEST, 10, world=4))
    with pytest.raises(DataError, match="rank 4 of 4"):
        source.train_batch(0, 8, rank=4, world=4)
    with pytest.raises(DataError, match="count from 0"):
        source.train_batch(-1, 8)
