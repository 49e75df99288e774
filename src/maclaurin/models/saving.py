"""Models on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging


def save_quietly(model: PreTrainedModel, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """save_pretrained without a progress bar of its own between the lines of a run."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        if shown:
            logging.enable_progress_bar()
