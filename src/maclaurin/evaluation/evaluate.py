"""Ask a model tasks, one after the other, and keep what comes out."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any, final

from maclaurin.evaluation.find_tasks import FoundTasks
from maclaurin.evaluation.quiet import without_bars
from maclaurin.evaluation.results import Identity, Metric, Results, TaskResult
from maclaurin.evaluation.task_set import OWN_TASKS
from maclaurin.training.run_folder import machine_facts

if TYPE_CHECKING:
    from maclaurin.evaluation.answering import AnsweringModel

#: resamplings for the standard errors of metrics without a formula
RESAMPLINGS = 1000


@final
@dataclass(frozen=True)
class Evaluation:
    """A model, the tasks, and what is kept of each.

    fingerprints   of the items of our own tasks
    finished       results that need not be found again
    keep           is given all results after each task
    """

    model: AnsweringModel
    found: FoundTasks
    identity: Identity
    fingerprints: Mapping[str, str]
    finished: Mapping[str, TaskResult] = field(default_factory=dict)
    keep: Callable[[Results], None] = lambda _: None

    def run(self) -> Results:
        """All tasks that are not finished."""
        results = Results(self.identity, machine_stamp(), dict(self.finished))
        for name, task in self.found.tasks.items():
            if not self._is_finished(name, task):
                results.tasks[name] = self._ask(name, task)
            results.groups = self._sums(results.tasks)
            self.keep(results)
        return results

    def _is_finished(self, name: str, task: Any) -> bool:
        """A result of other items or of another version of the task is none of this one."""
        known = self.finished.get(name)
        fingerprint = self.fingerprints.get(name)
        return known is not None and (known.version, known.fingerprint) == (_version(task), fingerprint)

    def _ask(self, name: str, task: Any) -> TaskResult:
        from lm_eval.evaluator import evaluate

        _seed_everything(self.identity.seed)
        task.set_fewshot_seed(seed=self.identity.seed)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        self.model.begin(name)
        start = time.monotonic()
        with without_bars():
            raw: Any = evaluate(
                lm=self.model,
                task_dict={"tasks": {name: task}, "groups": {}},
                limit=self.identity.limit,
                bootstrap_iters=RESAMPLINGS,
                log_samples=False,
            )
        own = OWN_TASKS.get(name)
        return TaskResult(
            task=name,
            kind=str(task.get_config("output_type")),
            version=_version(task),
            fingerprint=self.fingerprints.get(name),
            items=int(raw["n-samples"][name]["effective"]),
            metrics=_metrics(raw["results"][name], raw["higher_is_better"].get(name) or {}),
            cut=self.model.cut,
            broken=self.model.broken,
            chance=own.chance if own else None,
            distance=self._distance(task),
            seconds=round(time.monotonic() - start, 2),
        )

    def _distance(self, task: Any) -> list[int] | None:
        """How far back, in tokens, lies what is asked for."""
        items = [item for _, item in zip(range(self.identity.limit or 50), task.eval_docs, strict=False)]
        if not items or "known_until" not in items[0]:
            return None
        texts = [item["text"][item["known_until"] :] for item in items]
        tokens = [len(self.model.tok_encode(text, add_special_tokens=False)) for text in texts]
        return [min(tokens), round(statistics.median(tokens)), max(tokens)]

    def _sums(self, tasks: Mapping[str, TaskResult]) -> dict[str, dict[str, Metric]]:
        """Groups whose tasks are all there, summed up as their files say."""
        whole = {
            name: group
            for name, group in self.found.groups.items()
            if group.has_aggregation and all(task.task_name in tasks for task in group.get_all_tasks())
        }
        plain: Any = {name: _for_harness(result) for name, result in tasks.items()}
        return {name: _metrics(group.aggregate(plain), {}) for name, group in whole.items()}


def machine_stamp() -> dict[str, Any]:
    """Versions, machine and time."""
    facts = machine_facts()
    facts["versions"]["lm-eval"] = metadata.version("lm-eval")
    return {**facts, "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _seed_everything(seed: int) -> None:
    """What the harness and its tasks draw from."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _version(task: Any) -> str:
    return str(task.VERSION)


def _metrics(raw: Mapping[str, Any], higher: Mapping[str, bool | None]) -> dict[str, Metric]:
    """`acc,none` with `acc_stderr,none` → acc; the name of a filter other than none stays in the name."""
    found = {}
    for key, value in raw.items():
        name, comma, filtered = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        shown = name if filtered == "none" else f"{name} ({filtered})"
        error = raw.get(f"{name}_stderr,{filtered}")
        found[shown] = Metric(value=_finite(value), stderr=_finite(error), higher_is_better=higher.get(name))
    return found


def _for_harness(result: TaskResult) -> dict[str, Any]:
    """The way back."""
    plain: dict[str, Any] = {"sample_len": result.items}
    for name, metric in result.metrics.items():
        bare, _, filtered = name.removesuffix(")").partition(" (")
        plain[f"{bare},{filtered or 'none'}"] = metric.value
        plain[f"{bare}_stderr,{filtered or 'none'}"] = "N/A" if metric.stderr is None else metric.stderr
    return plain


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
