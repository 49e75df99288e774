"""The display of a running study on a terminal: a live table there, one line per event in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from maclaurin.study.run_record import Label
from maclaurin.study.view import Overview, Row, RowStatus, View, chosen_rows
from maclaurin.wording import duration, in_list

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


def make_view(title: str, console: Console) -> View:
    """A table on a terminal, lines elsewhere."""
    return LiveTable(title, console) if console.is_terminal else EventLines(console)


@final
class LiveTable(View):
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

    def show(self, overview: Overview) -> None:
        """Draw it."""
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
