"""From a name or a path to the study: studies/NAME/study.py here, or the one the package brings along."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

import maclaurin
from maclaurin.errors import InputError, MaclaurinError, did_you_mean
from maclaurin.study.design import Study

FILE = "study.py"


def load_study(name_or_path: str) -> Study:
    """The study of that name, or in that file or folder."""
    return read_study_file(find_study(name_or_path))


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
        f"there is no study {name_or_path!r}: it is neither a file nor a folder with a {FILE}, nor one of "
        f"{', '.join(known) or 'the known ones, of which there are none here'}."
        f"{did_you_mean(wanted, [_plain(name) for name in known])}"
    )


def known_studies() -> dict[str, Path]:
    """Folder name → file; a study of the current folder goes before one of the same name elsewhere."""
    found: dict[str, Path] = {}
    for root in _roots():
        for file in sorted(root.glob(f"*/{FILE}")):
            found.setdefault(_plain(file.parent.name), file)
    return dict(sorted(found.items()))


def read_study_file(file: Path) -> Study:
    """Run the file; its `study` is what counts."""
    name = f"maclaurin_study_{_plain(file.resolve().parent.name).replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file} is no Python file, so it cannot be a study.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except MaclaurinError as problem:
        raise InputError(f"{file}: {problem}") from None
    except Exception as problem:  # whatever the author's code raises
        raise InputError(
            f"{file}{_line(problem, file)} fails: {type(problem).__name__}: {problem}"
        ) from problem
    finally:
        del sys.modules[name]
    study = getattr(module, "study", None)
    if not isinstance(study, Study):
        raise InputError(
            f"{file} defines no study: it must say `study = Study(...)` (maclaurin.study.Study)."
        )
    return study


def _roots() -> list[Path]:
    """Here, then in a wheel, then in the repository of an editable install."""
    package = Path(maclaurin.__file__).parent
    roots = [Path("studies"), package / "studies", package.parents[1] / "studies"]
    return [root for root in roots if root.is_dir()]


def _plain(name: str) -> str:
    return name.strip("/").replace("_", "-")


def _line(problem: BaseException, file: Path) -> str:
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if f.filename == str(file)]
    return f", line {frames[-1].lineno}" if frames else ""
