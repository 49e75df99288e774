"""`maclaurin sweep`: one short run at several learning rates."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from maclaurin.cli.train import with_config_options
from maclaurin.errors import InputError, load_extra
from maclaurin.plain_data import write_json


def _sweep(*, out: Path, rates: str, given: dict[str, Any]) -> None:
    """Find a learning rate: train the same run at several rates and compare their validation losses.

    [bold]Examples[/]

        maclaurin sweep --attention exp/l2 --rates 1e-3,2e-3,4e-3 --steps 100 --out runs/sweep
    """
    from maclaurin.files import require_writable_folder
    from maclaurin.training.config import load_config

    if "lr" in given:
        raise InputError("a sweep takes its learning rates from --rates, not from --lr.")
    require_writable_folder(out)
    values = [_rate(text) for text in rates.split(",")]
    configs = {lr: load_config(None, None, {"test": False, **given, "lr": lr}) for lr in values}
    losses = {lr: _validation_loss(config, out / f"lr-{lr:g}") for lr, config in configs.items()}
    finite = {lr: loss for lr, loss in losses.items() if isinstance(loss, float)}
    best = min(finite, key=lambda lr: finite[lr]) if finite else None
    table = Table(title=f"validation loss after {configs[values[0]].steps} steps", title_justify="left")
    for heading in ("learning rate", "validation loss", ""):
        table.add_column(heading)
    for lr, loss in losses.items():
        text = loss if isinstance(loss, str) else f"{loss:.4f}"
        table.add_row(
            f"{lr:g}", text, "best" if lr == best else "", style="bold green" if lr == best else None
        )
    console = Console(highlight=False)
    console.print(table)
    if best is not None and len(values) > 1 and best in (min(values), max(values)):
        further = best / 2 if best == min(values) else best * 2
        console.print(f"the best rate is at the edge of those that were tried: try {further:g} too.")
    write_json(out / "sweep.json", {"losses": {f"{k:g}": v for k, v in losses.items()}, "best": best})


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(
            f"--rates takes numbers separated by commas, such as 3e-4,1e-3; got {text!r}."
        ) from None
    if value <= 0:
        raise InputError(f"a learning rate must be positive, got {text}.")
    return value


def _validation_loss(config: Any, folder: Path) -> float | str:
    """The final validation loss of one run, trained now or earlier, or a text if it diverged."""
    load_extra("transformers", "models", "this command")
    from maclaurin.training.optimizer_step import Diverged
    from maclaurin.training.trainer import train

    try:
        outcome = train(config, folder, resume=(folder / "config.json").exists())
    except Diverged as problem:
        return f"diverged at step {problem.step}"
    if not outcome.finished:
        raise typer.Exit(128 + (outcome.signal or signal.SIGTERM))
    if outcome.validation is None:
        raise InputError("a sweep compares validation losses: use a validation_fraction above 0.")
    return outcome.validation.loss


def make_sweep() -> Any:
    """The command, with its options."""
    own = {
        "out": Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs.")],
        "rates": Annotated[str, typer.Option(help="Learning rates, separated by commas.")],
    }
    return with_config_options(_sweep, own, {"out": Path("runs/sweep"), "rates": "5e-4,1e-3,2e-3,4e-3"})
