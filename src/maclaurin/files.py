"""Files and folders: written completely or not at all, locked, and checked when a user names them.

Everything is written under a temporary name in the same folder, flushed to the disk and renamed. A reader
never sees half a file, even after a crash or with a full disk.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maclaurin.errors import InputError, MaclaurinError
from maclaurin.progress_bar import Report, report_progress

_SECONDS_BETWEEN_TRIES = 0.1


class StorageError(MaclaurinError):
    """A file or folder that could not be written."""


def write_file(path: Path, content: str | bytes) -> None:
    """Replace the file by this content in one step; text is written as UTF-8."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    """Replace the file by this value as JSON in one step."""
    write_file(path, json.dumps(value, indent=indent) + "\n")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which replaces `folder` at the end unless there was an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(folder)
    temporary.mkdir()
    try:
        yield temporary
        flush_folder(temporary)
        _publish(temporary, folder, lambda _: False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def complete_folder(
    folder: Path,
    fill: Callable[[Path], None],
    is_complete: Callable[[Path], bool],
    *,
    what: str,
    progress: bool = True,
    advice: str = "Free some space.",
) -> None:
    """Make sure that `folder` is complete: if it is not, fill a temporary folder and rename it to `folder`.

    A lock avoids filling it twice. Correctness does not depend on the lock: the first process to rename
    wins, and the others discard theirs. `advice` ends the error message for a full disk.
    """
    if is_complete(folder):
        return
    with locked(folder.with_name(f".{folder.name}.lock"), what, progress=progress) as held:
        if is_complete(folder):
            return
        if held:
            _remove_leftovers(folder)
        temporary = _temporary(folder)
        try:
            temporary.mkdir()
            fill(temporary)
            flush_folder(temporary)
            _publish(temporary, folder, is_complete)
        except OSError as problem:
            raise _explained(problem, folder, advice) from problem
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(path: Path, what: str, *, progress: bool = True) -> Iterator[bool]:
    """Hold the lock file `path`; yields False, without waiting, if the file system has no locks.

    The system releases the lock when its process ends, even after kill -9.
    """
    import filelock

    lock = filelock.FileLock(path)
    with report_progress(f"waiting for the process that prepares {what}", progress) as report:
        held = _acquire(lock, report)
    try:
        yield held
    finally:
        if held:
            lock.release()


def flush_folder(folder: Path) -> None:
    """Make renames inside a folder permanent, if the system can (Windows cannot open folders)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _acquire(lock: Any, report: Report) -> bool:
    import filelock

    while True:
        try:
            lock.acquire(timeout=_SECONDS_BETWEEN_TRIES, poll_interval=_SECONDS_BETWEEN_TRIES / 2)
        except filelock.Timeout:
            report(None)
        except (OSError, NotImplementedError):  # some network file systems
            return False
        else:
            return True


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")


def _remove_leftovers(folder: Path) -> None:
    """Delete temporary folders left by processes that were killed while filling this folder."""
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


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


def _explained(problem: OSError, folder: Path, advice: str) -> StorageError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk of {folder.parent} is full; nothing incomplete was left there. {advice}"
        )
    return StorageError(f"{folder} could not be written: {problem}.")


def read_text(file: Path, option: str) -> str:
    """A UTF-8 text file; `option` is the command-line option that named it."""
    require_file(file, option)
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as problem:
        raise not_utf8(file, option, problem) from None
    except OSError as problem:
        raise InputError(f"{option}: {file} cannot be read: {problem.strerror}.") from None


def require_file(file: Path, option: str) -> None:
    """Raise unless `file` is a file; a name close to it in the same folder is suggested."""
    if file.is_dir():
        raise InputError(f"{option}: {file} is a folder; name a file.")
    if not file.is_file():
        raise InputError(f"{option}: there is no file {file}.{near_misses(file)}")


def not_utf8(file: Path, option: str, problem: UnicodeDecodeError) -> InputError:
    """The error for a text in another encoding."""
    return InputError(
        f"{option}: {file} is not UTF-8 text (byte {problem.start} cannot be decoded). Convert it first, for "
        "example with iconv -f latin1 -t utf-8."
    )


def near_misses(path: Path) -> str:
    """' Did you mean …?' with similar names in the same folder, else nothing."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""


def require_writable_folder(folder: Path, option: str = "--out") -> None:
    """Raise unless files can be written into `folder`; a folder that does not exist is not left behind."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{option}: {folder} is a file; name a folder.")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    probe = folder / f".{uuid.uuid4().hex}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise InputError(f"{option}: {folder} cannot be written: {problem.strerror}.") from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def require_writable_file(file: Path, option: str = "--out") -> None:
    """Raise unless `file` can be written in a folder that exists."""
    if file.is_dir():
        raise InputError(f"{option}: {file} is a folder; name a file, such as {file / 'results.json'}.")
    if file.parent.is_file():
        raise InputError(f"{option}: {file} cannot be written: {file.parent} is a file, not a folder.")
    if not file.absolute().parent.is_dir():
        raise InputError(f"{option}: there is no folder {file.parent}.{near_misses(file.parent)}")
    require_writable_folder(file.absolute().parent, option)
