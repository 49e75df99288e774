"""Atomic files and folders, and locks."""

import errno
import multiprocessing
import os
import time

import pytest

from maclaurin.data.cache_folder import StorageError, complete_folder, preparing
from maclaurin.files import LockedError, is_locked, locked, new_file, new_folder, write_file
from maclaurin.plain_data import write_json


def leftovers(folder):
    return list(folder.glob(".*.part"))


@pytest.mark.parametrize(("content", "stored"), [("größe\n", "größe\n".encode()), (b"\x00\xff", b"\x00\xff")])
def test_text_is_utf8_and_bytes_are_bytes(tmp_path, content, stored):
    path = tmp_path / "new" / "file"
    write_file(path, content)
    assert path.read_bytes() == stored
    write_file(path, "again")
    assert path.read_text(encoding="utf-8") == "again"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, "new")
    assert path.read_text(encoding="utf-8") == '{\n "a": 1\n}\n'
    assert leftovers(tmp_path) == []


def test_another_program_may_write_the_file(tmp_path):
    path = tmp_path / "file"
    with new_file(path, flush=False) as temporary:
        temporary.write_text("new", encoding="utf-8")
        assert not path.exists()
    with pytest.raises(UnicodeEncodeError), new_file(path) as temporary:
        temporary.write_text("half ü", encoding="ascii")
    assert path.read_text(encoding="utf-8") == "new"
    assert leftovers(tmp_path) == []


def test_a_new_folder_replaces_the_old_one_at_the_end(tmp_path):
    folder = tmp_path / "folder"
    for content in ("first", "second"):
        with new_folder(folder) as place:
            (place / content).write_text(content, encoding="utf-8")
            assert not (folder / content).exists()
        assert [path.name for path in folder.iterdir()] == [content]
    with pytest.raises(RuntimeError), new_folder(folder):
        raise RuntimeError
    assert [path.name for path in folder.iterdir()] == ["second"]
    assert leftovers(tmp_path) == []


def test_a_complete_folder_is_not_filled_again(tmp_path):
    folder, filled = tmp_path / "folder", []

    def fill(place):
        filled.append(place)
        (place / "done").write_text("", encoding="utf-8")

    for _ in range(2):
        complete_folder(folder, fill, lambda place: (place / "done").exists(), what="it", progress=False)
    assert len(filled) == 1
    (folder / "done").unlink()
    complete_folder(folder, fill, lambda place: (place / "done").exists(), what="it", progress=False)
    assert len(filled) == 2


@pytest.mark.parametrize(
    ("code", "message"), [(errno.ENOSPC, "is full.*Use another disk"), (errno.EIO, "could not be written")]
)
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, code, message):
    def fill(place):
        raise OSError(code, "problem")

    with pytest.raises(StorageError, match=message):
        complete_folder(
            tmp_path / "f", fill, lambda _: False, what="it", progress=False, advice="Use another disk."
        )
    assert leftovers(tmp_path) == []


def _hold(path, ready):
    with locked(path):
        ready.set()
        time.sleep(60)


def test_a_lock_is_free_again_after_its_process_was_killed(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "lock", ready))
    holder.start()
    assert ready.wait(60)
    waits = []
    assert is_locked(tmp_path / "lock")
    with pytest.raises(LockedError), locked(tmp_path / "lock", timeout=0.2, on_wait=lambda: waits.append(1)):
        pass
    assert waits
    with locked(tmp_path / "lock", on_wait=holder.kill) as held:
        assert held
    holder.join()
    assert not is_locked(tmp_path / "lock")


def test_missing_locks_are_reported(tmp_path, monkeypatch):
    import filelock

    monkeypatch.setattr(filelock.FileLock, "acquire", lambda *_, **__: _full())
    with preparing(tmp_path / "file", "it", progress=False) as held:
        assert not held
    with pytest.raises(OSError, match="No space"), locked(tmp_path / "lock"):
        pass


def _full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
