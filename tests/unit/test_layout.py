"""Where the documents of a batch begin and end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.errors import InputError
from maclaurin.layers.layout import Layout


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_cuts_are_the_sizes_of_the_documents_added_up(sizes):
    length = max(map(sum, sizes))
    sizes = [[*row, length - sum(row)] if sum(row) < length else row for row in sizes]
    documents = torch.tensor([[d for d, size in enumerate(row) for _ in range(size)] for row in sizes])
    layout = Layout.of(torch.arange(length)[None], None, documents)
    assert layout.cu_seqlens is not None
    assert layout.cu_seqlens.diff().tolist() == [size for row in sizes for size in row]
    assert layout.max_seqlen == max(size for row in sizes for size in row)


def test_padding_and_documents_do_not_go_together():
    ones = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(InputError, match=r"padding .* or documents, not both"):
        Layout.of(torch.arange(3)[None], ones, ones)
