"""How far an inspection is: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


@final
class Display:
    """Counts work; `total` and the amounts are in any one unit."""

    def __init__(self, total: float, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._total, self._done, self._here = total, 0.0, 0.0
        self._begun, self._last_line = time.perf_counter(), 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console) if self._console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def found(self, amount: float) -> None:
        """Work that was done before."""
        self._done += amount
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)

    def advance(self, amount: float, what: str) -> None:
        """Some more work is done."""
        self._done, self._here = self._done + amount, self._here + amount
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, description=what)
            return
        now = time.perf_counter()
        if now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (now - self._begun) / self._here * max(self._total - self._done, 0)
            self.say(f"{what}: {100 * self._done / self._total:.0f} %, {left:.0f} s left")

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
