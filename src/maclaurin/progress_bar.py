"""Progress with the time left: a bar on a terminal, lines in a log, nothing for quick work."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

QUIET_SECONDS = 2.0
LINE_SECONDS = 10.0


class Report(ABC):
    """Receives how much is done."""

    @abstractmethod
    def __call__(self, fraction: float | None, note: str = "") -> None:
        """`fraction` of the work is done (None: the end is unknown); `note` describes it."""

    @abstractmethod
    def close(self) -> None:
        """The work has ended."""


@contextmanager
def report_progress(title: str, enabled: bool = True) -> Iterator[Report]:
    """A report that prints nothing in its first seconds, and nothing at all if not enabled."""
    report = _chosen(title, enabled)
    try:
        yield report
    finally:
        report.close()


def _chosen(title: str, enabled: bool) -> Report:
    if not enabled:
        return Silent()
    return Bar(title) if sys.stderr.isatty() else Lines(title)


@final
class Silent(Report):
    """Prints nothing."""

    def __call__(self, fraction: float | None, note: str = "") -> None:
        """Ignore it."""

    def close(self) -> None:
        """Nothing is open."""


@final
class Lines(Report):
    """A line every few seconds, for logs."""

    def __init__(self, title: str) -> None:
        self._title, self._start = title, time.monotonic()
        self._due = self._start + QUIET_SECONDS

    def __call__(self, fraction: float | None, note: str = "") -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + LINE_SECONDS
        parts = [self._title, note, self._left(fraction, now - self._start)]
        print(" · ".join(part for part in parts if part), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Print the total time if lines were printed."""
        elapsed = time.monotonic() - self._start
        if elapsed >= QUIET_SECONDS:
            print(f"{self._title} · {elapsed:.0f} s", file=sys.stderr, flush=True)

    @staticmethod
    def _left(fraction: float | None, elapsed: float) -> str:
        if not fraction:
            return ""
        return f"{fraction:.0%}, {elapsed * (1 - fraction) / fraction:.0f} s left"


@final
class Bar(Report):
    """A rich bar with the time left, shown once the work has taken a few seconds."""

    def __init__(self, title: str) -> None:
        self._title, self._due = title, time.monotonic() + QUIET_SECONDS
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, fraction: float | None, note: str = "") -> None:
        """Move the bar."""
        if self._bar is None and time.monotonic() >= self._due:
            self._open()
        if self._bar is not None:
            total = None if fraction is None else 1.0
            self._bar.update(self._task, total=total, completed=fraction or 0.0, note=note)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._title, total=None, note="")
        self._bar.start()
