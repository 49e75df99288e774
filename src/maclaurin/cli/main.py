"""`maclaurin`: the commands, and how errors are printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import maclaurin
from maclaurin.cli import command_of
from maclaurin.cli.bench import bench
from maclaurin.cli.check import check
from maclaurin.cli.convert import convert
from maclaurin.cli.doctor import doctor
from maclaurin.cli.eval import eval_
from maclaurin.cli.explore import explore
from maclaurin.cli.generate import generate
from maclaurin.cli.inspect import inspect
from maclaurin.cli.list import list_entries
from maclaurin.cli.report import report
from maclaurin.cli.runs import runs
from maclaurin.cli.show import show
from maclaurin.cli.study import study_app
from maclaurin.cli.sweep import make_sweep
from maclaurin.cli.train import make_train
from maclaurin.errors import MaclaurinError
from maclaurin.extensions import load_entry_points, load_named


class _ImportAnywhere(TyperGroup):
    """Accepts `--import NAME` before or after the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        first: list[str] = []
        rest: list[str] = []
        words = iter(args[:end])
        for word in words:
            if word == "--import":
                value = next(words, None)
                if value is None:
                    raise MaclaurinError("--import needs a module or a .py file.")
                first += [word, value]
            else:
                (first if word.startswith("--import=") else rest).append(word)
        return super().parse_args(ctx, [*first, *rest, *args[end:]])


app = typer.Typer(
    name="maclaurin",
    cls=_ImportAnywhere,
    help="Softmax attention as a recurrent network.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_VARIANTS = "Variants of attention"
command_of(app, "explore", rich_help_panel=_VARIANTS)(explore)
command_of(app, "list", rich_help_panel=_VARIANTS)(list_entries)
command_of(app, "show", rich_help_panel=_VARIANTS)(show)
command_of(app, "check", rich_help_panel=_VARIANTS)(check)

_TRAINING = "Training and studies"
command_of(app, "train", rich_help_panel=_TRAINING)(make_train())
command_of(app, "sweep", rich_help_panel=_TRAINING)(make_sweep())
command_of(app, "runs", rich_help_panel=_TRAINING)(runs)
app.add_typer(study_app, name="study", rich_help_panel=_TRAINING)
command_of(app, "report", rich_help_panel=_TRAINING)(report)

_MODELS = "Pretrained and trained models"
command_of(app, "inspect", rich_help_panel=_MODELS)(inspect)
command_of(app, "convert", rich_help_panel=_MODELS)(convert)
command_of(app, "generate", rich_help_panel=_MODELS)(generate)
command_of(app, "eval", rich_help_panel=_MODELS)(eval_)

_MACHINE = "This machine"
command_of(app, "doctor", rich_help_panel=_MACHINE)(doctor)
command_of(app, "bench", rich_help_panel=_MACHINE)(bench)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"maclaurin {maclaurin.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Module or .py file that defines your own parts; before or after the command, may be "
            "repeated.",
        ),
    ] = None,
) -> None:
    load_entry_points()
    load_named(imports or [])


#: a parameter in a message of the library, such as `out`, `resume=True` or `compile=False`
_PARAMETER = re.compile(r"`(\w+)(=True|=False)?`")


def with_options(message: str) -> str:
    """The message with parameters of the library as options: `keep_sharp` becomes --keep-sharp."""
    options = {option.name: option for option in _options_of(typer.main.get_command(app))}

    def written(found: re.Match[str]) -> str:
        option = options.get(found[1])
        if option is None:
            return found[0]
        names = option.secondary_opts if found[2] == "=False" and option.secondary_opts else option.opts
        return max(names, key=len)

    return _PARAMETER.sub(written, message)


def _options_of(command: Any) -> Iterator[Any]:
    """All options of a command and of the commands under it."""
    yield from (each for each in command.params if each.param_type_name == "option")
    for inner in getattr(command, "commands", {}).values():
        yield from _options_of(inner)


def main() -> None:
    """Run a command; a MaclaurinError prints one message and exits with 2, without a traceback."""
    try:
        app()
    except MaclaurinError as problem:
        console = Console(stderr=True, highlight=False)
        console.print("[bold red]error:[/] ", end="")
        console.print(with_options(str(problem)), markup=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output, such as head, has exited
        sys.stderr.close()
        sys.exit(141)
