"""Atomic writes of files and folders, locks, and checks of paths that a user gives.

Everything is written under a temporary name in the same folder, flushed to the disk and renamed. A reader
never sees half a file, even after a crash or with a full disk.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maclaurin.errors import InputError, MaclaurinError

_SECONDS_BETWEEN_TRIES = 0.1


class LockedError(MaclaurinError):
    """Another process holds the lock."""


@contextmanager
def new_file(path: Path, *, flush: bool = True) -> Iterator[Path]:
    """A temporary path to write to; its file replaces `path` at the end unless there was an error.

    Without `flush`, the file may have its old content after a crash of the machine.
    """
    temporary = _temporary(path)
    try:
        yield temporary
        if flush:
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
        if flush:
            flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes, *, flush: bool = True) -> None:
    """Write the file atomically; text is encoded as UTF-8, missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, flush=flush) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def new_folder(folder: Path, keep: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """A temporary folder to fill, which replaces `folder` at the end unless there was an error.

    A folder that another process wrote meanwhile stays if `keep(folder)`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(folder)
    temporary.mkdir()
    try:
        yield temporary
        flush_folder(temporary)
        _publish(temporary, folder, keep)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary folders left by processes that were killed while filling this folder."""
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def locked(
    path: Path,
    *,
    timeout: float | None = None,
    required: bool = True,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[bool]:
    """Hold the lock file `path`, which the system releases when the process ends, even after kill -9.

    Raises LockedError if another process still holds it after `timeout` seconds (None waits without a
    limit); `on_wait` is called several times a second meanwhile. Where the file system has no locks it
    raises OSError or NotImplementedError, or yields False if the lock is not `required`.
    """
    from filelock import FileLock

    lock = FileLock(path)
    try:
        _acquire(lock, timeout, on_wait)
    except (OSError, NotImplementedError):
        if required:
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether a process holds this lock now."""
    if not path.exists():
        return False
    try:
        with locked(path, timeout=0.0):
            return False
    except LockedError:
        return True


def flush_folder(folder: Path) -> None:
    """Make renames inside a folder permanent, if the system can (Windows cannot open folders)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _acquire(lock: Any, timeout: float | None, on_wait: Callable[[], None]) -> None:
    import filelock

    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _SECONDS_BETWEEN_TRIES if end is None else min(_SECONDS_BETWEEN_TRIES, end - time.monotonic())
        try:
            lock.acquire(timeout=max(0.0, left), poll_interval=_SECONDS_BETWEEN_TRIES / 2)
            return
        except filelock.Timeout:
            if end is not None and time.monotonic() >= end:
                raise LockedError(f"another process holds {lock.lock_file}.") from None
            on_wait()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")


def _publish(temporary: Path, folder: Path, keep: Callable[[Path], bool]) -> None:
    """Rename `temporary` to `folder`; an existing folder is replaced unless `keep(folder)`."""
    while True:
        try:
            temporary.rename(folder)
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES) or not folder.exists():
                raise
            if keep(folder):
                return
            _remove(folder)
        else:
            flush_folder(folder.parent)
            return


def _remove(folder: Path) -> None:
    """Rename a folder, which is atomic, then delete it."""
    aside = _temporary(folder)
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def read_text(file: Path, parameter: str) -> str:
    """A UTF-8 text file; `parameter` is the name of the parameter that it was given as."""
    require_file(file, parameter)
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as problem:
        raise not_utf8(file, parameter, problem) from None
    except OSError as problem:
        raise InputError(f"`{parameter}`: {file} cannot be read: {problem.strerror}.") from None


def require_file(file: Path, parameter: str) -> None:
    """Raise unless `file` is a file; a name close to it in the same folder is suggested."""
    if file.is_dir():
        raise InputError(f"`{parameter}`: {file} is a folder; name a file.")
    if not file.is_file():
        raise InputError(f"`{parameter}`: there is no file {file}.{near_misses(file)}")


def not_utf8(file: Path, parameter: str, problem: UnicodeDecodeError) -> InputError:
    """The error for a text in another encoding."""
    return InputError(
        f"`{parameter}`: {file} is not UTF-8 text (byte {problem.start} cannot be decoded). Convert it "
        "first, for example with iconv -f latin1 -t utf-8."
    )


def near_misses(path: Path) -> str:
    """' Did you mean …?' with similar names in the same folder, else nothing."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""


def require_writable_folder(folder: Path, parameter: str = "out") -> None:
    """Raise unless files can be written into `folder`; a folder that does not exist is not left behind."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"`{parameter}`: {folder} is a file; name a folder.")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    probe = folder / f".{uuid.uuid4().hex}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise InputError(f"`{parameter}`: {folder} cannot be written: {problem.strerror}.") from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def require_writable_file(file: Path, parameter: str = "out") -> None:
    """Raise unless `file` can be written in a folder that exists."""
    if file.is_dir():
        raise InputError(f"`{parameter}`: {file} is a folder; name a file, such as {file / 'results.json'}.")
    if file.parent.is_file():
        raise InputError(f"`{parameter}`: {file} cannot be written: {file.parent} is a file, not a folder.")
    if not file.absolute().parent.is_dir():
        raise InputError(f"`{parameter}`: there is no folder {file.parent}.{near_misses(file.parent)}")
    require_writable_folder(file.absolute().parent, parameter)
