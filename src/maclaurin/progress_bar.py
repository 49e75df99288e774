"""Progress with the time left: a bar on a terminal, lines in a log, nothing for quick work.

with report_progress("measuring", progress) as report:   # any work, by the share that is done
    report(0.5, "5 of 10 texts")
with status("loading x"): …                              # work without a share
with TerminalDisplay(title, steps, start) as display:    # a run of training, with lines between its steps
    display.step(10, 2.5, 1e6)
    display.say("step 10: validation loss 2.4")
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, final

QUIET_SECONDS = 2.0
LINE_SECONDS = 10.0


class Progress(ABC):
    """Receives how much is done."""

    @abstractmethod
    def __call__(self, fraction: float | None, note: str = "") -> None:
        """`fraction` of the work is done (None: the end is unknown); `note` describes it."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Print one line."""

    @abstractmethod
    def close(self) -> None:
        """The work has ended."""


@contextmanager
def report_progress(title: str, enabled: bool = True) -> Iterator[Progress]:
    """A report that prints nothing in its first seconds, and nothing at all if not enabled."""
    report = _chosen(title, enabled)
    try:
        yield report
    finally:
        report.close()


@contextmanager
def status(text: str, enabled: bool = True) -> Iterator[None]:
    """Print `text` to standard error at once, and the duration at the end; nothing if not enabled."""
    if not enabled:
        yield
        return
    from rich.console import Console

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
    if seconds >= QUIET_SECONDS:
        console.print(f"{text}: {seconds:.0f} s", markup=False, soft_wrap=True)


def _chosen(title: str, enabled: bool = True) -> Progress:
    if not enabled:
        return Silent()
    return Bar(title) if sys.stderr.isatty() else Lines(title)


@final
class Silent(Progress):
    """Prints nothing."""

    def __call__(self, fraction: float | None, note: str = "") -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class Lines(Progress):
    """A line every few seconds, for logs; `start` is the share that was done before."""

    def __init__(self, title: str, *, quiet: float | None = None, start: float = 0.0) -> None:
        self._title, self._begun, self._start = title, time.monotonic(), start
        self._quiet = QUIET_SECONDS if quiet is None else quiet
        self._due = self._begun + self._quiet

    def __call__(self, fraction: float | None, note: str = "") -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LINE_SECONDS
        parts = [self._title, note, self._left(fraction, now - self._begun)]
        self.say(" · ".join(part for part in parts if part))

    def say(self, text: str) -> None:
        """Print one line."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Print the total time if lines were printed."""
        elapsed = time.monotonic() - self._begun
        if elapsed >= self._quiet:
            self.say(f"{self._title} · {elapsed:.0f} s")

    def _left(self, fraction: float | None, elapsed: float) -> str:
        if not fraction or fraction <= self._start:
            return ""
        return f"{fraction:.0%}, {elapsed * (1 - fraction) / (fraction - self._start):.0f} s left"


@final
class Bar(Progress):
    """A rich bar with the time left, shown once the work has taken a few seconds; `keep` leaves it there."""

    def __init__(
        self, title: str, *, quiet: float | None = None, start: float = 0.0, keep: bool = False
    ) -> None:
        from rich.console import Console

        self._title, self._start, self._keep = title, start, keep
        self._due = time.monotonic() + (QUIET_SECONDS if quiet is None else quiet)
        self._console = Console(stderr=True)
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, fraction: float | None, note: str = "") -> None:
        """Move the bar."""
        if self._bar is None and time.monotonic() >= self._due:
            self._open()
        if self._bar is not None:
            total = None if fraction is None else 1.0
            self._bar.update(self._task, total=total, completed=fraction or 0.0, note=note)

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _open(self) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[note]}", markup=False),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=not self._keep,
        )
        self._task = self._bar.add_task(self._title, total=None, completed=self._start, note="")
        self._bar.start()


# ----------------------------------------------------------------------------------- a run of training


class Display:
    """Receives the progress of a run between its start and its end; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """`done` steps are done; the speed is 0 while it is unknown."""

    def recorded(self, step: int, loss: float) -> None:
        """The loss of one step; called for every step in order, some steps later."""

    def say(self, text: str) -> None:
        """Print one line."""


@final
class TerminalDisplay(Display):
    """Shows a run on standard error, with loss and speed."""

    def __init__(self, title: str, steps: int, start: int) -> None:
        self._steps = steps
        done = start / max(1, steps)
        self._report: Progress = (
            Bar(title, quiet=0.0, start=done, keep=True)
            if sys.stderr.isatty()
            else Lines(title, quiet=0.0, start=done)
        )

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._report.close()

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """`done` steps are done; the speed is 0 while it is unknown."""
        speed = f", {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        self._report(done / self._steps, f"step {done}/{self._steps}, loss {loss:.4f}{speed}")

    def say(self, text: str) -> None:
        """Print one line."""
        self._report.say(text)


@contextmanager
def still_working(say: Callable[[str], None], what: str) -> Iterator[None]:
    """While the block runs, print `what` and the time so far every few seconds."""
    began, ended = time.perf_counter(), threading.Event()

    def repeat() -> None:
        while not ended.wait(LINE_SECONDS):
            say(f"{what}, {time.perf_counter() - began:.0f} s so far")

    thread = threading.Thread(target=repeat, name="still working", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
