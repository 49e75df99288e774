"""A study at a glance, as data: what the live table shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

State = Literal["waiting", "elsewhere", "running", "finished", "diverged", "crashed", "stopped", "reused"]

#: states that will not change any more
SETTLED: tuple[State, ...] = ("finished", "diverged", "crashed", "stopped", "reused")


@final
@dataclass(frozen=True)
class RunRow:
    """One run: cell, seed, state, how far, the last loss or the result, seconds left or taken."""

    experiment: str
    cell: str
    seed: int
    state: State
    step: int
    steps: int
    loss: float | None = None
    result: str = ""
    seconds_left: float | None = None
    seconds: float | None = None


@final
@dataclass(frozen=True)
class Glance:
    """All runs in their order, and the whole."""

    rows: tuple[RunRow, ...]
    elapsed: float
    seconds_left: float | None

    @property
    def settled(self) -> int:
        """Runs that need no more work."""
        return sum(row.state in SETTLED for row in self.rows)

    def count(self, state: State) -> int:
        """Runs in a state."""
        return sum(row.state == state for row in self.rows)
