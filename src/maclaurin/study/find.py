"""From a name or a path to a study, and to the code of one's own that its runs need."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import maclaurin
from maclaurin.errors import InputError, MaclaurinError, did_you_mean
from maclaurin.study.design import Study
from maclaurin.study.run_record import digest

FILE = "study.py"
#: begins the name of a study that comes with the package
PACKAGED = "maclaurin:"


def load_study(name_or_path: str | Path) -> Study:
    """The study of that name, or in that file or folder."""
    return read_study_file(find_study(str(name_or_path)))


def find_study(name_or_path: str) -> Path:
    """Its file: a path that exists, else by name."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    if (path / FILE).is_file():
        return path / FILE
    known = known_studies()
    wanted = _plain(name_or_path)
    for name, file in known.items():
        if _plain(name) == wanted:
            return file
    raise InputError(
        f"there is no study {name_or_path!r}: it is neither a file nor a folder with a {FILE}, and the known "
        f"studies are {', '.join(known) or 'none'}.{did_you_mean(wanted, map(_plain, known))}"
    )


def known_studies() -> dict[str, Path]:
    """Folder name → file; a study of the current folder goes before one of the same name elsewhere."""
    found: dict[str, Path] = {}
    for root in _roots():
        for file in sorted(root.glob(f"*/{FILE}")):
            found.setdefault(_plain(file.parent.name), file)
    return dict(sorted(found.items()))


def read_study_file(file: Path) -> Study:
    """Run the file; its `study` is what counts. It may import files beside it and in the folder above."""
    code = OwnCode.of_file(file)
    with _explained(file):
        module = load_code(code)
    study = getattr(module, "study", None)
    if not isinstance(study, Study):
        raise InputError(
            f"{file} defines no study: it must say `study = Study(...)` (maclaurin.study.Study)."
        )
    study = dataclasses.replace(study, file=file)
    for own in own_code(study):
        with _explained(file):
            load_code(own)
    return study


def _roots() -> list[Path]:
    """Here, then those of the package."""
    return [root for root in (Path("studies"), *_package_roots()) if root.is_dir()]


def _package_roots() -> tuple[Path, ...]:
    """In a wheel, and in the repository of an editable install."""
    package = Path(maclaurin.__file__).parent
    return package / "studies", package.parents[1] / "studies"


def source_name(file: Path | None) -> str:
    """How a study's file is remembered: relative to this folder, or as a study of the package."""
    if file is None:
        return ""
    here = file.resolve()
    if here.is_relative_to(Path.cwd()):
        return here.relative_to(Path.cwd()).as_posix()
    if any(here.is_relative_to(root.resolve()) for root in _package_roots()):
        return f"{PACKAGED}{here.parent.name}/{here.name}"
    return Path(os.path.relpath(here)).as_posix()


def source_file(source: str) -> Path | None:
    """The file that `source_name` named, if it is still there."""
    name = source.removeprefix(PACKAGED)
    candidates = [root / name for root in _package_roots()] if name != source else [Path(source)]
    return next((file for file in candidates if source and file.is_file()), None)


def _plain(name: str) -> str:
    return name.strip("/").replace("_", "-")


@contextlib.contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Whatever the author's code raises, as one error with the line."""
    try:
        yield
    except (Exception, SystemExit) as problem:
        what = str(problem) if isinstance(problem, MaclaurinError) else f"{type(problem).__name__}: {problem}"
        raise InputError(f"{file}{_line(problem, file)}: {what}") from problem


def _line(problem: BaseException, file: Path) -> str:
    if isinstance(problem, SyntaxError):
        return f", line {problem.lineno}"
    places = {str(file), str(file.resolve())}
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if f.filename in places]
    return f", line {frames[-1].lineno}" if frames else ""


# ------------------------------------------------------------------------- code of one's own


@final
@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """A module that is not maclaurin's: by name, or as a file whose text travels with it."""

    name: str
    path: str | None = None
    source: str | None = None

    @classmethod
    def of_file(cls, file: Path) -> OwnCode:
        """The file as a module of its own name: its folder's for a study.py."""
        stem = _plain(file.resolve().parent.name) if file.name == FILE else file.stem
        prefix = "maclaurin_study" if file.name == FILE else "maclaurin_own"
        name = f"{prefix}_{stem.replace('-', '_')}"
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise InputError(f"{file} cannot be read as Python: {problem}.") from None
        return cls(name=name, path=str(file), source=source)


def own_code(study: Study) -> tuple[OwnCode, ...]:
    """What the study names under `imports`, in order."""
    folder = study.file.parent if study.file is not None else Path()
    found = []
    for name in study.imports:
        file = folder / name
        if file.suffix == ".py":
            if not file.is_file():
                raise InputError(f"imports names {name!r}, and there is no such file in {folder}.")
            found.append(OwnCode.of_file(file))
        else:
            found.append(OwnCode(name=name, path=str(folder / FILE)))
    return tuple(found)


def load_code(code: OwnCode) -> types.ModuleType:
    """Import it. Files beside it, and in the folder above, can be imported while it loads."""
    with _importable(code.path):
        if code.source is None:
            return importlib.import_module(code.name)
        module = types.ModuleType(code.name)
        module.__file__ = code.path
        sys.modules[code.name] = module
        exec(compile(code.source, code.path or code.name, "exec"), module.__dict__)
        return module


@contextlib.contextmanager
def _importable(path: str | None) -> Iterator[None]:
    """As for a script: its folder, and the one above, lead sys.path while it loads."""
    if path is None:
        yield
        return
    folders = [str(folder) for folder in Path(path).resolve().parents[:2]]
    _evict_namesakes(folders)
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(folder)


def _evict_namesakes(folders: list[str]) -> None:
    """Forget modules of another study that have the name of a file here."""
    for file in (file for folder in folders for file in Path(folder).glob("*.py")):
        known = getattr(sys.modules.get(file.stem), "__file__", None)
        if known and Path(known) != file and str(Path(known).parent) not in sys.path:
            del sys.modules[file.stem]


def parts_digest(specs: Sequence[Any], code: Sequence[OwnCode]) -> str | None:
    """Digest of the source of all parts in these specs that are not maclaurin's; None without any."""
    modules = sorted({name for spec in specs for name in _modules_of(spec)})
    if not modules:
        return None
    sources = {own.name: own.source for own in code if own.source is not None}
    return digest({name: sources.get(name) or _source_of(name) for name in modules})


def _modules_of(value: Any) -> Iterator[str]:
    """Modules of the classes a spec is made of, without maclaurin's own."""
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
