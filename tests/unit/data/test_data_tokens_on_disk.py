"""Tokens on disk: complete or not there, and checked."""

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from maclaurin.data import DataConfig, DataError, cache_folder, open_source, token_shards
from maclaurin.data.cache_folder import Cache, StorageError
from maclaurin.data.splits import CorpusSplitter, Fractions, split_corpus
from maclaurin.data.text_files import Files
from maclaurin.data.text_tokenizers import Bytes


def token_folder(cache):
    (folder,) = [path for path in (cache / "tokens").iterdir() if not path.name.startswith(".")]
    return folder


def first_rows(source):
    return [source.train_row(int(number)).tokens.tolist() for number in source.train_row_numbers(0, 8)]


def test_text_is_tokenized_once(open_data, monkeypatch):
    rows = first_rows(open_data())
    monkeypatch.setattr(token_shards, "_fill", lambda *_: pytest.fail("tokenized again"))
    assert first_rows(open_data()) == rows
    assert first_rows(open_data(length=16, rows="documents", seed=5)) != rows


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [Path.unlink, _truncate, _flip_a_bit], ids=["missing", "truncated", "changed"]
)
@pytest.mark.parametrize("name", ["manifest.json", "train-tokens.bin", "test-starts.bin"])
def test_a_damaged_folder_is_prepared_again(open_data, cache, damage, name):
    rows = first_rows(open_data())
    damage(token_folder(cache) / name)
    assert first_rows(open_data()) == rows
    assert [path.name for path in (cache / "tokens").glob(".*.part")] == []


def test_large_files_are_hashed_once(open_data, monkeypatch):
    monkeypatch.setattr(cache_folder, "HASH_CACHE_MIN_BYTES", 1)
    open_data()
    open_data()  # hashed after they were written
    monkeypatch.setattr(cache_folder, "sha256", lambda path: pytest.fail(f"hashed {path} again"))
    open_data()


def test_tokens_are_mapped_not_read(open_data):
    documents = open_data().prepared.documents("train")
    assert isinstance(documents.tokens, np.memmap)
    assert isinstance(documents.starts, np.memmap)


def test_a_changed_manifest_is_not_believed(open_data, cache):
    open_data()
    path = token_folder(cache) / "manifest.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "vocab_size": 300}))
    open_data()
    assert json.loads(path.read_text()) == whole


def _open_in_process(jsonl, cache, results):
    config = DataConfig(
        data=str(jsonl),
        tokenizer="bpe:300",
        length=32,
        validation_fraction=0.2,
        test_fraction=0.2,
        cache=str(cache),
    )
    results.put(first_rows(open_source(config, progress=False)))


def test_processes_that_prepare_at_once_get_the_same(jsonl, cache):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_open_in_process, args=(jsonl, cache, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    rows = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(row == rows[0] for row in rows)
    token_folder(cache)
    assert list((cache / "tokens").glob(".*.part")) == []


def test_without_locks_the_first_to_finish_wins(open_data, cache, jsonl, monkeypatch):
    """While one fills its folder, another publishes: the slower throws its own away."""

    def no_locks(*_):
        raise NotImplementedError

    monkeypatch.setattr("maclaurin.files._acquire", no_locks)
    fill, started, published = token_shards._fill, [], []

    def slow_fill(*arguments):
        started.append(arguments)
        if len(started) == 1:
            open_data()
            published.append(token_folder(cache).stat().st_ino)
        fill(*arguments)

    monkeypatch.setattr(token_shards, "_fill", slow_fill)
    source = open_data()
    assert len(started) == 2
    assert published == [token_folder(cache).stat().st_ino]
    assert len(first_rows(source)) == 8
    assert list((cache / "tokens").glob(".*.part")) == []


def _prepare_forever(jsonl, cache):
    token_shards._together = _stuck(token_shards._together)
    config = DataConfig(
        data=str(jsonl),
        tokenizer="bytes",
        length=32,
        validation_fraction=0.2,
        test_fraction=0.2,
        cache=str(cache),
    )
    open_source(config, progress=False)


def _stuck(together):
    def stuck(documents):
        yield from together(documents)
        time.sleep(60)

    return stuck


def test_what_a_killed_process_left_is_cleared_away(open_data, jsonl, cache):
    worker = multiprocessing.get_context("spawn").Process(target=_prepare_forever, args=(jsonl, cache))
    worker.start()
    deadline = time.monotonic() + 30
    while not list((cache / "tokens").glob(".*.part")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert list((cache / "tokens").glob(".*.part"))
    assert len(first_rows(open_data())) == 8
    assert list((cache / "tokens").glob(".*.part")) == []


def test_a_full_disk_leaves_nothing_behind(open_data, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(token_shards._ArrayWriter, "finish", full)
        with pytest.raises(StorageError, match=r"is full.*limit_documents"):
            open_data()
    assert [path for path in (cache / "tokens").iterdir() if path.is_dir()] == []
    assert len(first_rows(open_data())) == 8


def test_a_corpus_without_text_is_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" \n")
    with pytest.raises(DataError, match="holds no text"):
        split_corpus(Files.named(str(path), tmp_path), Fractions(0.2, 0.2))


def test_large_vocabularies_take_four_bytes(tmp_path, jsonl):
    class Wide(type(Bytes())):
        vocab_size = 100_000
        separator = 99_999
        fingerprint = "wide"

    corpus = Files.named(str(jsonl), tmp_path, progress=False)
    prepared = token_shards.prepare_tokens(
        corpus, Wide(), CorpusSplitter(corpus, Fractions(0.2, 0.2)), Cache.at(str(tmp_path)), progress=False
    )
    tokens = prepared.documents("train").tokens
    assert tokens[:1].tolist() == [99_999]
    assert prepared.manifest.arrays["train-tokens"].dtype == "<u4"
