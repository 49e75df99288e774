"""A study as runs, each with its resolved config; nothing is trained here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch

from maclaurin.code_version import NUMERICS_VERSION
from maclaurin.data.data_config import DataConfig, is_task, open_source, open_task
from maclaurin.data.recall_rows import MixedRows
from maclaurin.data.source import Source
from maclaurin.data.text_source import TextSource
from maclaurin.device import resolve_device
from maclaurin.errors import InputError, MaclaurinError
from maclaurin.evaluation.evaluate import items_fingerprint, longest_text, numbers_of
from maclaurin.extensions import source_digest
from maclaurin.spec.catalogue import LayerExtras, catalogue, resolve
from maclaurin.spec.head_groups import specs_in, with_each_spec
from maclaurin.study.cost import attention_facts, counted, memory_at_length
from maclaurin.study.design import Cell, Experiment, Study
from maclaurin.study.metrics import task_number, task_of
from maclaurin.study.run_record import Label, Plan, Run, RunRecord, TaskItems
from maclaurin.training.batches import data_config
from maclaurin.training.config import TrainConfig, config_from
from maclaurin.training.model import row_length
from maclaurin.training.trackers import require_trackers
from maclaurin.wording import did_you_mean, listed_names

#: major and minor version, part of the key of a run
INSTALLED_TORCH = ".".join(torch.__version__.split(".")[:2])

Adapt = Callable[[TrainConfig], TrainConfig]


def plan_study(
    study: Study,
    *,
    scale: float = 1.0,
    device: str | None = None,
    adapt: Adapt = lambda config: config,
    torch_version: str | None = None,
) -> Plan:
    """Every run in starting order, as a waiting record; its data are not opened yet.

    An invalid config is an error here, before any run begins. `adapt` is applied last to each config.
    `torch_version` is that of the results; None: the installed one.
    """
    plan: dict[Label, RunRecord] = {}
    for experiment in study.experiments:
        steps, tasks = equal_steps(experiment), _tasks_of(experiment)
        metric = experiment.measure.name
        _require_equal_state(experiment)
        for cell, seed in experiment.points():
            keys = {**experiment.settings(cell), **steps.get(cell.name, {}), "seed": seed}
            with _at(cell, experiment):
                config = adapt(resolved(keys, scale=scale, device=device))
                _require_text(config, tasks)
                _require_recorded(metric, config)
                require_trackers(config.trackers)
                plan[Label(experiment.name, cell.name, seed)] = waiting(config, tasks, torch_version)
    return plan


class _at:
    """A context that adds the cell, and the line that defines it, to an error raised inside."""

    def __init__(self, cell: Cell, experiment: Experiment) -> None:
        self._cell, self._experiment = cell, experiment

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if isinstance(problem, ValueError):
            place = f"{self._cell.where}: " if self._cell.where else ""
            raise InputError(
                f"{place}experiment {self._experiment.name!r}, cell {self._cell.name!r}: {problem}"
            ) from None


def waiting(
    config: TrainConfig, tasks: tuple[TaskItems, ...] = (), torch_version: str | None = None
) -> RunRecord:
    """The waiting run of a resolved config."""
    version = torch_version or INSTALLED_TORCH
    parts = source_digest([spec for text in config.attention for spec in specs_in(text)])
    run = Run(
        config=config.to_dict(), data="", torch=version, numerics=NUMERICS_VERSION, parts=parts, tasks=tasks
    )
    order, state_bytes = attention_facts(config)
    return RunRecord(
        run=run,
        status="waiting",
        order=order,
        state_bytes=state_bytes,
        memory_bytes=memory_at_length(config),
    )


# ------------------------------------------------------------------------------ resolved configs


def resolved(keys: Mapping[str, Any], *, scale: float = 1.0, device: str | None = None) -> TrainConfig:
    """A checked config in which defaults that depend on other settings are filled in."""
    config = scaled(config_from(keys), scale)
    attention = tuple(canonical_attention(text) for text in config.attention)
    length, place = row_length(config), resolve_device(device or config.device)
    return config.replace(
        attention=attention[:1] if len(set(attention)) == 1 else attention,
        length=open_task(config.data, length).length if is_task(config.data) else length,
        decay_steps=config.decay_steps or config.steps,
        clip=config.clip or None,
        compile=place == "cuda" if config.compile is None else config.compile,
        device=place,
    )


def canonical_attention(text: str, *, strict: bool = True) -> str:
    """The canonical spelling of an attention, so that studies that write it differently share the run.

    This is the notation, or the catalogue's name if the entry also has a convolution or other extras. An
    invalid text is an error, or is returned unchanged if not `strict`.
    """
    name = text.strip()
    if ":" in name:
        return with_each_spec(name, partial(canonical_attention, strict=strict))
    if name in catalogue and catalogue[name].extras != LayerExtras():
        return catalogue[name].name
    try:
        return str(resolve(name))
    except MaclaurinError:
        if strict:
            raise
        return name


def read_scale(text: str) -> float:
    """'0.5x', '2x' or '0.1' as a number."""
    try:
        scale = float(text.strip().removesuffix("x"))
    except ValueError:
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise InputError(f"--budget takes a positive factor such as 0.5x or 2x, got {text!r}.")
    return scale


def scaled(config: TrainConfig, scale: float) -> TrainConfig:
    """The config with its steps multiplied by `scale`; warm-up and schedule keep their shape."""
    if scale == 1.0:
        return config

    def times(steps: int) -> int:
        return max(1, round(steps * scale))

    return config.replace(
        steps=times(config.steps),
        warmup=times(config.warmup) if config.warmup else 0,
        decay_steps=None if config.decay_steps is None else times(config.decay_steps),
    )


def equal_steps(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """With equal="flops": cell → the steps that cost the FLOPs of the baseline; otherwise empty."""
    if experiment.equal != "flops":
        return {}
    configs, costs = {}, {}
    for cell in experiment.cells:
        with _at(cell, experiment):
            configs[cell.name] = config = resolved(experiment.settings(cell))
            costs[cell.name] = counted(config)[1] * config.batch_size * (config.length or 1)
    whole = costs[experiment.baseline] * configs[experiment.baseline].steps
    found = {}
    for name, config in configs.items():
        own = scaled(config, whole / costs[name] / config.steps)
        found[name] = {"steps": own.steps, "warmup": own.warmup, "decay_steps": own.decay_steps}
    return found


# ----------------------------------------------------------------------------------------- tasks


def _tasks_of(experiment: Experiment) -> tuple[TaskItems, ...]:
    """The tasks of an experiment's runs; unknown tasks, and metrics that no task has, are errors."""
    wanted = experiment.tasks
    if wanted is None:
        return ()
    place = f"{experiment.where}: " if experiment.where else ""
    try:
        numbers = {name: numbers_of(name) for name in wanted.names}
    except InputError as problem:
        raise InputError(f"{place}experiment {experiment.name!r}: {problem}") from None
    metric = experiment.measure.name
    given = [task_number(name, number) for name, found in numbers.items() for number in found]
    if task_of(metric) is not None and metric not in given:
        raise InputError(
            f"{place}experiment {experiment.name!r} compares {metric!r}, which its tasks do not have: "
            f"they have {', '.join(given)}."
        )
    return tuple(
        TaskItems(
            name=name,
            items=wanted.items,
            seed=wanted.seed,
            fingerprint=items_fingerprint(name, wanted.items, wanted.seed),
        )
        for name in wanted.names
    )


