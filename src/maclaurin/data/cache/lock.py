"""One process makes, the others wait: a lock that the system releases even after kill -9."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from maclaurin.data.progress import QUIET_SECONDS, Report, report_progress


@contextmanager
def locked(path: Path, what: str, *, progress: bool = True) -> Iterator[bool]:
    """Hold the lock file `path`; False where the system has no such locks, and then nobody waits."""
    with path.open("ab") as file:
        with report_progress(f"waiting for the process that prepares {what}", progress) as report:
            held = _acquire(file, report)
        yield held


def _acquire(file: IO[bytes], report: Report) -> bool:
    if sys.platform == "win32":
        return False
    import fcntl
    import time

    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(None)
            time.sleep(QUIET_SECONDS / 20)
        except OSError:  # some network file systems
            return False
        else:
            return True
