"""Find a study by name or path, and the user code that its runs need."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import maclaurin
from maclaurin.errors import InputError
from maclaurin.extensions import Extension, explained, load_extension
from maclaurin.study.design import Study
from maclaurin.wording import did_you_mean

FILE = "study.py"
#: prefix of the name of a study that comes with the package
PACKAGED = "maclaurin:"


def load_study(name_or_path: str | Path) -> Study:
    """The study of that name, or in that file or folder."""
    return read_study_file(find_study(str(name_or_path)))


def find_study(name_or_path: str) -> Path:
    """The file of a study: an existing path, else found by name."""
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
    """Folder name → file; a study in the current folder hides one of the same name elsewhere."""
    found: dict[str, Path] = {}
    for root in _roots():
        for file in sorted(root.glob(f"*/{FILE}")):
            found.setdefault(_plain(file.parent.name), file)
    return dict(sorted(found.items()))


def read_study_file(file: Path) -> Study:
    """Run the file and return its `study`. It can import files from its folder and the folder above."""
    extension = study_extension(file)
    with explained(file):
        module = load_extension(extension)
    study = getattr(module, "study", None)
    if not isinstance(study, Study):
        raise InputError(
            f"{file} defines no study: it must say `study = Study(...)` (maclaurin.study.Study)."
        )
    study = dataclasses.replace(study, file=file)
    for imported in imports_of(study):
        with explained(file):
            load_extension(imported)
    return study


def _roots() -> list[Path]:
    """The current folder, then the folders of the package."""
    return [root for root in (Path("studies"), *_package_roots()) if root.is_dir()]


def _package_roots() -> tuple[Path, ...]:
    """The folder in a wheel, and the one in the repository of an editable install."""
    package = Path(maclaurin.__file__).parent
    return package / "studies", package.parents[1] / "studies"


def source_name(file: Path | None) -> str:
    """The name under which a study's file is recorded: relative to this folder, or a study of the package."""
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


def study_extension(file: Path) -> Extension:
    """The study's file as a module, named after its folder."""
    stem = _plain(file.resolve().parent.name) if file.name == FILE else file.stem
    return Extension.of_file(file, f"maclaurin_study_{stem.replace('-', '_')}")


def imports_of(study: Study) -> tuple[Extension, ...]:
    """The modules and files that the study names under `imports`, in order."""
    folder = study.file.parent if study.file is not None else Path()
    found = []
    for name in study.imports:
        file = folder / name
        if file.suffix == ".py":
            if not file.is_file():
                raise InputError(f"imports names {name!r}, but there is no such file in {folder}.")
            found.append(Extension.of_file(file))
        else:
            found.append(Extension(name=name, path=str(folder / FILE)))
    return tuple(found)