def _require_text(config: TrainConfig, tasks: tuple[TaskItems, ...]) -> None:
    if tasks and is_task(config.data):
        raise InputError(
            f"a model trained on {config.data} cannot read text, so {tasks[0].name} cannot be run on it: "
            "train it on text, or leave out tasks."
        )


def _require_recorded(metric: str, config: TrainConfig) -> None:
    """Raise if a run with this config cannot have the metric."""
    if metric == "peak_gpu_bytes" and config.device != "cuda":
        raise InputError(
            f"peak_gpu_bytes is the memory of a GPU, and this run is on {config.device}: use another metric, "
            "or --device cuda."
        )
    if metric == "state_bytes" and attention_facts(config)[1] is None:
        raise InputError(
            "state_bytes is not recorded where the state grows with the text: use memory_bytes, which counts "
            "keys and values at the trained length."
        )


def require_fit(run: Run, source: Source) -> None:
    """Raise unless every text of the tasks fits the length of the model."""
    length = run.config["length"]
    for task in run.tasks:
        if not isinstance(source, TextSource | MixedRows):
            raise InputError(f"{source.name} is not text, so {task.name} cannot be run on its models.")
        longest = _longest_text(task, source)
        if longest > length:
            raise InputError(
                f"the task {task.name} has texts of up to {longest} tokens of {source.tokenizer.name}, but "
                f"the model reads {length}: use a shorter task, or train with a larger length."
            )


def _longest_text(task: TaskItems, source: TextSource | MixedRows) -> int:
    known = (task, source.tokenizer.fingerprint)
    if known not in _LONGEST:
        encode = source.tokenizer.encode
        _LONGEST[known] = longest_text(task.name, task.items, task.seed, encode)
    return _LONGEST[known]


_LONGEST: dict[tuple[TaskItems, str], int] = {}


# --------------------------------------------------------------------------------------- choices


def select(study: Study, only: Sequence[str]) -> Study:
    """The cells with these names or notations, their baselines, and the claims about them."""
    if not only:
        return study
    _refuse_unmatched(study, only)
    experiments = tuple(kept for e in study.experiments if (kept := _reduced(e, only)) is not None)
    left = {e.name: {cell.name for cell in e.cells} for e in experiments}
    claims = tuple(c for c in study.claims if set(c.cells) <= left.get(c.experiment, set()))
    ladder = study.ladder if left.keys() >= set(study.ladder) else ()
    return dataclasses.replace(study, experiments=experiments, claims=claims, ladder=ladder)


