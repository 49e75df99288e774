"""The command line: one thin file per command."""

import os
import sys

from rich.console import Console


def table_console(width: int = 140) -> Console:
    """Standard output; in a file or a pipe it has this width, so that tables are not broken."""
    is_narrow = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=width if is_narrow else None)
