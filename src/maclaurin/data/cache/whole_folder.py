"""A folder that is there whole or not at all, also when two processes make it at once."""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from maclaurin.data.cache.lock import locked
from maclaurin.data.cache.whole_file import flush_folder
from maclaurin.data.errors import DataError


def make_whole_folder(
    folder: Path,
    fill: Callable[[Path], None],
    is_whole: Callable[[Path], bool],
    *,
    what: str,
    progress: bool = True,
) -> None:
    """See to it that `folder` is whole: if it is not, fill a temporary folder and put it in its place.

    A lock spares the work of filling it twice. Nothing depends on the lock for being right: whoever
    renames first wins, and the other throws its own away.
    """
    if is_whole(folder):
        return
    with locked(folder.with_name(f".{folder.name}.lock"), what, progress=progress) as alone:
        if is_whole(folder):
            return
        if alone:
            _remove_leftovers(folder)
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
        temporary.mkdir()
        try:
            fill(temporary)
            flush_folder(temporary)
            _publish(temporary, folder, is_whole)
        except OSError as problem:
            raise _explained(problem, folder) from problem
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """What processes left behind that were killed while they filled this folder."""
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def _publish(temporary: Path, folder: Path, is_whole: Callable[[Path], bool]) -> None:
    while True:
        try:
            temporary.rename(folder)
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES) or not folder.exists():
                raise
            if is_whole(folder):
                return
            _put_aside(folder)
        else:
            flush_folder(folder.parent)
            return


def _put_aside(broken: Path) -> None:
    """Take an incomplete folder away in one step, then delete it."""
    aside = broken.with_name(f".{broken.name}.{uuid.uuid4().hex}.part")
    try:
        broken.rename(aside)
    except FileNotFoundError:  # another process was faster
        return
    shutil.rmtree(aside, ignore_errors=True)


def _explained(problem: OSError, folder: Path) -> DataError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"the disk of {folder.parent} is full; nothing incomplete was left there. Free some space, "
            "use another folder (cache=/path or MACLAURIN_CACHE), or take fewer documents (limit_documents)."
        )
    return DataError(f"preparing {folder} failed: {problem}.")
