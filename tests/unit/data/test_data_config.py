"""The configuration: errors and fingerprints."""

import dataclasses

import pytest
import torch

from maclaurin.data import DataConfig, DataError
from maclaurin.data.cache_folder import Cache


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ""}, "data is empty"),
        ({"length": 0}, "length=0 leaves no token"),
        ({"rows": "pack"}, r"rows='pack'.*packed and documents.*Did you mean packed"),
        ({"validation_fraction": 0.0}, "nothing to evaluate on"),
        ({"validation_fraction": 0.6, "test_fraction": 0.5}, "leave something to train on"),
        ({"test_fraction": 0.0}, "between 0 and 1"),
        ({"test_fraction": 1.0}, "between 0 and 1"),
        ({"limit_documents": 0}, "leaves no document"),
    ],
)
def test_bad_settings_are_refused_at_once(changes, message):
    with pytest.raises(DataError, match=message):
        DataConfig(**changes)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataConfig().length = 3  # pyright: ignore


def test_everything_that_changes_the_numbers_changes_the_fingerprint(open_data):
    changes = [
        {},
        {"tokenizer": "bpe:300"},
        {"length": 16},
        {"rows": "documents"},
        {"cross_documents": False},
        {"test_fraction": 0.3},
        {"validation_fraction": 0.3},
        {"seed": 1},
        {"limit_documents": 60},
    ]
    prints = [open_data(**change).fingerprint for change in changes]
    assert len(set(prints)) == len(changes)
    assert open_data().fingerprint == prints[0]


def test_changed_data_has_another_fingerprint(open_data, jsonl):
    before = open_data().fingerprint
    jsonl.write_text(jsonl.read_text() + '{"text": "one more"}\n')
    assert open_data().fingerprint != before


def test_documents_are_numbered_only_if_attention_may_not_cross_them(open_data):
    assert open_data().train_batch(0, 4).documents is None
    apart = open_data(cross_documents=False).train_batch(0, 16)
    assert apart.documents is not None
    assert apart.documents.dtype == torch.int32
    assert int(apart.documents.max()) > 0


def test_a_source_has_its_name_and_sizes(open_data, jsonl):
    source = open_data()
    assert (source.name, source.length, source.vocab_size) == (str(jsonl), 32, 257)
    assert source.tokens_per_epoch > 1000


def test_the_cache_is_at_the_given_place(tmp_path, monkeypatch):
    monkeypatch.setenv("MACLAURIN_CACHE", str(tmp_path / "variable"))
    assert Cache.at(None).root == tmp_path / "variable"
    assert Cache.at(str(tmp_path / "given")).root == tmp_path / "given"
    monkeypatch.delenv("MACLAURIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache.at(None).root == tmp_path / ".cache" / "maclaurin"


def test_a_cache_that_cannot_be_created_is_an_error_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be created.*MACLAURIN_CACHE"):
        Cache.at(str(tmp_path / "file" / "cache"))
