"""Whether a study still lives: it holds a lock that the system releases even after kill -9."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maclaurin.errors import InputError

try:
    import fcntl
except ImportError:  # a system without such locks: studies are not told apart, and nobody is orphaned
    fcntl = None

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_SAVE = 60.0


@contextmanager
def living_study(path: Path) -> Iterator[None]:
    """Hold the lock; another study at work in the same folder is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        end = time.monotonic() + 5 * SECONDS_BETWEEN_LOOKS  # orphans touch the lock when they look
        while not _try_lock(file.fileno(), shared=False):
            if time.monotonic() > end:
                raise InputError(
                    f"another study is at work in {path.parent}: wait for it, or choose another --out."
                )
            time.sleep(0.1)
        yield


def is_locked(path: Path) -> bool:
    """Whether somebody holds this lock now."""
    try:
        with path.open("a") as file:
            return not _try_lock(file.fileno(), shared=True)
    except FileNotFoundError:
        return False


def end_with_study(path: Path) -> None:
    """From now on, end this process once the study is gone: as asked at first, and then at once."""
    threading.Thread(target=_watch, args=(path,), daemon=True, name="study-watch").start()


def _watch(path: Path) -> None:
    while is_locked(path):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    os._exit(1)


def _try_lock(descriptor: int, *, shared: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return True
    return True
