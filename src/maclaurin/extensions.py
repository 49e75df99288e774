"""User-defined parts: where they are defined, and how commands, workers and saved models load them.

A part is available once the module that registers it is imported. A command imports modules named by
`--import`, installed packages name theirs as entry points of the group `maclaurin.parts`, and a study sends
its workers the modules of its specs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError, MaclaurinError

ENTRY_POINTS = "maclaurin.parts"
#: prefix of the module name of a file loaded by its path
_FILE_PREFIX = "maclaurin_own_"
#: name in such a module that holds its Extension
_LOADED_FROM = "__maclaurin_extension__"


@final
@dataclass(frozen=True, kw_only=True)
class Extension:
    """A module from outside maclaurin: by name, or as a file together with its text.

    name     of the module
    path     its file; for a module by name, a file next to it or the folder it is imported from
    source   the text of the file; None for a module that is imported by name
    """

    name: str
    path: str | None = None
    source: str | None = None

    @classmethod
    def of_file(cls, file: Path, name: str | None = None) -> Extension:
        """The file as a module named after it, or `name`."""
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise InputError(f"{file} cannot be read as Python: {problem}.") from None
        return cls(name=name or f"{_FILE_PREFIX}{file.stem}", path=str(file), source=source)

    @property
    def shown(self) -> str:
        """Its name for messages: the file, or the module."""
        return self.path if self.source is not None and self.path else self.name


def load_extension(extension: Extension) -> types.ModuleType:
    """Import it. It can import files in its folder and in the folder above."""
    with _importable(extension.path):
        if extension.source is None:
            return importlib.import_module(extension.name)
        module = types.ModuleType(extension.name)
        module.__file__ = extension.path
        module.__dict__[_LOADED_FROM] = extension
        sys.modules[extension.name] = module
        exec(compile(extension.source, extension.path or extension.name, "exec"), module.__dict__)
        return module


def load_named(names: Iterable[str]) -> None:
    """Import the modules or .py files that `--import` names."""
    for name in names:
        file = Path(name)
        if file.suffix == ".py" and not file.is_file():
            raise InputError(f"--import: there is no file {name}.")
        extension = (
            Extension.of_file(file) if file.suffix == ".py" else Extension(name=name, path=str(Path.cwd()))
        )
        with explained(file, f"--import {name}"):
            load_extension(extension)


@cache
def load_entry_points() -> None:
    """Import the parts of installed packages, once per process."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        with explained(Path(point.value), f"the entry point {point.name} of {ENTRY_POINTS}"):
            point.load()


@contextlib.contextmanager
def explained(file: Path, what: str | None = None) -> Iterator[None]:
    """Turn any error of a user's code into one message with the line in `file`."""
    try:
        yield
    except (Exception, SystemExit) as problem:
        text = str(problem) if isinstance(problem, MaclaurinError) else f"{type(problem).__name__}: {problem}"
        raise InputError(f"{what or file}{_line(problem, file)}: {text}") from problem


def _line(problem: BaseException, file: Path) -> str:
    if isinstance(problem, SyntaxError):
        return f", line {problem.lineno}"
    places = {str(file), str(file.resolve())}
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if f.filename in places]
    return f", line {frames[-1].lineno}" if frames else ""


# ------------------------------------------------------------------------- modules of a spec


def extensions_of(specs: Iterable[Any]) -> tuple[Extension, ...]:
    """The loaded modules that define parts of these specs, without maclaurin's own."""
    return tuple(_loaded(name) for name in sorted({name for spec in specs for name in _modules_of(spec)}))


def source_digest(specs: Sequence[Any]) -> str | None:
    """Digest of the source of all parts in these specs that are not maclaurin's; None without any."""
    found = extensions_of(specs)
    if not found:
        return None
    sources = {extension.name: extension.source or _source_of(extension.name) for extension in found}
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()


def _loaded(name: str) -> Extension:
    """The extension that a module in sys.modules was loaded from."""
    module = sys.modules.get(name)
    found = getattr(module, _LOADED_FROM, None)
    if found is not None:
        return found
    file = getattr(module, "__file__", None)
    if file is None:
        return Extension(name=name)
    depth = name.count(".") + (Path(file).name == "__init__.py")
    return Extension(name=name, path=str(Path(file).resolve().parents[depth]))


def _modules_of(value: Any) -> Iterator[str]:
    """Modules of the classes a spec is made of, without maclaurin's own."""
    if isinstance(value, tuple):
        for item in value:
            yield from _modules_of(item)
    if not dataclasses.is_dataclass(value):
        return
    module = type(value).__module__
    if module.partition(".")[0] != "maclaurin":
        yield module
    for part in dataclasses.fields(value):
        yield from _modules_of(getattr(value, part.name))


def _source_of(name: str) -> str:
    try:
        return inspect.getsource(sys.modules[name])
    except (KeyError, OSError, TypeError):
        return name


# ------------------------------------------------------------------------------------- sys.path


@contextlib.contextmanager
def _importable(path: str | None) -> Iterator[None]:
    """Put the folder of the file, and the one above, first in sys.path while it loads, as for a script."""
    if path is None:
        yield
        return
    place = Path(path).resolve()
    folders = [str(place)] if place.is_dir() else [str(folder) for folder in place.parents[:2]]
    _evict_namesakes(folders)
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(folder)


def _evict_namesakes(folders: list[str]) -> None:
    """Remove from sys.modules those of another study that share a name with a file here."""
    for file in (file for folder in folders for file in Path(folder).glob("*.py")):
        known = getattr(sys.modules.get(file.stem), "__file__", None)
        if known and Path(known) != file and str(Path(known).parent) not in sys.path:
            del sys.modules[file.stem]
