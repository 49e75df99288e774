"""Documents → rows: nothing lost, nothing twice, nothing predicted across documents that should not be."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.data.source import NOT_SCORED
from maclaurin.data.text_source import DocumentRows, PackedRows
from maclaurin.data.token_shards import Documents

SEPARATOR = 9
texts = st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=12)
lengths = st.integers(1, 20)


def laid_out(documents):
    """⟨sep⟩ d₁ ⟨sep⟩ d₂ … ⟨sep⟩, as the files hold it."""
    tokens = [token for document in documents for token in [SEPARATOR, *document]] + [SEPARATOR]
    starts = np.cumsum([0] + [len(document) + 1 for document in documents])
    return Documents(np.array(tokens), starts)


@given(texts, lengths)
def test_packed_rows_put_together_are_the_documents(documents, length):
    stored = laid_out(documents)
    rows = PackedRows(stored, length, SEPARATOR, True)
    laid = [rows[i] for i in range(len(rows))]
    tokens = np.concatenate([row.tokens for row in laid])
    targets = np.concatenate([row.targets for row in laid])
    scored = targets != NOT_SCORED
    assert tokens[scored].tolist() == stored.tokens[:-1].tolist()
    assert targets[scored].tolist() == stored.tokens[1:].tolist()
    assert scored.sum() == rows.scored
    assert all(len(row.tokens) == length and row.documents is None for row in laid)


@given(texts, lengths)
def test_documents_of_a_packed_row_change_just_before_each_separator(documents, length):
    rows = PackedRows(laid_out(documents), length, SEPARATOR, False)
    for number in range(len(rows)):
        row = rows[number]
        assert row.documents is not None
        real = row.targets != NOT_SCORED
        begins = row.tokens[real] == SEPARATOR
        begins[0] = False
        assert row.documents[real].tolist() == np.cumsum(begins).tolist()
        assert np.all(row.documents[~real] == np.max(row.documents[real]) + 1)


@given(texts, lengths)
def test_a_document_row_is_its_separator_and_its_first_tokens(documents, length):
    rows = DocumentRows(laid_out(documents), length, SEPARATOR, False)
    assert len(rows) == len(documents)
    total = 0
    for number, document in enumerate(documents):
        row = rows[number]
        whole = [SEPARATOR, *document, SEPARATOR]
        seen = min(length, len(document) + 1)
        total += seen
        assert row.tokens.tolist() == whole[:seen] + [SEPARATOR] * (length - seen)
        assert row.targets.tolist() == whole[1 : seen + 1] + [NOT_SCORED] * (length - seen)
        assert row.documents is not None
        assert row.documents.tolist() == [0] * seen + [1] * (length - seen)
    assert rows.scored == total
