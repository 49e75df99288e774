"""Data sets of the hub: the real loading code over a folder in a hub data set's schema."""

import json

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from maclaurin.data import DataError
from maclaurin.data.data_config import PRESETS
from maclaurin.data.hub_dataset import HubDataset


def write_fineweb(folder, texts, part):
    """A shard with the columns of HuggingFaceFW/fineweb."""
    count = len(texts)
    columns = {
        "text": texts,
        "id": [f"<urn:uuid:{part}-{i}>" for i in range(count)],
        "dump": ["CC-MAIN-2024-51"] * count,
        "url": ["https://example.org"] * count,
        "date": ["2024-12-01T00:00:00Z"] * count,
        "language_score": [0.9] * count,
        "token_count": [len(text) for text in texts],
    }
    folder.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"train-{part:05d}-of-00002.parquet")


@pytest.fixture
def fineweb(tmp_path, texts):
    folder = tmp_path / "fineweb"
    write_fineweb(folder, texts[:50], 0)
    write_fineweb(folder, texts[50:], 1)
    return folder


def named(written, tmp_path):
    return HubDataset.named(written, tmp_path / "notes", progress=False)


def test_a_folder_is_streamed_like_the_hub(fineweb, texts, tmp_path):
    assert [document.text for document in named(str(fineweb), tmp_path).documents()] == texts


def test_it_becomes_batches_like_any_text(fineweb, open_data):
    from_hub, from_file = open_data(data=f"hf:{fineweb}"), open_data()
    assert from_hub.train_batch(3, 4).tokens.tolist() == from_file.train_batch(3, 4).tokens.tolist()
    assert from_hub.fingerprint != from_file.fingerprint


def test_a_changed_folder_has_another_fingerprint(fineweb, tmp_path):
    before = named(str(fineweb), tmp_path).fingerprint
    assert named(str(fineweb), tmp_path).fingerprint == before
    write_fineweb(fineweb, ["something else"], 1)
    assert named(str(fineweb), tmp_path).fingerprint != before


@pytest.mark.parametrize(
    ("suffix", "message"),
    [(":nope", "'nope' not found"), ("@nope", "Bad split: nope"), ("/nope", "no folder")],
)
def test_what_is_not_in_the_folder_is_named(fineweb, tmp_path, suffix, message):
    with pytest.raises(DataError, match=message):
        list(named(f"{fineweb}{suffix}", tmp_path).documents())


def test_a_data_set_without_text_is_an_error_with_its_columns(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"]}), folder / "a.parquet")
    with pytest.raises(DataError, match="no column 'text'; it has content"):
        list(named(str(folder), tmp_path).documents())


def test_names_have_a_config_and_a_split(tmp_path):
    dataset = named("HuggingFaceFW/fineweb:CC-MAIN-2024-51@test", tmp_path)
    assert (dataset.path, dataset.config, dataset.split) == (
        "HuggingFaceFW/fineweb",
        "CC-MAIN-2024-51",
        "test",
    )
    assert named("a/b", tmp_path).name == "hf:a/b@train"
    with pytest.raises(DataError, match="names no data set"):
        named("", tmp_path)
    assert all(preset.startswith("hf:") for preset in PRESETS.values())


def test_a_hub_that_cannot_be_reached_is_one_clear_error(open_data, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"hf:HuggingFaceFW/fineweb:CC-MAIN-2024-51@train could not be read"):
        open_data(data="fineweb")


def test_the_revision_is_looked_up_once_and_kept(tmp_path, monkeypatch):
    asked = []

    def dataset_info(self, name, timeout):
        asked.append(name)
        return type("Info", (), {"sha": "0123abcd"})()

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    first, second = named("a/b", tmp_path), named("a/b", tmp_path)
    assert first.fingerprint == second.fingerprint
    assert asked == ["a/b"]
    notes = [json.loads(path.read_text()) for path in (tmp_path / "notes").glob("*.json")]
    assert notes == [{"name": "a/b", "revision": "0123abcd"}]
    assert named("a/b:config", tmp_path).fingerprint != first.fingerprint


def test_the_hub_is_streamed_at_the_kept_revision(tmp_path, monkeypatch):
    info = type("Info", (), {"sha": "0123abcd"})()
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    asked = {}

    def load_dataset(path, **options):
        asked.update(path=path, **options)
        return iter([{"text": "streamed", "id": "1"}, {"text": ""}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset = named("HuggingFaceFW/fineweb:CC-MAIN-2024-51", tmp_path)
    assert [document.text for document in dataset.documents()] == ["streamed"]
    assert asked.pop("cache_dir").startswith(str(tmp_path))
    assert asked == {
        "path": "HuggingFaceFW/fineweb",
        "name": "CC-MAIN-2024-51",
        "split": "train",
        "revision": "0123abcd",
        "streaming": True,
    }


def test_a_stream_that_breaks_off_is_one_clear_error(tmp_path, monkeypatch):
    info = type("Info", (), {"sha": "0123abcd"})()
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)

    def load_dataset(path, **options):
        yield {"text": "streamed"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"could not be read from .* \(ConnectionError: gone"):
        list(named("a/b", tmp_path).documents())
