"""Which tokenizer a model is asked with."""

import json

import pytest

pytest.importorskip("transformers")

from maclaurin.data.text_tokenizers import Bytes
from maclaurin.errors import InputError
from maclaurin.evaluation.model_tokenizer import require_end_token, tokenizer_for


def run_folder(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_run_is_asked_with_the_tokenizer_it_was_trained_with(tmp_path):
    folder = run_folder(tmp_path, tokenizer="bytes", data="stdlib")
    tokenizer, name = tokenizer_for(folder, 257, None, None)
    assert (len(tokenizer), name) == (257, "bytes")
    text = "naïve — 日本\n\ttab"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == Bytes().encode(text)
    assert tokenizer.eos_token_id == Bytes().separator


def test_a_learned_tokenizer_is_the_same_as_in_training(tmp_path, monkeypatch):
    from maclaurin.data.data_config import DataConfig, open_source

    monkeypatch.setenv("MACLAURIN_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "texts"
    text.mkdir()
    for n in range(200):
        (text / f"{n}.txt").write_text(f"the {n} quick brown foxes jump over the lazy dogs {n}")
    source = open_source(DataConfig(data=str(text), tokenizer="bpe:300", length=8), progress=False)
    folder = run_folder(tmp_path, tokenizer="bpe:300", data=str(text))
    tokenizer, _ = tokenizer_for(folder, source.vocab_size, None, None)
    assert len(tokenizer) == source.vocab_size
    found = tokenizer("the quick brown foxes", add_special_tokens=False)["input_ids"]
    assert found == source.tokenizer.encode("the quick brown foxes")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "or bytes for a model of bytes"),
        ({"tokenizer": "bytes", "data": "mqar:pairs=3"}, "stand for no text"),
    ],
)
def test_no_tokenizer_is_an_error_that_says_what_would_do(tmp_path, config, words):
    with pytest.raises(InputError, match=words):
        tokenizer_for(run_folder(tmp_path, **config), 257, None, None)


def test_mismatched_tokenizer_is_rejected(tmp_path):
    with pytest.raises(InputError, match="do not belong together"):
        tokenizer_for(str(tmp_path), 100, None, "bytes")
    with pytest.raises(InputError, match="cannot be opened"):
        tokenizer_for(str(tmp_path), 100, None, str(tmp_path))


def test_a_token_that_ends_texts_must_be_named(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    found, name = tokenizer_for("model", 10, bare, None)
    assert name == "the model's own"
    with pytest.raises(InputError, match="eos_token"):
        require_end_token(found, name)
    given, _ = tokenizer_for("model", 300, None, "bytes")
    require_end_token(given, "bytes")


def test_the_text_a_tokenizer_was_learned_from_may_be_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("MACLAURIN_CACHE", str(tmp_path / "cache"))
    folder = run_folder(tmp_path, tokenizer="bpe:300", data=str(tmp_path / "gone"))
    with pytest.raises(InputError, match="cannot be read now"):
        tokenizer_for(folder, 300, None, None)
