"""`maclaurin sweep`: one short run at several learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from maclaurin.cli.train import with_config_options
from maclaurin.errors import InputError, load_extra

if TYPE_CHECKING:
    from maclaurin.training.rate_sweep import Sweep


def _sweep(*, out: Path, rates: str, given: dict[str, Any]) -> None:
    """Find a learning rate: train the same run at several rates and compare their validation losses.

    [bold]Examples[/]

        maclaurin sweep --attention exp/l2 --rates 1e-3,2e-3,4e-3 --steps 100 --out runs/sweep
    """
    values = [_rate(text) for text in rates.split(",")]
    load_extra("transformers", "models", "this command")
    from maclaurin.training.rate_sweep import sweep

    found = sweep(given, values, out)
    if found.signal is not None:
        raise typer.Exit(128 + found.signal)
    console = Console(highlight=False)
    console.print(_table(found))
    if found.next_rate is not None:
        console.print(f"the best rate is at the edge of those that were tried: try {found.next_rate:g} too.")


def _table(found: Sweep) -> Table:
    table = Table(title=f"validation loss after {found.steps} steps", title_justify="left")
    for heading in ("learning rate", "validation loss", ""):
        table.add_column(heading)
    for rate, loss in found.losses.items():
        text = loss if isinstance(loss, str) else f"{loss:.4f}"
        is_best = rate == found.best
        table.add_row(f"{rate:g}", text, "best" if is_best else "", style="bold green" if is_best else None)
    return table


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"--rates takes numbers separated by commas, such as 3e-4,1e-3; got {text!r}."
        ) from None


def make_sweep() -> Any:
    """The command, with its options."""
    own = {
        "out": Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs.")],
        "rates": Annotated[str, typer.Option(help="Learning rates, separated by commas.")],
    }
    return with_config_options(_sweep, own, {"out": Path("runs/sweep"), "rates": "5e-4,1e-3,2e-3,4e-3"})
