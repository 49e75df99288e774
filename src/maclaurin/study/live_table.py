"""The runs of a study while they are trained: a live table on a terminal, one line per event in a log.

rich is imported when something is drawn: machines that only train do not need it.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, final

from maclaurin.study.run_progress import RunProgress
from maclaurin.study.run_record import Label, RunRecord, Status
from maclaurin.wording import duration, in_list

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: the status of a run, or where else it is: reused from the pool, or trained elsewhere by another study now
RowStatus = Literal[Status, "reused", "elsewhere"]
DONE: tuple[RowStatus, ...] = ("finished", "diverged", "crashed", "stopped", "reused")
SECONDS_BETWEEN_LINES = 30.0
#: lines of the terminal that are not rows of the table
OTHER_LINES = 7

COLOURS: dict[RowStatus, str] = {
    "waiting": "dim",
    "elsewhere": "dim",
    "running": "bold",
    "finished": "green",
    "reused": "green",
    "diverged": "yellow",
    "crashed": "red",
    "stopped": "dim",
}


@final
@dataclass(frozen=True)
class Row:
    """One run of the display."""

    label: Label
    record: RunRecord
    status: RowStatus
    progress: RunProgress | None = None
    result: str = ""

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.progress.step if self.progress and self.status == "running" else self.record.step

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole run, measured or expected."""
        if self.status == "running":
            left = self.seconds_left
            return None if self.progress is None or left is None else self.progress.seconds + left
        return self.record.seconds

    @property
    def seconds_left(self) -> float | None:
        """Seconds left of a running run, if known."""
        return self.progress.seconds_left if self.progress and self.status == "running" else None


@final
@dataclass(frozen=True)
class Overview:
    """All runs in order, and totals."""

    rows: tuple[Row, ...]
    elapsed: float
    workers: int

    @property
    def done(self) -> int:
        """Runs that need no more work."""
        return sum(row.status in DONE for row in self.rows)

    def count(self, status: RowStatus) -> int:
        """Runs with a status."""
        return sum(row.status == status for row in self.rows)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last run ends, estimated from finished work; None if there is none."""
        return seconds_to_end(self.rows, self.workers)

    def __str__(self) -> str:
        """The totals in one line."""
        statuses: tuple[RowStatus, ...] = (
            "running", "finished", "reused", "diverged", "crashed", "waiting", "elsewhere",
        )  # fmt: skip
        counts = ", ".join(f"{count} {status}" for status in statuses if (count := self.count(status)))
        seconds = self.seconds_left
        left = "" if not seconds else f", about {duration(seconds)} left"
        whole = f"{self.done} of {len(self.rows)} runs done"
        return f"{whole} ({counts}), {duration(self.elapsed)} so far{left}"


def seconds_to_end(rows: Sequence[Row], workers: int) -> float | None:
    """Running runs end at their estimates; waiting runs take places as they become free."""
    running = [
        row.seconds_left if row.seconds_left is not None else _estimate(row, rows)
        for row in rows
        if row.status == "running"
    ]
    waiting = [_estimate(row, rows) for row in rows if row.status in ("waiting", "elsewhere")]
    if not running and not waiting:
        return 0.0
    if any(seconds is None for seconds in (*running, *waiting)):
        return None
    places = [seconds or 0.0 for seconds in running]
    places += [0.0] * max(0, workers - len(places))
    heapq.heapify(places)
    for seconds in waiting:
        heapq.heappush(places, heapq.heappop(places) + (seconds or 0.0))
    return max(places, default=0.0)


def _estimate(row: Row, rows: Sequence[Row]) -> float | None:
    """Tokens at the usual speed of the same cell, else of the same experiment, else of any run."""
    measured = [other for other in rows if other.seconds is not None and other.status != "crashed"]
    nearest = [
        [other for other in measured if other.label[:2] == row.label[:2]],
        [other for other in measured if other.label.experiment == row.label.experiment],
        measured,
    ]
    for others in nearest:
        if others:
            speeds = [(other.seconds or 0.0) / other.record.run.tokens for other in others]
            return row.record.run.tokens * statistics.median(speeds)
    return None


class View:
    """Shows a running study; this one shows nothing, for use as a library."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, overview: Overview) -> None:
        """Show the current state."""


def chosen_rows(rows: Iterable[Row], most: int) -> list[Row]:
    """All rows if they fit; else the running ones, the last done ones and the next waiting ones."""
    everything = list(rows)
    if len(everything) <= most:
        return everything
    places = {id(row): place for place, row in enumerate(everything)}
    running = [row for row in everything if row.status == "running"][:most]
    done = [row for row in everything if row.status in DONE]
    waiting = [row for row in everything if row.status in ("waiting", "elsewhere")]
    space = most - len(running)
    next_ones = waiting[: max(space // 4, space - len(done))]
    last_ones = done[len(done) - (space - len(next_ones)) :] if space > len(next_ones) else []
    return sorted([*running, *next_ones, *last_ones], key=lambda row: places[id(row)])


def make_view(title: str, console: Console) -> View:
    """A table on a terminal, lines elsewhere."""
    return LiveTable(title, console) if console.is_terminal else EventLines(console)


@final
class LiveTable(View):
    """Redrawn in place."""

    def __init__(self, title: str, console: Console) -> None:
        from rich.live import Live

        self._title, self._console = title, console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, overview: Overview) -> None:
        """Draw it."""
        from rich.console import Group
        from rich.text import Text

        most = max(4, self._console.height - OTHER_LINES)
        self._live.update(Group(_table(self._title, overview, most), Text(str(overview))), refresh=True)


@final
class EventLines(View):
    """Prints a line when a run begins or ends, and from time to time a summary."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[Label, RowStatus] = {}
        self._last = time.monotonic()

    def show(self, overview: Overview) -> None:
        """Print what changed."""
        for row in overview.rows:
            if self._shown.get(row.label, "waiting") != row.status:
                self._shown[row.label] = row.status
                self._print(f"{overview.done}/{len(overview.rows)} {_line(row)}")
        now = time.monotonic()
        if now - self._last > SECONDS_BETWEEN_LINES:
            self._last = now
            self._print(str(overview))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _line(row: Row) -> str:
    label = row.label
    what = f"{row.status}: {label.experiment}, {in_list(label.cell)}, seed {label.seed}"
    if row.result:
        what += f", {row.result}"
    if row.seconds is not None and row.status in ("finished", "diverged"):
        what += f", {duration(row.seconds)}"
    return what


def _table(title: str, overview: Overview, most: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", expand=False, pad_edge=False)
    table.add_column("cell", overflow="ellipsis", no_wrap=True, max_width=40)
    table.add_column("seed", justify="right")
    table.add_column("status")
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("time left", justify="right")
    several = len({row.label.experiment for row in overview.rows}) > 1
    for row in chosen_rows(overview.rows, most):
        name = f"{row.label.experiment}: {row.label.cell}" if several else row.label.cell
        progress = row.progress
        loss = row.result or ("" if progress is None or progress.loss is None else f"{progress.loss:.4f}")
        left = "" if row.seconds_left is None else duration(row.seconds_left)
        step = f"{row.step}/{row.record.run.steps}"
        status = Text(row.status, COLOURS[row.status])
        table.add_row(Text(name), str(row.label.seed), status, step, Text(loss), left)
    return table
