"""Progress of a run: a bar with loss, speed and time left on a terminal, or plain lines in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class Display(Protocol):
    """Receives the progress of a run between its start and its end."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """`done` steps are done."""
        ...

    def say(self, text: str) -> None:
        """One line."""
        ...


class TerminalDisplay:
    """Prints to stderr, in the first process only."""

    def __init__(self, title: str, steps: int, start: int, *, visible: bool) -> None:
        self.console = Console(stderr=True)
        self._visible, self._steps = visible, steps
        self._began, self._first, self._last_line = time.perf_counter(), start, 0.0
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
        """`done` steps are done; the speed is 0 while it is unknown."""
        speed = f", {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        news = f"loss {loss:.4f}{speed}"
        if self._bar:
            self._bar.update(self._task, completed=done, news=news)
            return
        now = time.perf_counter()
        if self._visible and (now - self._last_line > SECONDS_BETWEEN_LINES or done == self._steps):
            self._last_line = now
            left = (now - self._began) / max(1, done - self._first) * (self._steps - done)
            self.say(f"step {done}/{self._steps}, {news}, {left:.0f} s left")

    def say(self, text: str) -> None:
        """One line."""
        if self._visible:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def still_working(say: Callable[[str], None], what: str) -> Iterator[None]:
    """While the block runs, print `what` and the time so far every few seconds."""
    began, ended = time.perf_counter(), threading.Event()

    def repeat() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            say(f"{what}, {time.perf_counter() - began:.0f} s so far")

    thread = threading.Thread(target=repeat, name="still working", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
