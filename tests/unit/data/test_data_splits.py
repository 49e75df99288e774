"""Train, validation or test is a property of the text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maclaurin.data import DataConfig, DataError, open_source
from maclaurin.data.corpus import Corpus, Document
from maclaurin.data.splits import (
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    BlockSplitter,
    DocumentSplitter,
    Fractions,
    hash_share,
    split_corpus,
)

texts_of_any_kind = st.lists(st.text(min_size=1, max_size=40), max_size=60)
fractions = st.builds(Fractions, validation=st.floats(0.01, 0.45), test=st.floats(0.01, 0.45))


class Texts(Corpus):
    """A corpus in memory."""

    name = "texts"

    def __init__(self, texts):
        self.texts = texts

    def _identity(self):
        return {"texts": self.texts}

    def documents(self):
        return (Document.of(text, None) for text in self.texts)


def by_split(texts, splitter):
    found = {split: [] for split in SPLITS}
    for text in texts:
        for split, part in splitter.parts(text):
            found[split].append(part)
    return found


@given(texts_of_any_kind, texts_of_any_kind, fractions)
def test_splits_are_disjoint_and_stay_the_same_when_documents_are_added(texts, more, shares):
    splitter = DocumentSplitter(shares)
    before, after = by_split(texts, splitter), by_split([*more, *texts, *more], splitter)
    for split in SPLITS:
        assert set(before[split]) <= set(after[split])
        for other in set(SPLITS) - {split}:
            assert set(after[split]).isdisjoint(after[other])


@given(st.text(), st.floats(0.01, 0.45), st.floats(0.01, 0.45), st.floats(0.0, 0.5))
def test_a_larger_test_fraction_only_adds_documents_to_the_test_split(text, one, other, validation):
    small, large = sorted([one, other])
    if Fractions(validation, small).split_of(text) == TEST:
        assert Fractions(validation, large).split_of(text) == TEST


def test_a_document_above_the_limit_is_trained_on():
    splitter = DocumentSplitter(Fractions(validation=0.3, test=0.3), longest=9)
    found = {splitter.split_of(f"text {n}") for n in range(100)}
    assert found == set(SPLITS)
    assert {splitter.split_of(f"a longer text {n}") for n in range(100)} == {TRAIN}


def test_the_standard_library_holds_out_more_of_its_few_documents():
    assert DataConfig("stdlib").fractions == Fractions(validation=0.1, test=0.1)
    assert DataConfig("text.jsonl").fractions == Fractions(validation=0.02, test=0.02)
    assert DataConfig("stdlib", test_fraction=0.3).fractions == Fractions(validation=0.1, test=0.3)


def test_about_the_wanted_share_is_held_out():
    shares = Fractions(validation=0.05, test=0.1)
    found = [shares.split_of(f"document {i}") for i in range(5000)]
    assert 430 < found.count(TEST) < 570  # 0.1 ± 3.3 standard deviations
    assert 199 < found.count(VALIDATION) < 301


def test_the_split_is_the_same_on_every_machine():
    assert [i for i in range(40) if hash_share(f"document {i}") < 0.1] == GOLDEN


def test_no_document_changes_its_split_when_others_are_left_out(open_data, texts):
    def held_out(source, split):
        rows = [source.held_out_row(split, n) for n in range(source.held_out_rows(split))]
        return {source.tokenizer.decode(row.tokens.tolist()) for row in rows}

    whole = open_data(rows="documents", length=600)
    part = open_data(rows="documents", length=600, limit_documents=40)
    for split in (VALIDATION, TEST):
        assert held_out(part, split) == held_out(whole, split) & set(texts[:40])
        assert len(held_out(part, split)) < len(held_out(whole, split))


@settings(max_examples=60)
@given(
    st.text(st.characters(codec="ascii"), min_size=400, max_size=5000),
    fractions,
    st.integers(1, 3),
)
def test_a_few_documents_are_split_within(text, shares, copies):
    corpus = Texts([text] * copies)
    try:
        splitter = split_corpus(corpus, shares)
    except DataError as problem:  # a text that repeats itself has too few different blocks
        assert "too little text" in str(problem)  # noqa: PT017
        return
    assert isinstance(splitter, BlockSplitter)
    found = by_split([text], splitter)
    assert all(found.values())
    assert "".join(part for _, part in splitter.parts(text)) == text


def test_a_dozen_documents_stay_whole_and_fill_every_split():
    texts = [f"document {i}\nof several lines\n" for i in range(12)]
    found = by_split(texts, split_corpus(Texts(texts), Fractions(0.02, 0.02)))
    assert sorted(part for parts in found.values() for part in parts) == sorted(texts)
    assert [len(found[split]) for split in (TRAIN, VALIDATION, TEST)] == [10, 1, 1]


def test_a_large_corpus_is_not_read_to_its_end_to_be_split():
    def endless():
        number = 0
        while True:
            number += 1
            yield Document.of(f"document {number}", None)

    corpus = Texts([])
    corpus.documents = endless
    assert isinstance(split_corpus(corpus, Fractions(0.02, 0.02)), DocumentSplitter)


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3])
def test_a_single_text_file_can_be_trained_on(tmp_path, fraction):
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {i} of a single file\n" for i in range(200)), encoding="utf-8")
    config = DataConfig(
        data=str(path),
        tokenizer="bytes",
        length=32,
        validation_fraction=fraction,
        test_fraction=fraction,
        cache=str(tmp_path / "cache"),
    )
    source = open_source(config, progress=False)
    assert source.tokens_per_epoch > 1000
    assert source.held_out_rows(VALIDATION) > 0
    assert source.held_out_rows(TEST) > 0


def test_an_empty_file_is_an_error_that_says_so(tmp_path):
    path = tmp_path / "corpus.txt"
    path.touch()
    with pytest.raises(DataError, match=r"corpus\.txt holds no text"):
        open_source(
            DataConfig(data=str(path), tokenizer="bytes", cache=str(tmp_path / "cache")), progress=False
        )


@pytest.mark.parametrize("text", ["short\n", "the same line again and again\n" * 50])
def test_too_little_text_is_an_error_that_says_so(tmp_path, text):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"too little text to split into train, validation, test"):
        open_source(
            DataConfig(data=str(path), tokenizer="bytes", cache=str(tmp_path / "cache")), progress=False
        )


GOLDEN = [2, 10, 17, 37]
