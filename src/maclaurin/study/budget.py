"""`--budget 0.5x`: the same study with shorter or longer runs."""

from __future__ import annotations

import math

from maclaurin.errors import InputError
from maclaurin.training.config import TrainConfig


def read_scale(text: str) -> float:
    """'0.5x', '2x' or '0.1' as a number."""
    try:
        scale = float(text.strip().removesuffix("x"))
    except ValueError:
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise InputError(f"--budget takes a positive factor such as 0.5x or 2x, got {text!r}.")
    return scale


def scaled(config: TrainConfig, scale: float) -> TrainConfig:
    """The run with so many times the steps; warm-up and schedule keep their shape."""
    if scale == 1.0:
        return config
    decay = config.decay_steps
    return config.replace(
        steps=_times(config.steps, scale),
        warmup=_times(config.warmup, scale) if config.warmup else 0,
        decay_steps=None if decay is None else _times(decay, scale),
    )


def _times(steps: int, scale: float) -> int:
    return max(1, round(steps * scale))
