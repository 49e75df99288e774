"""Files named by a user: checked before work begins, with one clear error."""

from __future__ import annotations

import contextlib
import difflib
import uuid
from pathlib import Path

from maclaurin.errors import InputError


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
