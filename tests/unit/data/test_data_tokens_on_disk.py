"""Tokens on disk: whole or not at all, and never read wrong."""

import errno
import json
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maclaurin.data import DamagedFileError, DataConfig, DataError, open_source
from maclaurin.data.corpora.files import Files
from maclaurin.data.splits import CorpusSplitter, Fractions, split_corpus
from maclaurin.data.tokenizing.byte_tokenizer import Bytes
from maclaurin.data.tokens import prepare
from maclaurin.data.tokens.checked_array import ArrayWriter, CheckedArray


def written(folder, numbers, dtype="<u2", pieces=3):
    writer = ArrayWriter(folder, "x", dtype, block_bytes=32, blocks_per_file=3)
    for piece in np.array_split(np.array(numbers, dtype=np.int64), pieces):
        writer.append(piece)
    return writer.finish()


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 65535), max_size=200),
    st.sampled_from(["<u2", "<u4", "<i8"]),
    st.integers(1, 5),
    st.tuples(st.integers(0, 210), st.integers(0, 210)),
)
def test_a_checked_array_is_sliced_like_a_list(numbers, dtype, pieces, places):
    with tempfile.TemporaryDirectory() as folder:
        array = CheckedArray(Path(folder), written(Path(folder), numbers, dtype, pieces))
        assert len(array) == len(numbers)
        assert array[places[0] : places[1]].tolist() == numbers[places[0] : places[1]]


@settings(max_examples=60)
@given(st.integers(1, 200), st.data())
def test_a_flipped_bit_anywhere_is_noticed_by_whoever_reads_that_block(count, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entry = written(folder, range(count))
        path = data.draw(st.sampled_from(sorted(folder.iterdir())))
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        with pytest.raises(DamagedFileError, match=r"Delete the file") as caught:
            CheckedArray(folder, entry)[:]
        assert str(path) in str(caught.value)


def test_blocks_without_damage_can_still_be_read(tmp_path):
    entry = written(tmp_path, range(200))
    path = tmp_path / "x-00001.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert CheckedArray(tmp_path, entry)[:40].tolist() == list(range(40))


def test_files_have_the_sizes_the_manifest_says(tmp_path):
    entry = written(tmp_path, range(200))
    assert {p.name: p.stat().st_size for p in tmp_path.iterdir()} == entry.file_sizes
    assert len(entry.file_sizes) == 6


# ---------------------------------------------------------------------------------- whole folders


def token_folder(cache):
    (folder,) = [path for path in (cache / "tokens").iterdir() if not path.name.startswith(".")]
    return folder


def first_rows(source):
    return [source.train_row(int(number)).tokens.tolist() for number in source.train_row_numbers(0, 8)]


def test_text_is_tokenized_once(open_data, monkeypatch):
    rows = first_rows(open_data())
    monkeypatch.setattr(prepare, "_fill", lambda *_: pytest.fail("tokenized again"))
    assert first_rows(open_data()) == rows
    assert first_rows(open_data(length=16, rows="documents", seed=5)) != rows


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [Path.unlink, _truncate], ids=["missing", "truncated"])
@pytest.mark.parametrize("name", ["manifest.json", "train-tokens-00000.bin", "test-starts.crc"])
def test_an_incomplete_folder_is_made_again(open_data, cache, damage, name):
    rows = first_rows(open_data())
    damage(token_folder(cache) / name)
    assert first_rows(open_data()) == rows
    assert [path.name for path in (cache / "tokens").glob(".*.part")] == []


def test_a_changed_manifest_is_not_believed(open_data, cache):
    open_data()
    path = token_folder(cache) / "manifest.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "vocab_size": 300}))
    open_data()
    assert json.loads(path.read_text()) == whole


def test_damage_inside_a_file_names_it_and_deleting_it_helps(open_data, cache):
    rows = first_rows(open_data())
    path = token_folder(cache) / "train-tokens-00000.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"train-tokens-00000\.bin is damaged"):
        first_rows(open_data())
    path.unlink()
    assert first_rows(open_data()) == rows


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
    monkeypatch.setattr("maclaurin.data.cache.lock._acquire", lambda *_: False)
    fill, started, published = prepare._fill, [], []

    def slow_fill(*arguments):
        started.append(arguments)
        if len(started) == 1:
            open_data()
            published.append(token_folder(cache).stat().st_ino)
        fill(*arguments)

    monkeypatch.setattr(prepare, "_fill", slow_fill)
    source = open_data()
    assert len(started) == 2
    assert published == [token_folder(cache).stat().st_ino]
    assert len(first_rows(source)) == 8
    assert list((cache / "tokens").glob(".*.part")) == []


def _prepare_forever(jsonl, cache):
    prepare._handfuls = _stuck(prepare._handfuls)
    config = DataConfig(
        data=str(jsonl),
        tokenizer="bytes",
        length=32,
        validation_fraction=0.2,
        test_fraction=0.2,
        cache=str(cache),
    )
    open_source(config, progress=False)


def _stuck(handfuls):
    def stuck(documents):
        yield from handfuls(documents)
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
        patched.setattr(ArrayWriter, "finish", full)
        with pytest.raises(DataError, match=r"is full.*limit_documents"):
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
    prepared = prepare.prepare_tokens(
        corpus, Wide(), CorpusSplitter(corpus, Fractions(0.2, 0.2)), tmp_path, progress=False
    )
    tokens = prepared.manifest.documents(prepared.folder, "train").tokens
    assert tokens[:1].tolist() == [99_999]
    assert prepared.manifest.arrays["train-tokens"].dtype == "<u4"
