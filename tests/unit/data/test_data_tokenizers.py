"""Text ⇄ tokens."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.data import DataError, text_tokenizers
from maclaurin.data.corpus import FirstDocuments
from maclaurin.data.data_config import open_tokenizer
from maclaurin.data.splits import TRAIN, DocumentSplitter, Fractions
from maclaurin.data.text_files import Files
from maclaurin.data.text_tokenizers import (
    SEPARATOR,
    BytePairs,
    Bytes,
    open_byte_pairs,
    open_hub_tokenizer,
    train_byte_pairs,
)
from maclaurin.errors import MissingExtraError

SPLITTER = DocumentSplitter(Fractions(validation=0.2, test=0.2))
plain_text = st.text(st.characters(exclude_categories=["Cs"]))
text_with_separators = st.lists(st.sampled_from([SEPARATOR, "the", " ", "\n", "<|"])).map("".join)
any_text = plain_text | text_with_separators


@pytest.fixture(scope="module")
def serialized():
    return train_byte_pairs(300, iter(["the cat sat on the mat"] * 5))


@pytest.fixture(scope="module")
def saved(serialized, tmp_path_factory):
    """The same tokenizer as a tokenizer.json and as a folder of transformers."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=BytePairs(serialized, 300)._tokenizer, eos_token=SEPARATOR
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["bytes", "bpe", "file", "folder"])
def tokenizer(request, serialized, saved):
    return {
        "bytes": Bytes,
        "bpe": lambda: BytePairs(serialized, 300),
        "file": lambda: open_hub_tokenizer(str(saved / "tokenizer.json")),
        "folder": lambda: open_hub_tokenizer(str(saved)),
    }[request.param]()


@given(text=any_text)
def test_decoding_gives_the_text_back_and_no_text_makes_a_separator(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.separator not in tokens
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.decode([tokenizer.separator, *tokens, tokenizer.separator]) == text


def test_many_texts_are_encoded_as_one_by_one(tokenizer):
    texts = ["the cat", "", "sat <|separator|>", "マット"]
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]


def test_fingerprints_tell_tokenizers_apart(serialized, saved):
    others = [BytePairs(train_byte_pairs(300, iter(["another text"])), 300), open_hub_tokenizer(str(saved))]
    prints = [Bytes().fingerprint, BytePairs(serialized, 300).fingerprint, *(t.fingerprint for t in others)]
    assert len(set(prints)) == 4
    assert BytePairs(serialized, 300).fingerprint == prints[1]
    assert Bytes().fingerprint == GOLDEN_BYTES


@pytest.fixture
def corpus(jsonl, tmp_path):
    return Files.named(str(jsonl), tmp_path, progress=False)


def test_pairs_are_learned_once_per_corpus_and_always_the_same(corpus, tmp_path, monkeypatch):
    first = open_byte_pairs(300, corpus, SPLITTER, tmp_path, progress=False)
    assert first.vocab_size == 300
    assert len(first.encode("attention is")) < len("attention is")
    (tmp_path / "other").mkdir()
    again = open_byte_pairs(300, corpus, SPLITTER, tmp_path / "other", progress=False)
    assert again.fingerprint == first.fingerprint
    monkeypatch.setattr(text_tokenizers, "train_byte_pairs", lambda *_: pytest.fail("trained again"))
    assert open_byte_pairs(300, corpus, SPLITTER, tmp_path, progress=False).fingerprint == first.fingerprint


def test_pairs_are_trained_on_training_documents_only(corpus, tmp_path, texts, monkeypatch):
    trained_on = []
    monkeypatch.setattr(
        text_tokenizers,
        "train_byte_pairs",
        lambda size, given: trained_on.extend(given) or train_byte_pairs(size, iter(["a"])),
    )
    open_byte_pairs(300, corpus, SPLITTER, tmp_path, progress=False)
    assert trained_on == [text for text in texts if SPLITTER.fractions.split_of(text) == TRAIN]
    assert len(trained_on) < len(texts)


def test_learning_stops_after_enough_text(corpus, tmp_path, texts, monkeypatch):
    trained_on = []
    monkeypatch.setattr(
        text_tokenizers,
        "train_byte_pairs",
        lambda size, given: trained_on.extend(given) or train_byte_pairs(size, iter(["a"])),
    )
    monkeypatch.setattr(text_tokenizers, "TRAINED_ON", 1000)
    open_byte_pairs(300, corpus, SPLITTER, tmp_path, progress=False)
    assert 1000 <= sum(map(len, trained_on)) < 1000 + max(map(len, texts))


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-20], lambda content: content.replace(b"at", b"aT"), lambda content: b""],
    ids=["truncated", "changed", "emptied"],
)
def test_a_damaged_tokenizer_is_learned_again(corpus, tmp_path, damage):
    first = open_byte_pairs(300, corpus, SPLITTER, tmp_path, progress=False)
    path = next(tmp_path.glob("bpe-300-*.json"))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert open_byte_pairs(300, corpus, SPLITTER, tmp_path, progress=False).fingerprint == first.fingerprint
    assert path.read_bytes() == whole


def test_a_corpus_with_few_pairs_makes_a_smaller_vocabulary(corpus, tmp_path):
    small = open_byte_pairs(5000, FirstDocuments(corpus, 2), SPLITTER, tmp_path, progress=False)
    assert 257 <= small.vocab_size < 5000
    assert small.name == "bpe:5000"


def test_without_the_library_the_error_says_what_to_do(open_data, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'maclaurin\[data\]', or use tokenizer=bytes"):
        open_data(tokenizer="bpe:4096")
    assert open_data(tokenizer="bytes").vocab_size == 257


def test_a_bad_tokenizer_is_an_error_with_the_reason(corpus, tmp_path, serialized):
    def attempt(written):
        return open_tokenizer(written, corpus, SPLITTER, tmp_path, progress=False)

    with pytest.raises(DataError, match=r"cannot hold the 256 bytes.*bpe:257"):
        attempt("bpe:256")
    with pytest.raises(DataError, match=r"no tokenizer 'byte'.*Did you mean bytes"):
        attempt("byte")
    with pytest.raises(DataError, match="no tokenizer 'bpe:many'"):
        attempt("bpe:many")
    with pytest.raises(DataError, match="names no tokenizer"):
        attempt("hf:")
    with pytest.raises(DataError, match="cannot be opened"):
        attempt(f"hf:{tmp_path}")
    nameless = tmp_path / "tokenizer.json"
    nameless.write_text(serialized.replace(SEPARATOR, "<|what|>"))
    with pytest.raises(DataError, match="has no token that ends a text"):
        attempt(f"hf:{nameless}")


GOLDEN_BYTES = "511ea56f3e82992607f5be624411a3525fb0028b0347a094253bd7fcc4f18a78"
