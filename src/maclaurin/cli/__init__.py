"""The command line: one thin file per command."""

import os
import sys
from collections.abc import Callable
from inspect import cleandoc
from textwrap import dedent, indent
from typing import Any, TypeVar

import typer
from rich.console import Console

from maclaurin.errors import InputError

Command = TypeVar("Command", bound=Callable[..., Any])


def help_of(command: Callable[..., Any]) -> str:
    """The docstring of a command for a terminal of any width.

    Typer keeps the line breaks of a docstring, so prose gets rid of them here. Indented paragraphs are
    examples: they follow their heading without empty lines. The colour also keeps typer from removing their
    indentation.
    """
    paragraphs: list[str] = []
    for paragraph in cleandoc(command.__doc__ or "").split("\n\n"):
        if paragraph.startswith(" "):
            paragraphs[-1] += f"\n[cyan]{indent(dedent(paragraph), '  ')}[/]"
        else:
            paragraphs.append(paragraph.replace("\n", " "))
    return "\n\n".join(paragraphs)


def command_of(app: typer.Typer, name: str, **options: Any) -> Callable[[Command], Command]:
    """`app.command`, with the help of `help_of`."""
    return lambda function: app.command(name, help=help_of(function), **options)(function)


def table_console(width: int = 140) -> Console:
    """Standard output; in a file or a pipe it has this width, so that tables are not broken."""
    is_narrow = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=width if is_narrow else None)


def whole_numbers(written: str, option: str, example: str, least: int = 0) -> list[int]:
    """'4, 2' as [4, 2]; any other text is an error that repeats it and shows the example."""
    numbers = []
    for word in written.split(","):
        if not word.strip().isdecimal():
            raise InputError(
                f"{option}: {word.strip()!r} in {written!r} is not a whole number; write {option} {example}."
            )
        numbers.append(int(word))
    if min(numbers) < least:
        raise InputError(f"{option} takes numbers of at least {least}; got {min(numbers)}.")
    return numbers
