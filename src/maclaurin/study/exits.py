"""What the end of a process says about its run."""

from __future__ import annotations

import signal

from maclaurin.study.executor import Result
from maclaurin.study.pool import PoolEntry


def result_of_exit(key: str, entry: PoolEntry, code: int | None) -> Result:
    """A record if there is one; else 0 means stopped when asked to, and anything else a crash."""
    record = entry.record()
    if record is not None or code == 0:
        return Result(key, record)
    lines = entry.last_lines()
    return Result(key, problem=f"{_how(code)}\n{lines}" if lines else _how(code))


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the process was ended by {name}"
    return f"the process ended with {code}"
