"""A task is a list of items that depends only on a seed and a text, not on tokenizer or model.

    item = a context that is read once, and queries about it
    query = a prompt after the context, choices for what follows it, and which of them are right

A task is scored in one of four modes: by the likelihood of the choices, by the likelihood of one ending after
each of the choices, by what the model writes after the prompt, or by the likelihood of the context itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, final

from maclaurin.data.recall_rows import WORDS
from maclaurin.errors import InputError
from maclaurin.evaluation.prose import Prose
from maclaurin.plain_data import to_plain
from maclaurin.wording import did_you_mean

PREFIX = "maclaurin_"
#: default number of items of a task
ITEMS = 200
#: raised whenever an item of any task changes
VERSION = "2.0"

ScoringMode = Literal["choices", "endings", "written", "text"]


@final
@dataclass(frozen=True)
class Query:
    """One question.

    prompt        text after the context; for endings, the ending that is scored after each choice
    choices       possible continuations of the prompt, after a space; for endings, beginnings after the
                  context, one of which belongs to the ending
    right         which choices are right
    written       another prompt for a model that writes its answer; empty: the same
    known_until   characters of the context up to which everything needed to answer has appeared
    """

    prompt: str
    choices: tuple[str, ...]
    right: tuple[int, ...]
    written: str = ""
    known_until: int | None = None

    @property
    def answers(self) -> tuple[str, ...]:
        """The right choices."""
        return tuple(self.choices[i] for i in self.right)

    def prompt_for(self, mode: ScoringMode) -> str:
        """The text after the context."""
        return self.written or self.prompt if mode == "written" else self.prompt


@final
@dataclass(frozen=True)
class Item:
    """A context with queries about it.

    without   a short text without the answers, after which the same queries are asked; None: no such text
    """

    context: str
    queries: tuple[Query, ...] = ()
    without: str | None = ""


@dataclass(frozen=True)
class TextTask(ABC):
    """One kind of task at one size. A subclass with the decorator `register` has a name on the command line.

    size    in tokens or words, as `measures` says; 0 if the kind has no sizes
    kind    name of the kind
    sizes   those listed by default; any from `smallest` to `largest` works
    modes   scoring modes that it supports
    """

    size: int = 0
    kind: ClassVar[str]
    sizes: ClassVar[tuple[int, ...]] = ()
    modes: ClassVar[tuple[ScoringMode, ...]] = ("choices", "written")
    smallest: ClassVar[int] = 1
    largest: ClassVar[int] = 1 << 20

    @property
    @abstractmethod
    def measures(self) -> str:
        """Short description for listings."""

    @property
    @abstractmethod
    def guess(self) -> float:
        """Accuracy of a guess among the choices."""

    @abstractmethod
    def items(self, prose: Prose, seed: int) -> Iterator[Item]:
        """Endless items, or as many as there are; the same for the same arguments on every machine."""


_KINDS: dict[str, type[TextTask]] = {}
T = TypeVar("T", bound=type[TextTask])


def register(kind: str) -> Callable[[T], T]:
    """Class decorator: makes `maclaurin_KIND_SIZE` a task."""

    def add(task: T) -> T:
        task.kind = kind
        _KINDS[kind] = task
        return task

    return add


def kinds() -> dict[str, type[TextTask]]:
    """All registered kinds by name."""
    return dict(_KINDS)


@final
@dataclass(frozen=True)
class TaskInMode:
    """A task and its scoring mode; `maclaurin_recall_256_exact` is recall_256 with a written answer."""

    task: TextTask
    mode: ScoringMode

    @property
    def name(self) -> str:
        """The name as the user writes it."""
        size = f"_{self.task.size}" if self.task.size else ""
        exact = "_exact" if self.mode == "written" else ""
        return f"{PREFIX}{self.task.kind}{size}{exact}"

    @property
    def measures(self) -> str:
        """Short description for listings."""
        return self.task.measures + (", written" if self.mode == "written" else "")

    @property
    def chance(self) -> float | None:
        """Score of a guess; None if guessing is not defined."""
        if self.mode == "text":
            return None
        return 1 / len(WORDS) if self.mode == "written" else self.task.guess


def task_named(name: str) -> TaskInMode | None:
    """The task of that name; None if it does not start like one of ours."""
    if not name.startswith(PREFIX):
        return None
    found = re.fullmatch(r"([a-z]+)(?:_(\d+))?(_exact)?", name.removeprefix(PREFIX))
    kind = kinds().get(found[1]) if found else None
    if found is None or kind is None:
        return None
    size = int(found[2] or 0)
    if bool(kind.sizes) != bool(size):
        example = f"{PREFIX}{found[1]}" + (f"_{kind.sizes[0]}" if kind.sizes else "")
        raise InputError(f"{name}: the task is called {example}.")
    if size and not kind.smallest <= size <= kind.largest:
        raise InputError(f"{name}: the size must be from {kind.smallest} to {kind.largest:,}, got {size:,}.")
    mode: ScoringMode = "written" if found[3] else kind.modes[0]
    if mode not in kind.modes:
        raise InputError(f"{name}: {PREFIX}{found[1]} does not support written answers; leave out _exact.")
    return TaskInMode(kind(size), mode)


def listed_tasks() -> list[TaskInMode]:
    """Every kind at its default sizes in every scoring mode."""
    return [
        TaskInMode(kind(size), mode)
        for kind in kinds().values()
        for mode in kind.modes
        for size in kind.sizes or (0,)
    ]


def groups() -> dict[str, tuple[str, ...]]:
    """Names that stand for several tasks."""
    ruler = ("needle", "multikey", "multivalue", "multiquery", "variables", "words")

    def names(
        *chosen: str, mode: ScoringMode = "choices", sizes: Sequence[int] | None = None
    ) -> tuple[str, ...]:
        return tuple(
            each.name
            for each in listed_tasks()
            if each.task.kind in chosen and each.mode == mode and (sizes is None or each.task.size in sizes)
        )

    found = {
        "maclaurin_recall": names("recall"),
        "maclaurin_recall_exact": names("recall", mode="written"),
        "maclaurin_ruler": names(*ruler),
        "maclaurin_ruler_exact": names(*ruler, mode="written"),
        "maclaurin_induction": names("induction"),
    }
    lines = names("lines", mode="endings", sizes=(32,))
    rest = (*names("cloze"), *lines, *names("perplexity", mode="text"))
    short = names(*ruler, sizes=(1024,))
    return {"maclaurin": (*found["maclaurin_recall"], *short, *found["maclaurin_induction"], *rest), **found}


def members(name: str) -> tuple[str, ...]:
    """The tasks a name of ours stands for; InputError suggests names close to an unknown one."""
    group = groups().get(name)
    if group is not None:
        return group
    if task_named(name) is not None:
        return (name,)
    known = [*groups(), *(task.name for task in listed_tasks())]
    raise InputError(f"there is no task {name!r}.{did_you_mean(name, known)}")


def is_ours(name: str) -> bool:
    """Whether a name stands for tasks of this package."""
    return name in groups() or task_named(name) is not None


def items_digest(items: Sequence[Item]) -> str:
    """SHA-256 of the items."""
    return hashlib.sha256(json.dumps(to_plain(items), ensure_ascii=False).encode()).hexdigest()
