"""Where runs are trained: what the runner asks of any such place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from maclaurin.study.job import Job
from maclaurin.study.progress import RunProgress
from maclaurin.study.record import RunRecord


@final
@dataclass(frozen=True)
class Result:
    """How a run ended: with a record, with a problem (it crashed), or with neither (it was stopped)."""

    key: str
    record: RunRecord | None = None
    problem: str | None = None


class Executor(Protocol):
    """Trains jobs somewhere. Every job has a key.

    threads   of torch that each run should use; None where somebody else decides
    """

    threads: int | None

    @property
    def workers(self) -> int:
        """How many it trains at once."""
        ...

    def free(self) -> int:
        """How many more it takes now."""
        ...

    def submit(self, job: Job) -> None:
        """Begin a run."""
        ...

    def poll(self, seconds: float) -> list[Result]:
        """The runs that ended since; waits for one, but no longer than this."""
        ...

    def progress(self) -> dict[str, RunProgress]:
        """News of the runs at work."""
        ...

    def stop(self, seconds: float) -> None:
        """Ask all runs to save and end, wait so long for them, then end them."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...
