"""`maclaurin train`: one run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from maclaurin.cli.extras import requires_extra

Files = dict[str, Any]


def _own_options() -> dict[str, Any]:
    """Options that are no keys of the config."""
    return {
        "out": Annotated[Path, typer.Option("--out", "-o", help="Folder of the run.")],
        "config": Annotated[
            Path | None, typer.Option("--config", "-c", help="TOML file with the same keys.")
        ],
        "preset": Annotated[str | None, typer.Option(help="paper: the paper's optimiser settings.")],
        "resume": Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")],
        "dry_run": Annotated[bool, typer.Option("--dry-run", help="Only print what the run would take.")],
    }


_OWN_DEFAULTS = {"out": Path("runs/train"), "config": None, "preset": None, "resume": False, "dry_run": False}

_TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "int | None": int,
    "float | None": float,
    "str | None": str,
    "tuple[str, ...]": list[str],
}


def with_config_options(
    command: Callable[..., None], keep: dict[str, Any], defaults: Files
) -> Callable[..., None]:
    """The command with one option per key of the training config, read off its fields.

    Options that are not given stay None, so that a file or a preset may speak.
    """
    from maclaurin.training.config import TrainConfig

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, kind, default=defaults[name], annotation=annotation)
        for name, annotation in keep.items()
    ]
    for field in dataclasses.fields(TrainConfig):
        help_ = f"{field.metadata['help']} [dim]\\[{_shown(field.default)}][/]"
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            option = typer.Option(f"{flag}/--no-{flag[2:]}", help=help_, show_default=False)
            annotation: Any = Annotated[bool | None, option]
        else:
            option = typer.Option(flag, help=help_, show_default=False)
            annotation = Annotated[_TYPES[str(field.type)] | None, option]
        parameters.append(inspect.Parameter(field.name, kind, default=None, annotation=annotation))

    def wrapped(**options: Any) -> None:
        own = {name: options.pop(name) for name in keep}
        given = {name: value for name, value in options.items() if value is not None and value != []}
        command(**own, given=given)

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
    return wrapped


def _shown(default: Any) -> str:
    return ", ".join(default) or "none" if isinstance(default, tuple) else str(default)


def _train(
    *, out: Path, config: Path | None, preset: str | None, resume: bool, dry_run: bool, given: Files
) -> None:
    """Train a language model with any attention spec.

    [bold]Examples[/]

        maclaurin train --attention exp/l2 --size nano --data stdlib --steps 400 --out runs/norm

        maclaurin train --attention exp/l2 --size nano --data stdlib --steps 400 --out runs/norm --resume

        maclaurin train --attention "taylor(2)/sum" --data mqar:pairs=8 --dry-run

        torchrun --nproc-per-node 8 -m maclaurin train --preset paper --size small --data fineweb
    """
    from maclaurin.training.config import load_config

    settings = load_config(config, preset, given)
    with requires_extra("models", "transformers"):
        if dry_run:
            _print_plan(settings)
            return
        _run(settings, out, resume)


def _print_plan(settings: Any) -> None:
    from maclaurin.training.estimate import estimate
    from maclaurin.training.processes import join
    from maclaurin.training.starting import model_config
    from maclaurin.training.train import open_data

    processes = join(settings.device)
    source = open_data(settings, processes)
    console = Console(highlight=False)
    console.print(f"attention   {', '.join(settings.attention)}", markup=False)
    console.print(f"data        {source.name}, vocabulary of {source.vocab_size:,}, rows of {source.length}")
    found = estimate(settings, model_config(settings, source), source.length, processes.device)
    console.print(str(found), markup=False)
    if source.tokens_per_epoch:
        console.print(f"epochs      {found.tokens / source.tokens_per_epoch:.2f}")


def _run(settings: Any, out: Path, resume: bool) -> None:
    from maclaurin.training.train import train as run_training

    outcome = run_training(settings, out, resume=resume)
    if outcome.test is not None:
        found = outcome.test
        Console(highlight=False).print(
            f"step {outcome.step}: test loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, accuracy "
            f"{found.accuracy:.3f} over {found.tokens:,} tokens; {out}",
            soft_wrap=True,
        )


def make_train() -> Callable[..., None]:
    """The command, with its options."""
    return with_config_options(_train, _own_options(), _OWN_DEFAULTS)
