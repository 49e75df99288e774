"""From the names of tasks to the harness's tasks: ours, those in local files, those it brings."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from urllib.parse import urlsplit

from maclaurin.errors import InputError, did_you_mean
from maclaurin.evaluation.quiet import quieten
from maclaurin.evaluation.task_set import OWN_GROUPS, OWN_TASKS, is_own

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

#: kinds of data set that are files, not names on the hub
_FILES = ("json", "csv", "parquet", "text", "arrow", "pandas")


@final
@dataclass
class FoundTasks:
    """Single tasks in the order they were asked for, and the groups that sum some of them up."""

    tasks: dict[str, Task] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)


def find_tasks(names: Sequence[str], own: Path, include: Sequence[Path]) -> FoundTasks:
    """All of them, with their data; an error names the first that cannot be had."""
    for place in include:
        if not place.is_dir():
            raise InputError(f"--include-path: there is no folder {place}.")
    if not all(is_own(name) for name in names):
        offline_if_the_hub_is_away()
    quieten()
    manager = _manager(names, [own, *include])
    found = FoundTasks()
    for name in dict.fromkeys(names):
        loaded = _load(manager, name, include)
        found.tasks |= loaded["tasks"]
        found.groups |= loaded.get("groups", {})
    return found


def local_tasks(include: Sequence[Path]) -> list[str]:
    """Names of tasks and groups in these folders."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(include), include_defaults=False).all_tasks


def offline_if_the_hub_is_away() -> None:
    """Where the hub has no address here, do not try it six times for each file; its cache still serves.

    Only tells libraries that are not imported yet.
    """
    if any(os.environ.get(f"{kind}_proxy".upper()) for kind in ("http", "https", "all")):
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _manager(names: Sequence[str], folders: Sequence[Path]) -> TaskManager:
    """The index of the folders; the harness's own 14,000 tasks are indexed only if a name is not there."""
    from lm_eval.tasks import TaskManager

    local = TaskManager(include_path=list(folders), include_defaults=False)
    if all(name in local.task_index or Path(name).is_file() for name in names):
        return local
    full = TaskManager(include_path=list(folders))
    for name in names:
        if name not in full.task_index and not Path(name).is_file():
            near = did_you_mean(name, [*OWN_TASKS, *OWN_GROUPS, *local.all_tasks])
            raise InputError(
                f"there is no task {name!r}.{near or did_you_mean(name, full.all_tasks)} `maclaurin eval "
                "--list` shows ours, `lm-eval ls tasks` those of the harness; --include-path DIR brings in "
                "YAML files."
            )
    return full


def _load(manager: TaskManager, name: str, include: Sequence[Path]) -> Any:
    try:
        with _beside(manager, name, include):
            return manager.load([name])
    except Exception as problem:  # whatever a data set's own code, its files or the hub's client raise
        raise _explained(manager, name, problem) from problem


@contextlib.contextmanager
def _beside(manager: TaskManager, name: str, include: Sequence[Path]) -> Iterator[None]:
    """In the folder of the task's YAML file, so that it may name data files that lie beside it."""
    entry = manager.task_index.get(name)
    place = entry.yaml_path if entry else Path(name)
    local = entry is None or (place is not None and any(place.is_relative_to(folder) for folder in include))
    with contextlib.chdir(place.resolve().parent) if local and place else contextlib.nullcontext():
        yield


def _explained(manager: TaskManager, name: str, problem: Exception) -> InputError:
    entry = manager.task_index.get(name)
    path = (entry.cfg or {}).get("dataset_path") if entry else None
    first = (str(problem).strip().splitlines() or [type(problem).__name__])[0][:300]
    if isinstance(problem, ImportError):
        return InputError(f"the task {name} needs more than is installed: {first}")
    if path not in _FILES and _speaks_of_the_hub(problem):
        return InputError(
            f"the task {name} needs {f'the data set {path}' if path else 'data'} from the Hugging Face hub, "
            f"which cannot be reached from here and is not in its cache ({first}). Run it where it can be "
            "reached, or take tasks that need none: --tasks maclaurin, or YAML and JSON files of your own "
            "with --include-path."
        )
    return InputError(f"the task {name} cannot be loaded: {type(problem).__name__}: {first}")


def _speaks_of_the_hub(problem: BaseException | None) -> bool:
    while problem is not None:
        kind = type(problem)
        library = kind.__module__.split(".")[0]
        if isinstance(problem, ConnectionError) or library in (
            "requests",
            "httpx",
            "httpx2",
            "huggingface_hub",
        ):
            return True
        if library == "datasets" and "NotFound" in kind.__name__:
            return True
        problem = problem.__cause__ or problem.__context__
    return False
