"""The harness and its libraries tell much that our bar and our table say better."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any


def quieten() -> None:
    """Only errors of the harness and of what reads its data."""
    import datasets

    datasets.disable_progress_bars()
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No bars of tqdm inside, and nothing on the standard output."""
    from tqdm.std import tqdm

    begin: Any = tqdm.__init__

    def begin_silently(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **{**options, "disable": True})

    tqdm.__init__ = begin_silently
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.__init__ = begin
