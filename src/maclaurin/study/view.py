"""The study on a terminal: a table that lives; in a log: a line for each thing that happens."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self, final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from maclaurin.study.glance import SETTLED, Glance, RunRow, State

SECONDS_BETWEEN_LINES = 30.0
#: lines of the terminal that are not rows of the table
OTHER_LINES = 7

COLOURS: dict[State, str] = {
    "waiting": "dim",
    "elsewhere": "dim",
    "running": "bold",
    "finished": "green",
    "reused": "green",
    "diverged": "yellow",
    "crashed": "red",
    "stopped": "dim",
}


class View(Protocol):
    """Shows glances."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, glance: Glance) -> None:
        """The study as it stands now."""
        ...


def make_view(title: str, console: Console) -> View:
    """A table on a terminal, lines elsewhere."""
    return LiveTable(title, console) if console.is_terminal else Lines(console)


@final
class LiveTable:
    """Redrawn in place."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, glance: Glance) -> None:
        """Draw it."""
        most = max(4, self._console.height - OTHER_LINES)
        self._live.update(Group(_table(self._title, glance, most), _sum(glance)), refresh=True)


@final
class Lines:
    """A line when a run begins or ends, and now and then one for the whole."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[int, State] = {}
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, glance: Glance) -> None:
        """Say what changed."""
        for number, row in enumerate(glance.rows):
            if self._states.get(number, "waiting") != row.state:
                self._states[number] = row.state
                self._say(f"{glance.settled}/{len(glance.rows)} {_told(row)}")
        now = time.monotonic()
        if now - self._last > SECONDS_BETWEEN_LINES:
            self._last = now
            self._say(str(_sum(glance)))

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _told(row: RunRow) -> str:
    what = f"{row.state}: {row.experiment}, {row.cell}, seed {row.seed}"
    if row.result:
        what += f", {row.result}"
    if row.seconds is not None and row.state in ("finished", "diverged"):
        what += f", {duration(row.seconds)}"
    return what


def _table(title: str, glance: Glance, most: int) -> Table:
    table = Table(title=title, title_justify="left", expand=False, pad_edge=False)
    table.add_column("cell", overflow="ellipsis", no_wrap=True, max_width=40)
    table.add_column("seed", justify="right")
    table.add_column("state")
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("time left", justify="right")
    several = len({row.experiment for row in glance.rows}) > 1
    for row in chosen_rows(glance.rows, most):
        name = f"{row.experiment}: {row.cell}" if several else row.cell
        loss = row.result or ("" if row.loss is None else f"{row.loss:.4f}")
        left = "" if row.seconds_left is None else duration(row.seconds_left)
        step = f"{row.step}/{row.steps}"
        table.add_row(Text(name), str(row.seed), Text(row.state, COLOURS[row.state]), step, Text(loss), left)
    return table


def chosen_rows(rows: Iterable[RunRow], most: int) -> list[RunRow]:
    """All rows if they fit; else those at work, the last settled ones and the next waiting ones."""
    everything = list(rows)
    if len(everything) <= most:
        return everything
    places = {id(row): place for place, row in enumerate(everything)}
    running = [row for row in everything if row.state == "running"][:most]
    settled = [row for row in everything if row.state in SETTLED]
    waiting = [row for row in everything if row.state in ("waiting", "elsewhere")]
    room = most - len(running)
    next_ones = waiting[: max(room // 4, room - len(settled))]
    last_ones = settled[len(settled) - (room - len(next_ones)) :] if room > len(next_ones) else []
    return sorted([*running, *next_ones, *last_ones], key=lambda row: places[id(row)])


def _sum(glance: Glance) -> Text:
    states: tuple[State, ...] = (
        "running",
        "finished",
        "reused",
        "diverged",
        "crashed",
        "waiting",
        "elsewhere",
    )
    counts = ", ".join(f"{count} {state}" for state in states if (count := glance.count(state)))
    left = "" if glance.seconds_left is None else f", about {duration(glance.seconds_left)} left"
    whole = f"{glance.settled} of {len(glance.rows)} runs done"
    return Text(f"{whole} ({counts}), {duration(glance.elapsed)} so far{left}")


def duration(seconds: float) -> str:
    """'42 s', '3:05 min', '2:10 h'."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 5940:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h" if whole < 360_000 else f"{whole / 86400:.0f} days"
