"""Save models without transformers' progress bars."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging


def save_quietly(model: PreTrainedModel, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """save_pretrained without a progress bar."""
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=weights)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn transformers' progress bars off for a while."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
