"""`maclaurin sweep`: the same short run at several learning rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from maclaurin.cli.extras import requires_extra
from maclaurin.cli.train import with_config_options
from maclaurin.errors import InputError


def _sweep(*, out: Path, rates: str, given: dict[str, Any]) -> None:
    """Find a learning rate: the same run at several, each resumable, and the best of them.

    [bold]Examples[/]

        maclaurin sweep --attention exp/l2 --rates 3e-4,1e-3,3e-3 --steps 100 --out runs/sweep
    """
    from maclaurin.training.config import load_config

    if "lr" in given:
        raise InputError("a sweep takes its learning rates from --rates, not from --lr.")
    values = [_rate(text) for text in rates.split(",")]
    configs = {lr: load_config(None, None, {**given, "lr": lr}) for lr in values}
    losses = {lr: _validation_loss(config, out / f"lr-{lr:g}") for lr, config in configs.items()}
    table = Table(title=f"validation loss after {configs[values[0]].steps} steps", title_justify="left")
    table.add_column("learning rate")
    table.add_column("validation loss")
    finite = {lr: loss for lr, loss in losses.items() if isinstance(loss, float)}
    best = min(finite, key=lambda lr: finite[lr]) if finite else None
    for lr, loss in losses.items():
        table.add_row(
            f"{lr:g}",
            loss if isinstance(loss, str) else f"{loss:.4f}",
            style="bold green" if lr == best else None,
        )
    Console().print(table)
    (out / "sweep.json").write_text(
        json.dumps({"losses": {f"{k:g}": v for k, v in losses.items()}, "best": best})
    )


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"--rates takes numbers between commas, such as 3e-4,1e-3; got {text!r}.") from None
    if value <= 0:
        raise InputError(f"a learning rate must be positive, got {text}.")
    return value


def _validation_loss(config: Any, folder: Path) -> float | str:
    """The final validation loss of one run, trained now or found finished; 'diverged' is a result too."""
    with requires_extra("models", "transformers"):
        from maclaurin.training.step import Diverged
        from maclaurin.training.trainer import train

        try:
            outcome = train(config, folder, resume=(folder / "config.json").exists())
        except Diverged as problem:
            return f"diverged at step {problem.step}"
    return outcome.validation.loss if outcome.finished and outcome.validation else "stopped"


def make_sweep() -> Any:
    """The command, with its options."""
    own = {
        "out": Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs.")],
        "rates": Annotated[str, typer.Option(help="Learning rates between commas.")],
    }
    return with_config_options(_sweep, own, {"out": Path("runs/sweep"), "rates": "3e-4,1e-3,3e-3"})
