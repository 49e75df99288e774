"""How far a benchmark is: a line for each case, and on a terminal a bar with the time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def display(total: int) -> Iterator[Display]:
    """Shown for as long as the cases run."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Display(bar, total)


@final
class Display:
    """Told when a case begins and what came of it."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)
        self._total, self._done, self._begun = total, 0, time.perf_counter()

    def begin(self, name: str) -> None:
        """A case is being measured."""
        self._bar.update(self._task, description=name)

    def end(self, told: str) -> None:
        """It is done, and this is what came of it."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        left = (time.perf_counter() - self._begun) / self._done * (self._total - self._done)
        ending = "" if self._bar.console.is_terminal else f"; {left:.0f} s left"
        line = f"{self._done}/{self._total} {told}{ending}"
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
