"""`maclaurin runs`: a table of training runs, or a comparison of a few."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from maclaurin.cli import table_console
from maclaurin.report.formatting import counted

if TYPE_CHECKING:
    from maclaurin.training.run_folder import RunSummary

#: number in a run's summary → heading, format, and the narrowest terminal that shows it
NUMBERS = {
    "validation_loss": ("validation loss", ".4f", 0),
    "loss": ("test loss", ".4f", 0),
    "accuracy": ("accuracy", ".3f", 100),
    "train_loss": ("training loss", ".4f", 160),
    "tokens_per_second": ("tokens/s", ",.0f", 160),
    "parameters": ("parameters", ",.0f", 160),
}
#: setting → the narrowest terminal that shows it
_SETTINGS = {"attention": 0, "size": 100, "data": 120, "lr": 100}
#: more runs than this are listed, not compared
MOST_COMPARED = 6


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of runs, or folders that contain runs; runs/ by default."),
    ] = None,
    sort: Annotated[str, typer.Option(help="Sort by newest, or a metric such as loss.")] = "newest",
) -> None:
    """List the training runs of `maclaurin train`, of sweeps and of the pool of studies.

    Up to six single runs are compared: the settings that differ, and the numbers of each run.

    [bold]Examples[/]

        maclaurin runs

        maclaurin runs runs/pool --sort loss

        maclaurin runs runs/softmax runs/norm
    """
    from maclaurin.errors import InputError
    from maclaurin.training.run_folder import find_runs, summary_of

    given = folders or [Path("runs")]
    console = table_console(200)
    single = [run for folder in given if (run := summary_of(folder)) is not None]
    if 2 <= len(single) == len(given) <= MOST_COMPARED:
        _compare(single, console)
        return
    if sort != "newest" and sort not in NUMBERS:
        raise InputError(f"--sort takes newest, {', '.join(NUMBERS)}; got {sort!r}.")
    found = find_runs(given)
    if sort != "newest":
        found.sort(key=lambda run: run.numbers.get(sort, float("inf")))
    console.print(_table(found, console.width))


def _table(found: list[RunSummary], width: int) -> Table:
    """Runs with their settings and numbers; a narrow terminal shows the most important columns."""
    settings = [heading for heading, least in _SETTINGS.items() if width >= least]
    numbers = [
        name
        for name, (_, _, least) in NUMBERS.items()
        if width >= least and any(name in run.numbers for run in found)
    ]
    table = Table(title=counted(len(found), "run"), title_justify="left")
    table.add_column("run", overflow="fold")
    for heading in settings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("size", "lr"))
    for heading in ("step", "status"):
        table.add_column(heading, no_wrap=True)
    for name in numbers:
        table.add_column(NUMBERS[name][0], justify="right")
    for run in found:
        config = run.config
        texts = {
            "attention": run.attention,
            "size": str(config.get("size")),
            "data": str(config.get("data")),
            "lr": f"{config.get('lr', 0):g}",
        }
        table.add_row(
            str(run.path), *(Text(texts[heading]) for heading in settings), f"{run.step}/{config['steps']}",
            run.status, *(_number(run.numbers.get(name), NUMBERS[name][1]) for name in numbers),
        )  # fmt: skip
    return table


def _compare(single: list[RunSummary], console: Console) -> None:
    from maclaurin.training.run_folder import differing_keys

    table = Table(title="settings that differ, and results", title_justify="left")
    table.add_column("")
    for run in single:
        table.add_column(str(run.path), overflow="fold")
    for key in differing_keys(single):
        table.add_row(key, *(Text(_shown(run.config.get(key))) for run in single))
    table.add_section()
    table.add_row("status", *(run.status for run in single))
    table.add_row("step", *(f"{run.step}/{run.config['steps']}" for run in single))
    for name, (heading, form, _) in NUMBERS.items():
        if any(name in run.numbers for run in single):
            table.add_row(heading, *(_number(run.numbers.get(name), form) for run in single))
    table.add_row("commit", *(run.commit or "–" for run in single))
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
