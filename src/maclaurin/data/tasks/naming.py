"""From what the user writes to the task: `mqar:pairs=8,length=128`."""

from __future__ import annotations

from maclaurin.data.options import read_options, split_options
from maclaurin.data.tasks.induction import Induction
from maclaurin.data.tasks.recall import Recall
from maclaurin.data.tasks.selective_copy import SelectiveCopy
from maclaurin.data.tasks.state_tracking import StateTracking
from maclaurin.data.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    task.notation: task for task in (Recall, Induction, SelectiveCopy, StateTracking)
}
SHORT_NAMES: dict[str, tuple[str, dict[str, str]]] = {"parity": ("state", {"group": "Z2"})}
TASK_NAMES = (*TASKS, *SHORT_NAMES)


def is_task(written: str) -> bool:
    """Whether this names a task."""
    return written.partition(":")[0] in TASK_NAMES


def open_task(written: str, length: int) -> Task:
    """The task with its options; `length` is the row's unless an option says otherwise."""
    name, values = split_options(written)
    notation, preset = SHORT_NAMES.get(name, (name, {}))
    return read_options(TASKS[notation], name, {"length": str(length), **preset, **values})
