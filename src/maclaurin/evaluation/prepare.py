"""Our tasks as the harness reads them: a folder of YAML and JSON lines, made once and kept in the cache.

The text is the running Python's own standard library, so that other versions of Python make other items:
each task's fingerprint says which ones a result is about.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from maclaurin.data.cache_folder import Cache
from maclaurin.data.config import DataConfig
from maclaurin.data.corpus import Corpus
from maclaurin.data.errors import DataError
from maclaurin.data.fingerprint import digest
from maclaurin.data.splits import hash_share
from maclaurin.data.standard_library import StandardLibrary
from maclaurin.evaluation.own_task import OwnTask, Text
from maclaurin.evaluation.prose import docstrings
from maclaurin.evaluation.task_set import OWN_TASKS, VERSION
from maclaurin.files import complete_folder

MANIFEST = "manifest.json"
#: share of the files, chosen by their hash, whose docstrings are read: enough, and twice as quick as all
PROSE = 0.4
_TEMPLATES = resources.files("maclaurin.evaluation") / "tasks"


def prepared_tasks(seed: int, *, corpus: Corpus | None = None, cache: str | None = None) -> Path:
    """The folder with every task of our own for this seed."""
    text = corpus or StandardLibrary()
    room = Cache.at(cache).root / "evaluation"
    room.mkdir(parents=True, exist_ok=True)
    key = digest({"version": VERSION, "seed": seed, "text": text.fingerprint, "templates": _templates()})
    folder = room / key[:32]
    complete_folder(folder, lambda place: _fill(place, folder, text, seed), _is_whole, what="the tasks")
    return folder


def task_fingerprints(folder: Path) -> dict[str, str]:
    """Task → sha256 of its items."""
    return json.loads((folder / MANIFEST).read_text())["tasks"]


def task_text(corpus: Corpus) -> Text:
    """What of a corpus tasks are made of."""
    sources = [document.text for document in corpus.documents()]
    return Text(
        prose=list(docstrings(source for source in sources if hash_share(source) < PROSE)),
        held_out=[source for source in sources if hash_share(source) < DataConfig.test_fraction],
    )


def _fill(place: Path, folder: Path, corpus: Corpus, seed: int) -> None:
    """Write into `place`, which becomes `folder`."""
    text = task_text(corpus)
    if not text.prose or not text.held_out:
        raise DataError(
            "the standard library of this Python has too little text to make tasks of (is it reduced?). "
            "Use a whole Python, or tasks of your own with --include-path."
        )
    fingerprints = {}
    for task in OWN_TASKS.values():
        lines = "".join(json.dumps(item) + "\n" for item in task.items(text, seed))
        (place / f"{task.name}.jsonl").write_text(lines)
        (place / f"{task.name}.yaml").write_text(_yaml(task, folder / f"{task.name}.jsonl"))
        fingerprints[task.name] = hashlib.sha256(lines.encode()).hexdigest()
    for group in (_TEMPLATES / "groups").iterdir():
        (place / group.name).write_text(group.read_text())
    facts: dict[str, Any] = {"version": VERSION, "seed": seed, "text": corpus.fingerprint}
    (place / MANIFEST).write_text(json.dumps({**facts, "tasks": fingerprints}, indent=1) + "\n")


def _yaml(task: OwnTask, data: Path) -> str:
    template = Template((_TEMPLATES / task.template).read_text())
    return template.substitute(name=task.name, data=data.as_posix(), version=VERSION)


def _templates() -> dict[str, str]:
    places = [_TEMPLATES, _TEMPLATES / "groups"]
    files = [file for place in places for file in place.iterdir() if file.name.endswith(".yaml")]
    return {file.name: file.read_text() for file in files}


def _is_whole(folder: Path) -> bool:
    try:
        known = task_fingerprints(folder)
        found = {n: hashlib.sha256((folder / f"{n}.jsonl").read_bytes()).hexdigest() for n in known}
    except (OSError, ValueError, KeyError):
        return False
    return found == known
