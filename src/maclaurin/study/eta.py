"""When the whole study will be done, from what was measured so far."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class RunTiming:
    """One run: of which experiment and cell, how many tokens, what it took or has left.

    seconds         of the whole run, where it is known: finished, or on its way
    seconds_left    where it is on its way
    """

    experiment: str
    cell: str
    tokens: int
    is_waiting: bool
    seconds: float | None = None
    seconds_left: float | None = None


def seconds_to_end(runs: Sequence[RunTiming], workers: int) -> float | None:
    """Runs at work end when they say, waiting ones take the places as they become free; None if unknown."""
    at_work = [
        _estimate(run, runs) if run.seconds_left is None else run.seconds_left
        for run in runs
        if _is_at_work(run)
    ]
    waiting = [_estimate(run, runs) for run in runs if run.is_waiting]
    known = [seconds for seconds in (*at_work, *waiting) if seconds is not None]
    if len(known) < len(at_work) + len(waiting):
        return None
    places = [seconds for seconds in at_work if seconds is not None]
    places += [0.0] * max(0, workers - len(places))
    heapq.heapify(places)
    for seconds in waiting:
        heapq.heappush(places, heapq.heappop(places) + (seconds or 0.0))
    return max(places, default=0.0)


def _is_at_work(run: RunTiming) -> bool:
    return not run.is_waiting and (run.seconds_left is not None or run.seconds is None)


def _estimate(run: RunTiming, runs: Sequence[RunTiming]) -> float | None:
    """Tokens at the usual speed of the same cell, else of the same experiment, else of any run."""
    measured = [other for other in runs if other.seconds is not None]
    nearest = [
        [o for o in measured if (o.experiment, o.cell) == (run.experiment, run.cell)],
        [o for o in measured if o.experiment == run.experiment],
        measured,
    ]
    for others in nearest:
        if others:
            return run.tokens * statistics.median((o.seconds or 0.0) / o.tokens for o in others)
    return None
