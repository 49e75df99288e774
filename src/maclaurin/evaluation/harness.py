"""Everything that uses lm-evaluation-harness: its tasks, ours as its tasks, and a model that answers it.

Tasks are asked through the harness's Task objects and not through its `evaluate`, which draws progress bars,
prints, and starts processes to estimate standard errors.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import datasets
import torch
from lm_eval.api.group import Group
from lm_eval.api.model import CacheHook
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.evaluation.eval_task import VERSION, Item, TaskInMode, groups, listed_tasks
from maclaurin.evaluation.results import Score, mean_score, share_score
from maclaurin.evaluation.scoring import Asked, Progress, written_score
from maclaurin.wording import did_you_mean, first_line

#: data set types that are files, not names on the hub
_FILES = ("json", "csv", "parquet", "text", "arrow", "pandas")
_Harness: Any = HFLM  # its decorator hides its type


# -------------------------------------------------------------------------------- finding the tasks


@final
@dataclass
class FoundTasks:
    """Single tasks in the requested order, and the groups that average some of them."""

    tasks: dict[str, Task] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)


def find_tasks(names: Sequence[str], include: Sequence[Path]) -> FoundTasks:
    """Tasks of the harness and of YAML files with their data; an error names the first that fails to load."""
    for place in include:
        if not place.is_dir():
            raise InputError(f"there is no folder {place} to take tasks from.")
    found = FoundTasks()
    if not names:
        return found
    with quiet_libraries():
        manager = _manager(names, include)
        for name in dict.fromkeys(names):
            loaded = _load(manager, name, include)
            found.tasks |= loaded["tasks"]
            found.groups |= loaded.get("groups", {})
    return found


def local_tasks(include: Sequence[Path]) -> list[str]:
    """Names of tasks and groups in these folders."""
    return TaskManager(include_path=list(include), include_defaults=False).all_tasks


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the harness and its data libraries except for errors; restored afterwards."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _manager(names: Sequence[str], folders: Sequence[Path]) -> TaskManager:
    """The index of the folders; the harness's own 14,000 tasks are indexed only if a name is not there."""
    local = TaskManager(include_path=list(folders), include_defaults=False)
    if all(name in local.task_index or Path(name).is_file() for name in names):
        return local
    full = TaskManager(include_path=list(folders))
    for name in names:
        if name not in full.task_index and not Path(name).is_file():
            ours = [*groups(), *(task.name for task in listed_tasks())]
            near = did_you_mean(name, [*ours, *local.all_tasks])
            raise InputError(
                f"there is no task {name!r}.{near or did_you_mean(name, full.all_tasks)} `maclaurin eval "
                "--list` lists ours, `lm-eval ls tasks` those of the harness; for YAML files of your own, "
                "name their folder: `maclaurin eval --include-path DIR`."
            )
    return full


def _load(manager: TaskManager, name: str, include: Sequence[Path]) -> Any:
    try:
        with _in_folder_of(manager, name, include):
            return manager.load([name])
    except Exception as problem:  # a data set's code, its files or the hub's client may raise anything
        raise _explained(manager, name, problem) from problem


@contextlib.contextmanager
def _in_folder_of(manager: TaskManager, name: str, include: Sequence[Path]) -> Iterator[None]:
    """Work in the folder of the task's YAML file, so that it can name data files there."""
    entry = manager.task_index.get(name)
    place = entry.yaml_path if entry else Path(name)
    local = entry is None or (place is not None and any(place.is_relative_to(folder) for folder in include))
    with contextlib.chdir(place.resolve().parent) if local and place else contextlib.nullcontext():
        yield


def _explained(manager: TaskManager, name: str, problem: Exception) -> InputError:
    entry = manager.task_index.get(name)
    path = (entry.cfg or {}).get("dataset_path") if entry else None
    first = first_line(problem)
    if isinstance(problem, ImportError):
        return InputError(f"the task {name} needs a package that is not installed: {first}")
    if path not in _FILES and _is_about_the_hub(problem):
        return InputError(
            f"the task {name} needs {f'the data set {path}' if path else 'data'} from the Hugging Face hub, "
            f"which cannot be reached, and it is not in the hub's cache ({first}). Run it where the hub can "
            "be reached, or use tasks without it: the group maclaurin, or your own YAML and JSON files."
        )
    return InputError(f"the task {name} cannot be loaded: {type(problem).__name__}: {first}")


def _is_about_the_hub(problem: BaseException | None) -> bool:
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


# ------------------------------------------------------------------------------ ours as its tasks


