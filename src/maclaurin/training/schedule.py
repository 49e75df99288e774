"""Learning rates: a linear warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math

from maclaurin.training.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step 0, 1, …: lr·(step+1)/warmup at first, then from lr down to final_lr·lr."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    end = config.decay_steps or config.steps
    done = min(1.0, (step - config.warmup) / max(1, end - config.warmup))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.final_lr + (1 - config.final_lr) * left)
