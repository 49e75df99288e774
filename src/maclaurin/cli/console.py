"""Helpers of all commands: consoles for wide tables, a message while something loads, the device by name."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from maclaurin.errors import InputError

#: the duration of shorter waits is not printed
SECONDS = 2.0


def table_console(width: int = 140) -> Console:
    """Standard output; in a file or a pipe it has this width, so that tables are not broken."""
    is_narrow = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=width if is_narrow else None)


@contextmanager
def status(text: str) -> Iterator[None]:
    """Print `text` to standard error at once, and the duration at the end."""
    # bound to the current stream: loading a GGUF file redirects sys.stderr for a while
    console = Console(file=sys.stderr, highlight=False)
    start = time.monotonic()
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(f"{text} …", markup=False, soft_wrap=True)
        yield
    seconds = time.monotonic() - start
    if seconds >= SECONDS:
        console.print(f"{text}: {seconds:.0f} s", markup=False, soft_wrap=True)


def device_named(name: str) -> str:
    """The device; raises if it cannot be used. auto is a GPU if there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        first = str(problem).strip().splitlines()[0].rstrip(".")
        raise InputError(f"--device {name} cannot be used here: {first}. Use cpu or auto.") from None
    return name
