"""Batches: what is counted in them and where documents begin."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.data import NOT_SCORED, Batch
from maclaurin.data.batch import Row


def test_rows_become_tensors_of_the_promised_types():
    row = Row(np.array([1, 2], np.uint16), np.array([2, NOT_SCORED]), np.array([0, 1]))
    batch = Batch.of_rows([row, row])
    assert batch.tokens.tolist() == [[1, 2], [1, 2]]
    assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    assert batch.documents is not None
    assert batch.documents.dtype == torch.int32
    assert batch.scored == 2
    moved = batch.to("cpu")
    assert torch.equal(moved.targets, batch.targets)


def test_rows_without_documents_give_a_batch_without():
    assert Batch.of_rows([Row(np.array([1]), np.array([2]))]).documents is None


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_cu_seqlens_are_the_sizes_of_the_documents_added_up(sizes):
    length = max(map(sum, sizes))
    sizes = [[*row, length - sum(row)] if sum(row) < length else row for row in sizes]
    documents = torch.tensor([[d for d, size in enumerate(row) for _ in range(size)] for row in sizes])
    batch = Batch(torch.zeros_like(documents), torch.zeros_like(documents), documents)
    assert batch.cu_seqlens.diff().tolist() == [size for row in sizes for size in row]
    whole_rows = Batch(batch.tokens, batch.targets)
    assert whole_rows.cu_seqlens.tolist() == [length * i for i in range(len(sizes) + 1)]
