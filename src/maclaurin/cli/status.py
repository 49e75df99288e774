"""What a command is busy with while nothing can be counted: a spinner on a terminal, a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

#: a wait that is shorter is not mentioned afterwards
SECONDS = 2.0


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show `text` on the standard error at once, and how long it took at the end."""
    # bound to the stream of now: loading a GGUF file redirects sys.stderr for a while
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
