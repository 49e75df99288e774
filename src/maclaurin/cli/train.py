"""`maclaurin train`: one run."""

from __future__ import annotations

import dataclasses
import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from maclaurin.errors import InputError, SpecError, load_extra

Values = dict[str, Any]


def _own_options() -> dict[str, Any]:
    """Options that are not settings of the run."""
    return {
        "out": Annotated[Path, typer.Option("--out", "-o", help="Folder to save the run in.")],
        "config": Annotated[
            Path | None,
            typer.Option("--config", "-c", help="TOML file with settings, or the config.json of a run."),
        ],
        "preset": Annotated[str | None, typer.Option(help="paper: the optimizer settings of the paper.")],
        "resume": Annotated[
            bool,
            typer.Option("--resume", help="Continue the run in --out from its last checkpoint."),
        ],
        "dry_run": Annotated[
            bool, typer.Option("--dry-run", help="Print parameters, memory and time; train nothing.")
        ],
    }


_OWN_DEFAULTS = {"out": Path("runs/train"), "config": None, "preset": None, "resume": False, "dry_run": False}

#: the first setting of each panel of the help text
_PANELS = {
    "attention": "Model",
    "data": "Data",
    "steps": "Optimizer",
    "precision": "Speed and memory",
    "eval_every": "Evaluation and saving",
}

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
    command: Callable[..., None], keep: dict[str, Any], defaults: Values
) -> Callable[..., None]:
    """The command with one option for each setting of a run, made from the fields of TrainConfig.

    Options that are not given stay None, so that those of a file or a preset apply.
    """
    from maclaurin.training.config import TrainConfig

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, kind, default=defaults[name], annotation=annotation)
        for name, annotation in keep.items()
    ]
    panel = None
    for field in dataclasses.fields(TrainConfig):
        panel = _PANELS.get(field.name, panel)
        flag = "--" + field.name.replace("_", "-")
        is_switch = str(field.type).startswith("bool")
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if is_switch else flag,
            help=field.metadata["help"] + _shown(field.default),
            show_default=False,
            rich_help_panel=panel,
        )
        value = bool if is_switch else _TYPES[str(field.type)]
        annotation: Any = Annotated[value | None, option]
        parameters.append(inspect.Parameter(field.name, kind, default=None, annotation=annotation))

    def wrapped(**options: Any) -> None:
        own = {name: options.pop(name) for name in keep}
        given = {name: value for name, value in options.items() if value is not None and value != []}
        command(**own, given=given)

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
    return wrapped


def _shown(default: Any) -> str:
    """The default, for the end of a help text; empty if there is none."""
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        text = "on" if default else "off"
    else:
        text = ", ".join(default) if isinstance(default, tuple) else str(default)
    return f" [dim]\\[{text}][/]"


def _train(
    *, out: Path, config: Path | None, preset: str | None, resume: bool, dry_run: bool, given: Values
) -> None:
    """Train a language model with any attention spec.

    The folder --out gets the settings, a record of every step, checkpoints
    and the trained model. A run that was stopped or killed continues with
    --resume, which takes its settings from that folder.

    [bold]Examples[/]

        maclaurin train --attention exp/l2 --size nano --steps 400 --out runs/norm

        maclaurin train --resume --out runs/norm  # after an interruption

        maclaurin train --resume --out runs/norm --steps 800  # train it for longer

        maclaurin train --config runs/norm/config.json --seed 1 --out runs/norm-1

        maclaurin train --attention "taylor(2)/sum" --data mqar:pairs=8 --dry-run

        torchrun --nproc-per-node 8 -m maclaurin train --preset paper --size small --data fineweb
    """
    from maclaurin.training.config import load_config

    load_extra("transformers", "models", "this command")
    with _naming_imports(out, resume):
        settings = load_config(config, preset, given, _settings_in(out) if resume else None)
        if dry_run:
            _print_plan(settings)
            return
        _run(settings, out, resume)


@contextmanager
def _naming_imports(out: Path, resume: bool) -> Iterator[None]:
    """If a resumed run uses parts that are not registered, the error names the files that define them."""
    try:
        yield
    except SpecError as problem:
        from maclaurin.training.run_folder import RunFolder

        imports = RunFolder(out).imports() if resume else []
        if not imports:
            raise
        options = " ".join(f"--import {name}" for name in imports)
        raise InputError(f"{problem}\nThe run in {out} uses your own parts: add {options}.") from None


def _settings_in(out: Path) -> Values | None:
    from maclaurin.training.run_folder import RunFolder

    folder = RunFolder(out)
    return folder.settings() if folder.config.exists() else None


def _print_plan(settings: Any) -> None:
    from maclaurin.training.batches import open_data
    from maclaurin.training.estimate import estimate
    from maclaurin.training.model import model_config, require_model_settings
    from maclaurin.training.processes import join

    require_model_settings(settings)
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
    from maclaurin.training.trainer import train as run_training

    outcome = run_training(settings, out, resume=resume)
    if not outcome.finished:
        raise typer.Exit(128 + (outcome.signal or signal.SIGTERM))
    if outcome.test is not None:
        found = outcome.test
        Console(highlight=False).print(
            f"step {outcome.step}: test loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, accuracy "
            f"{found.accuracy:.3f} over {found.tokens:,} tokens; saved in {out}",
            soft_wrap=True,
        )


def make_train() -> Callable[..., None]:
    """The command, with its options."""
    return with_config_options(_train, _own_options(), _OWN_DEFAULTS)
