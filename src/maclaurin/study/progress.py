"""How far a run is, told through a small file that is there whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

SECONDS_BETWEEN_NEWS = 1.0


@final
@dataclass(frozen=True)
class RunProgress:
    """The last news of a run: seconds are those of the whole run, also before it was interrupted."""

    step: int
    steps: int
    loss: float | None = None
    seconds: float = 0.0
    seconds_left: float | None = None


@final
class RunTeller:
    """The trainer's display in a study: hands news on at most once a second, and lines to the log."""

    def __init__(
        self, steps: int, seconds_before: float, tell: Callable[[RunProgress], None], *, says: bool = True
    ) -> None:
        self._steps, self._tell, self._says = steps, tell, says
        self._begun, self._told = time.monotonic() - seconds_before, 0.0
        self._first: tuple[int, float] | None = None  # step and moment of the first look at the losses
        self._step, self._loss = 0, None

    def __enter__(self) -> Self:
        self._pass_on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """So many steps are done."""
        now = time.monotonic()
        self._first = self._first or (done, now)
        self._step, self._loss = done, loss
        if now - self._told >= SECONDS_BETWEEN_NEWS:
            self._pass_on()

    def say(self, text: str) -> None:
        """One line of the log."""
        if self._says:
            print(text, flush=True)

    @property
    def seconds(self) -> float:
        """Of the whole run so far."""
        return time.monotonic() - self._begun

    def _pass_on(self) -> None:
        self._told = time.monotonic()
        self._tell(RunProgress(self._step, self._steps, self._loss, self.seconds, self._seconds_left()))

    def _seconds_left(self) -> float | None:
        if self._first is None or self._step <= self._first[0]:
            return None
        step, moment = self._first
        return (time.monotonic() - moment) / (self._step - step) * (self._steps - self._step)


def write_progress(path: Path, news: RunProgress) -> None:
    """Without a flush to the disk: old news is no loss."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(dataclasses.asdict(news)))
    partial.replace(path)


def read_progress(path: Path) -> RunProgress | None:
    """The last news, if there is any."""
    try:
        return RunProgress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
