"""Settings that several studies share, so that they share runs too."""

from __future__ import annotations

from typing import Any

#: text at pico size: 400 steps of 16 × 128 tokens, twenty seconds on one core
PICO_TEXT: dict[str, Any] = {
    "size": "pico",
    "data": "stdlib",
    "tokenizer": "bpe:512",
    "steps": 400,
    "batch_size": 16,
    "lr": 4e-3,
    "eval_every": 100,
    "eval_rows": 128,
    "final_rows": 0,
    "checkpoint_every": 0,
}
PICO_TEXT_TITLE = "Next token of Python's standard library, 0.8M tokens of training"

#: recall at pico size: from torch's initialisation it is learned many times sooner (docs/LOG.md)
PICO_RECALL: dict[str, Any] = {
    "size": "pico",
    "initialization": "torch",
    "batch_size": 64,
    "lr": 4e-3,
    "eval_rows": 128,
    "final_rows": 0,
    "checkpoint_every": 0,
}
