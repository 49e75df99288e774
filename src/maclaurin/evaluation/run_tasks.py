"""Our tasks at the end of a training run: which there are, whether they fit, and the answers.

Tasks have their names in `maclaurin eval` without the first word: lines_32, induction_16, cloze.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

from maclaurin.errors import InputError, did_you_mean
from maclaurin.evaluation.eval_task import (
    PREFIX,
    AskedTask,
    Item,
    Way,
    asked_task,
    items_digest,
    listed_tasks,
)
from maclaurin.evaluation.evaluate import EvaluationRequest
from maclaurin.evaluation.prose import Prose
from maclaurin.evaluation.results import TaskResult

#: numbers that a task gives, by the way it is asked
_NUMBERS: dict[Way, tuple[str, ...]] = {
    "choices": ("acc", "log_odds"),
    "endings": ("acc", "log_odds"),
    "written": ("exact_match",),
    "text": ("bits_per_byte", "byte_perplexity", "word_perplexity"),
}


def run_task(name: str) -> AskedTask:
    """The task of that name, or an error that names those close to it."""
    found = asked_task(PREFIX + name)
    if found is None:
        known = [task.name.removeprefix(PREFIX) for task in listed_tasks()]
        raise InputError(
            f"there is no task {name!r} for runs.{did_you_mean(name, known)} "
            f"`maclaurin eval --list` shows them; here they are named without {PREFIX}."
        )
    return found


def numbers_of(name: str) -> tuple[str, ...]:
    """The names of the numbers in a result of the task."""
    (item,) = task_items(name, 1, 0)
    way = run_task(name).way
    gain = ("log_odds_gain",) if way == "choices" and item.without is not None else ()
    return (*_NUMBERS[way], *gain)


def task_items(name: str, number: int, seed: int) -> tuple[Item, ...]:
    """The items a run is asked: at most `number`."""
    items = tuple(islice(run_task(name).task.items(Prose.embedded(), seed), number))
    if not items:
        raise InputError(f"the task {name} has no items on this machine.")
    return items


@cache
def items_fingerprint(name: str, number: int, seed: int) -> str:
    """A digest of the items."""
    return items_digest(task_items(name, number, seed))[:32]


def longest_text(name: str, number: int, seed: int, encode: Callable[[str], Sequence[int]]) -> int:
    """Tokens of the longest text that a model reads at once for the task; 0 if it is read in windows."""
    way = run_task(name).way
    if way == "text":
        return 0
    texts = (text for item in task_items(name, number, seed) for text in _texts(item, way))
    return max(len(encode(text)) for text in texts)


def _texts(item: Item, way: Way) -> list[str]:
    pairs = [(query, choice) for query in item.queries for choice in query.choices]
    if way == "endings":
        return [f"{item.context}{choice} {query.prompt}" for query, choice in pairs]
    return [f"{item.context}{query.prompt_for(way)} {choice}" for query, choice in pairs]


def ask_run(
    folder: Path, names: Sequence[str], *, items: int, seed: int, max_length: int, device: str
) -> Mapping[str, TaskResult]:
    """Name → result, as `maclaurin eval FOLDER` with these options gives it."""
    request = EvaluationRequest(
        model=str(folder),
        tasks=tuple(PREFIX + name for name in names),
        limit=items,
        max_length=max_length,
        device=device,
        seed=seed,
    )
    return {name.removeprefix(PREFIX): result for name, result in request.run().tasks.items()}
