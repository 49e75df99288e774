"""Batches: what is counted in them."""

import numpy as np
import torch

from maclaurin.data import NOT_SCORED, Batch
from maclaurin.data.source import Row


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