def with_seeds(study: Study, count: int) -> Study:
    """The study with `count` seeds in each experiment: its own, then the next that no tuning run has."""
    experiments = []
    for experiment in study.experiments:
        seeds = list(experiment.seeds)
        if count < len(seeds):
            raise InputError(
                f"--seeds {count} is fewer than the {len(seeds)} of experiment {experiment.name!r}: seeds "
                "can be added, not removed."
            )
        tune = experiment.tune
        taken = {*experiment.seeds, *(tune.all_seeds if tune is not None else ())}
        new = (seed for seed in range(10**6) if seed not in taken)
        seeds += [next(new) for _ in range(count - len(seeds))]
        experiments.append(dataclasses.replace(experiment, seeds=tuple(seeds)))
    return dataclasses.replace(study, experiments=tuple(experiments))


def _reduced(experiment: Experiment, only: Sequence[str]) -> Experiment | None:
    wanted = {cell.name for cell in experiment.cells if any(_matches(cell, experiment, w) for w in only)}
    if not wanted:
        return None
    cells = tuple(cell for cell in experiment.cells if cell.name in wanted | {experiment.baseline})
    left = {cell.name for cell in cells}
    waterfalls = tuple(way for way in experiment.waterfalls if left.issuperset(way.cells))
    return dataclasses.replace(experiment, cells=cells, waterfalls=waterfalls)


def _matches(cell: Cell, experiment: Experiment, wanted: str) -> bool:
    written = _attention(cell, experiment)
    return (
        wanted == cell.name
        or wanted in written
        or canonical_attention(wanted, strict=False)
        in {canonical_attention(text, strict=False) for text in written}
    )


def _attention(cell: Cell, experiment: Experiment) -> tuple[str, ...]:
    found = experiment.settings(cell).get("attention", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _refuse_unmatched(study: Study, only: Sequence[str]) -> None:
    pairs = [(cell, e) for e in study.experiments for cell in e.cells]
    for wanted in only:
        if not any(_matches(cell, e, wanted) for cell, e in pairs):
            names = dict.fromkeys(cell.name for cell, _ in pairs)
            known = [*names, *dict.fromkeys(text for cell, e in pairs for text in _attention(cell, e))]
            raise InputError(
                f"--only {wanted}: study {study.name!r} has no such cell; it has {listed_names(names)}."
                f"{did_you_mean(wanted, known)} (The name of the study goes before --only.)"
            )


# ------------------------------------------------------------------------------------------ data


@final
class Sources:
    """Opens the data before the runs start, so that one process prepares them once for all seeds."""

    def __init__(self) -> None:
        self._opened: dict[DataConfig, Source] = {}

    def source(self, config: TrainConfig) -> Source:
        """The data of a run."""
        wanted = data_config(config)
        seedless = dataclasses.replace(wanted, seed=0)
        if seedless not in self._opened:
            self._opened[seedless] = open_source(seedless)
        return dataclasses.replace(self._opened[seedless], seed=wanted.seed)  # type: ignore[type-var]

    def complete(self, record: RunRecord) -> RunRecord:
        """The waiting run with the fingerprint of its data, which completes its key."""
        source = self.source(config_from(record.run.config))
        return record.of_data(source.fingerprint, source.facts)

    def require_tasks_fit(self, plan: Plan) -> None:
        """Raise if a run has a task whose texts are longer than its model reads."""
        for label, record in plan.items():
            if record.run.tasks:
                try:
                    require_fit(record.run, self.source(config_from(record.run.config)))
                except InputError as problem:
                    raise InputError(f"experiment {label.experiment!r}: {problem}") from None


# ----------------------------------------------------------------------------------- equal states


#: largest relative difference of the bytes that cells with equal="state" keep
STATE_TOLERANCE = 0.02


def _require_equal_state(experiment: Experiment) -> None:
    """With equal="state": raise unless all cells keep as many bytes; the error suggests a window."""
    if experiment.equal != "state":
        return
    sizes = {cell.name: memory_at_length(resolved(experiment.settings(cell))) for cell in experiment.cells}
    wanted = sizes[experiment.baseline]
    for cell in experiment.cells:
        with _at(cell, experiment):
            found = sizes[cell.name]
            if abs(found - wanted) > STATE_TOLERANCE * wanted:
                raise InputError(
                    f"it keeps {found:,} bytes at the trained length, but {experiment.baseline!r} keeps "
                    f"{wanted:,}, and equal='state' allows a difference of {STATE_TOLERANCE:.0%}."
                    f"{_fitting_window(experiment.settings(cell), wanted)}"
                )


def _fitting_window(settings: Mapping[str, Any], wanted: int) -> str:
    """Which window would make the state that large, in words; empty if none does."""
    given = settings.get("attention", ())
    texts = [given] if isinstance(given, str) else list(given)
    if len(texts) != 1 or not re.search(r"window\(\d+", texts[0]):
        return " A window beside the state, +window(N), can make up a difference."

    def size_with(window: int) -> int:
        text = re.sub(r"window\(\d+", f"window({window}", texts[0])
        return memory_at_length(resolved({**settings, "attention": (text,)}))

    one, many = size_with(1), size_with(101)
    window = 1 + round((wanted - one) / ((many - one) / 100 or 1))
    return f" window({window}) would fit." if window >= 1 else " No window fits: its state alone is larger."
