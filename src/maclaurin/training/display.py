"""How a run shows itself: a bar with loss, speed and ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Display(Protocol):
    """Something that is told how a run gets on, between its begin and its end."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """So many steps are done."""
        ...

    def say(self, text: str) -> None:
        """One line."""
        ...


class TerminalDisplay:
    """Silent in every process but the first."""

    def __init__(self, title: str, steps: int, start: int, *, visible: bool) -> None:
        self.console = Console(stderr=True)
        self._visible, self._title, self._steps = visible, title, steps
        self._begun, self._first, self._last_line = time.perf_counter(), start, 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if visible and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[news]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task(title, total=steps, completed=start, news="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """So many steps are done."""
        news = f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=done, news=news)
            return
        now = time.perf_counter()
        if self._visible and (now - self._last_line > SECONDS_BETWEEN_LINES or done == self._steps):
            self._last_line = now
            left = (now - self._begun) / max(1, done - self._first) * (self._steps - done)
            self.say(f"step {done}/{self._steps}, {news}, {left:.0f} s left")

    def say(self, text: str) -> None:
        """One line."""
        if self._visible:
            self.console.print(text, markup=False, highlight=False)
