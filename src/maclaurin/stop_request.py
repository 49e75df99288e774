"""Ctrl-C and other signals as a request to stop that a loop reads; a second Ctrl-C stops at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, final


@final
class StopRequest:
    """Collects the named signals while the block runs; in threads other than the main one it collects none.

    `message` is printed at the first signal.
    """

    def __init__(self, *names: str, message: str = "") -> None:
        self.signal: int | None = None
        self._names, self._message = names, message
        self._before: dict[int, Any] = {}

    @property
    def is_set(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only it can set handlers
            known = [getattr(signal, name) for name in self._names if hasattr(signal, name)]
            self._before = {number: signal.signal(number, self._ask) for number in known}
        return self

    def __exit__(self, *problem: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
        if self._message:
            with contextlib.suppress(OSError):  # os.write, since a signal may come in the middle of a print
                os.write(sys.stderr.fileno(), f"\n{self._message}\n".encode())
