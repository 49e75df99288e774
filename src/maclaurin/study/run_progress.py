"""Progress of a run, passed from its process to the study through a small file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

from maclaurin.errors import MaclaurinError
from maclaurin.plain_data import read_or_none, write_json
from maclaurin.progress_bar import Display

SECONDS_BETWEEN_REPORTS = 1.0
#: a run is stopped when its loss is this far above its start at this many checked steps in a row
NATS_ABOVE_START = 1.0
JUDGED_STEPS = 10
#: every tenth step is checked. This does not depend on the log interval, which must not change a result
STEPS_BETWEEN_JUDGED = 10


class StoppedEarly(MaclaurinError):
    """The loss stayed far above its start: the run counts as diverged."""

    def __init__(self, step: int, loss: float, start: float) -> None:
        self.step = step
        super().__init__(
            f"step {step}: the loss is {loss:.4g} and has stayed more than {NATS_ABOVE_START:g} above the "
            f"{start:.4g} it began with, so the run was stopped early."
        )


@final
@dataclass(frozen=True)
class RunProgress:
    """The last report of a run; seconds include the time before an interruption."""

    step: int
    steps: int
    loss: float | None = None
    seconds: float = 0.0
    seconds_left: float | None = None


@final
class RunReporter(Display):
    """The trainer's display in a study: reports progress at most once a second, prints lines to the log.

    It also stops a run that has diverged below the trainer's bound on the loss.
    """

    def __init__(
        self,
        steps: int,
        report: Callable[[RunProgress], None],
        *,
        seconds_before: float = 0.0,
        losses_before: Sequence[tuple[int, float]] = (),
        prints: bool = True,
    ) -> None:
        self._steps, self._report, self._prints = steps, report, prints
        self._begun, self._reported = time.monotonic() - seconds_before, 0.0
        self._first: tuple[int, float] | None = None  # step and time of the first logged loss
        self._step, self._loss = 0, None
        self._starts: list[float] = []
        self._above, self._judged = 0, 0
        for step, loss in losses_before:
            self._judge(step, loss)

    def __enter__(self) -> Self:
        self._pass_on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """`done` steps are done."""
        now = time.monotonic()
        self._first = self._first or (done, now)
        self._step, self._loss = done, loss
        if now - self._reported >= SECONDS_BETWEEN_REPORTS:
            self._pass_on()

    def recorded(self, step: int, loss: float) -> None:
        """The loss of one step; raises once the run has diverged."""
        if self._judge(step, loss) >= JUDGED_STEPS:
            raise StoppedEarly(step, loss, statistics.median(self._starts))

    def say(self, text: str) -> None:
        """One line of the log."""
        if self._prints:
            print(text, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds of the whole run so far."""
        return time.monotonic() - self._begun

    def _judge(self, step: int, loss: float) -> int:
        """How many judged losses in a row are far above the start, the median of the first three.

        A resumed run repeats the steps after its checkpoint; they are judged once.
        """
        if step <= self._judged or step % STEPS_BETWEEN_JUDGED:
            return self._above
        self._judged = step
        if len(self._starts) < 3:
            self._starts.append(loss)
        else:
            limit = statistics.median(self._starts) + NATS_ABOVE_START
            self._above = self._above + 1 if loss > limit else 0
        return self._above

    def _pass_on(self) -> None:
        self._reported = time.monotonic()
        self._report(RunProgress(self._step, self._steps, self._loss, self.seconds, self._seconds_left()))

    def _seconds_left(self) -> float | None:
        if self._first is None or self._step <= self._first[0]:
            return None
        step, moment = self._first
        return (time.monotonic() - moment) / (self._step - step) * (self._steps - self._step)


def write_progress(path: Path, progress: RunProgress) -> None:
    """Write atomically, but without a flush to the disk: losing a report does no harm."""
    write_json(path, progress, indent=None, flush=False)


def read_progress(path: Path) -> RunProgress | None:
    """The last report, if there is any."""
    return read_or_none(RunProgress, path)
