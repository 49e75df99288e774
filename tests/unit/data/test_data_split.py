"""Training or testing is a property of the text."""

from hypothesis import given
from hypothesis import strategies as st

from maclaurin.data.split import TEST, side_of


@given(st.text(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_larger_share_for_testing_only_adds_documents(text, one, other):
    small, large = sorted([one, other])
    assert side_of(text, small) != TEST or side_of(text, large) == TEST


def test_about_the_asked_share_is_for_testing():
    tested = sum(side_of(f"document {i}", 0.1) == TEST for i in range(5000))
    assert 430 < tested < 570  # 0.1 ± 3.3 standard deviations


def test_the_side_is_the_same_on_every_machine():
    assert [i for i in range(40) if side_of(f"document {i}", 0.1) == TEST] == GOLDEN


def test_no_document_changes_sides_when_others_are_left_out(open_data, texts):
    def tested(source):
        rows = [source.test_row(n) for n in range(source.test_rows)]
        return {source.tokenizer.decode(row.tokens.tolist()) for row in rows}

    all_of_them = tested(open_data(rows="documents", length=600))
    some = tested(open_data(rows="documents", length=600, limit_documents=40))
    assert some == all_of_them & set(texts[:40])
    assert len(some) < len(all_of_them)


GOLDEN = [2, 10, 17, 37]