def harness_task(asked: TaskInMode, items: Sequence[Item]) -> Task:
    """One of our tasks in the harness's format: a document per query, the context before each."""
    documents = [
        {
            "text": item.context + query.prompt_for(asked.mode),
            "choices": list(query.choices),
            "right": list(query.right),
        }
        for item in items
        for query in item.queries
    ] or [{"text": item.context, "choices": [], "right": []} for item in items]
    common = {
        "task": asked.name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(documents)},
        "test_split": "test",
        "num_fewshot": 0,
        "metadata": {"version": VERSION},
    }
    with quiet_libraries():
        return ConfigurableTask(config={**common, **_CONFIGS[asked.mode]})


def _choices_result(document: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    likelihoods = [likelihood for likelihood, _ in results]
    best = sorted(range(len(likelihoods)), key=lambda i: -likelihoods[i])[: len(document["right"])]
    return {"acc": sum(i in document["right"] for i in best) / len(best)}


def _written_result(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    answers = [document["choices"][i] for i in document["right"]]
    return {"exact_match": written_score(results[0], answers)}


_CONFIGS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": lambda document: document["right"][0],
        "process_results": _choices_result,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "endings": {  # an index for a text tells the harness that the choices are texts
        "output_type": "multiple_choice",
        "doc_to_text": lambda document: document["right"][0],
        "doc_to_choice": "choices",
        "doc_to_target": "text",
        "process_results": _choices_result,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "text",
        "doc_to_target": lambda document: document["choices"][document["right"][0]],
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 32},
        "process_results": _written_result,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
}


# ------------------------------------------------------------------------------------ asking a task


def ask_harness_task(
    model: AnsweringModel,
    task: Task,
    *,
    limit: int | None,
    seed: int,
    report: Progress = lambda share, what: None,
) -> Asked:
    """Ask the first `limit` documents of a task."""
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        kind = "runs code that models write" if getattr(task, "UNSAFE_CODE", False) else "shows pictures"
        raise InputError(
            f"the task {task.task_name} {kind}, which maclaurin eval does not support: leave it out."
        )
    _seed_everything(seed)
    task.set_fewshot_seed(seed=seed)
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    model.begin(report)
    documents = list(task.doc_iterator(rank=0, limit=limit, world_size=1))
    with quiet_libraries():
        requests = _requests(task, documents)
        _answer(model, requests)
        metrics, number = _scores(task, documents, requests)
    return Asked(metrics, number, model.truncated, model.non_finite, None)


def _requests(task: Any, documents: Sequence[tuple[int, Any]]) -> list[Any]:
    requests: list[Any] = []
    for number, document in documents:
        context = task.fewshot_context(
            document, num_fewshot=task.config.num_fewshot or 0, gen_prefix=task.doc_to_prefix(document)
        )
        metadata = (task.config["task"], number, task.config.repeats)
        made = task.construct_requests(doc=document, ctx=context, metadata=metadata)
        requests += made if isinstance(made, list) else [made]
    task._instances = requests
    return requests


def _answer(model: AnsweringModel, requests: Sequence[Any]) -> None:
    by_type: dict[str, list[Any]] = defaultdict(list)
    for request in requests:
        by_type[request.request_type] += [request] * request.repeats
    for kind, repeated in by_type.items():
        for answer, request in zip(getattr(model, kind)(repeated), repeated, strict=True):
            request.resps.append(answer)


def _scores(
    task: Any, documents: Sequence[tuple[int, Any]], requests: Sequence[Any]
) -> tuple[dict[str, Score], int]:
    """The metrics of a task and the number of documents they are about."""
    task.apply_filters()
    of_document: dict[int, list[Any]] = defaultdict(list)
    for request in sorted(requests, key=lambda request: request.idx):
        of_document[request.doc_id].append(request)
    values: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for filtered in requests[0].filtered_resps if requests else ():
        for number, document in documents:
            answers = [request.filtered_resps[filtered] for request in of_document[number]]
            for name, value in task.process_results(document, answers).items():
                values[name, filtered].append(value)
    aggregation, higher = task.aggregation(), task.higher_is_better()
    metrics = {
        name if filtered == "none" else f"{name} ({filtered})": _metric(
            found, aggregation.get(name), higher.get(name)
        )
        for (name, filtered), found in values.items()
    }
    return metrics, len(documents)


def _metric(values: list[Any], aggregate: Callable[[list[Any]], Any] | None, higher: bool | None) -> Score:
    """The harness's own value, with an interval if it is a mean of numbers."""
    plain = all(isinstance(value, int | float) for value in values)
    value = float(sum(values) / len(values) if aggregate is None else aggregate(values))
    if plain and math.isclose(value, sum(values) / len(values), rel_tol=1e-9, abs_tol=1e-12):
        shares = higher is not False and all(0 <= x <= 1 for x in values)
        return share_score(values) if shares else mean_score(values, higher)
    return Score(value=value if math.isfinite(value) else None, higher_is_better=higher)


def group_metrics(group: Group, metrics: Mapping[str, tuple[int, dict[str, Score]]]) -> dict[str, Score]:
    """The metrics that the file of a group defines; `metrics` holds items and metrics of each task."""
    plain: Any = {}
    for task, (items, found) in metrics.items():
        plain[task] = {"sample_len": items}
        for name, metric in found.items():
            bare, _, filtered = name.removesuffix(")").partition(" (")
            plain[task][f"{bare},{filtered or 'none'}"] = metric.value
            plain[task][f"{bare}_stderr,{filtered or 'none'}"] = (
                "N/A" if metric.stderr is None else metric.stderr
            )
    return {
        key.partition(",")[0]: Score(value=float(value))
        for key, value in group.aggregate(plain).items()
        if "," in key and "_stderr" not in key and isinstance(value, int | float) and math.isfinite(value)
    }


def _seed_everything(seed: int) -> None:
    """Seed every random generator that the harness and its tasks use."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# ------------------------------------------------------------------------------------- the model


class AnsweringModel(_Harness):
    """HFLM for a loaded model; it counts what a result should report.

    truncated    requests since `begin` that did not fit and lost their beginning
    non_finite   texts since `begin` with non-finite logits
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int, max_length: int | None) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
        self.truncated = self.non_finite = 0
        self._report: Progress = lambda share, what: None
        self._longest: int | None = None
        self._is_rolling = False

    def begin(self, report: Progress = lambda share, what: None) -> None:
        """Start another task: reset the counts."""
        self._report = report
        self.truncated = self.non_finite = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """ln p of each continuation, and whether it is the most likely."""
        self.set_cache_hook(_Counter(self._report, len(requests)))
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """ln p of each text; a few at a time, since the harness itself reports only at the end."""
        answers: list[float] = []
        self.set_cache_hook(_Counter(self._report, len(requests)))
        self._is_rolling = True
        try:
            for first in range(0, len(requests), self.batch_size_per_gpu):
                part = requests[first : first + self.batch_size_per_gpu]
                answers += super().loglikelihood_rolling(part, disable_tqdm=True)
        finally:
            self._is_rolling = False
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """What the model writes after each text."""
        for request in requests:
            text, settings = request.args
            space = self.max_length - settings.get("max_gen_toks", self.max_gen_toks)
            self.truncated += len(self.tok_encode(text)) > space
        self.set_cache_hook(_Counter(self._report, len(requests)))
        return super().generate_until(requests, disable_tqdm=True)

    def tok_encode(self, string: str, *arguments: Any, **options: Any) -> list[int]:
        """Tokens without a first token if the harness adds one itself; else there would be two."""
        tokens = super().tok_encode(string, *arguments, **options)
        return tokens[1:] if self._is_rolling and tokens[:1] == [self.prefix_token_id] else tokens

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = True, override_bs: int | None = None, **more: Any
    ) -> list[tuple[float, bool]]:
        """Tokens of (text, continuation); one more than fits is fine, since the last one is not read."""
        rolling = override_bs is not None  # its windows are cut to fit, on purpose
        if not rolling:
            self.truncated += sum(
                len(before) + len(after) > self.max_length + 1 for _, before, after in requests
            )
        self._longest = None if rolling else max((len(after) for _, _, after in requests), default=1)
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs, **more)

    def _model_call(self, inps: Tensor, **more: Any) -> Tensor:
        """Logits of tokens [batch, tokens]: of the last positions only, if only those are needed.

        The harness counts positions from the end, so it still finds them.
        """
        with torch.no_grad():
            logits = self.model(inps, logits_to_keep=self._positions_needed(inps)).logits
        self.non_finite += int((~torch.isfinite(logits.sum(dim=(1, 2), dtype=torch.float32))).sum())
        return logits

    def _positions_needed(self, inps: Tensor) -> int:
        """Upper bound: the longest continuation, plus the most padding (zeros) that a text may have."""
        if self._longest is None:
            return 0
        tokens = inps.shape[1]
        ends = torch.where(inps != 0, torch.arange(1, tokens + 1, device=inps.device), 1).amax(dim=1)
        return min(tokens, tokens - int(ends.min()) + self._longest)


@final
class _Counter(CacheHook):
    """Counts the answers that the harness reports to its cache."""

    def __init__(self, report: Progress, total: int) -> None:
        super().__init__(None)
        self._report, self._total, self._done = report, total, 0

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """One more answer."""
        self._done += 1
        self._report(self._done / self._total, f"{self._done} of {self._total}")
