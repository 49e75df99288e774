"""The command line: one thin file per command."""

import os
import sys

from rich.console import Console

from maclaurin.errors import InputError


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
