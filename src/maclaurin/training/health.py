"""When a run goes wrong: where, and what the layers looked like."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from maclaurin.errors import MaclaurinError


class Diverged(MaclaurinError):
    """The loss is not a number, or far beyond what it should be."""

    def __init__(self, step: int, loss: float, bound: float, layers: str, checkpoint: Path | None) -> None:
        self.step, self.loss = step, loss
        what = "is not a number" if math.isnan(loss) else f"is {loss:.4g}, above {bound:g}"
        last = (
            f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint was written before"
        )
        super().__init__(
            f"step {step}: the loss {what}; {last}.\n{layers}\n"
            "Try a lower learning rate, clipping, or a norm in the attention."
        )


def layer_statistics(model: nn.Module, most: int = 12) -> str:
    """Size of weights and gradients by parameter, the worst first."""
    rows = []
    for name, parameter in model.named_parameters():
        weight = float(parameter.detach().float().norm())
        gradient = parameter.grad
        slope = float("nan") if gradient is None else float(gradient.detach().float().norm())
        rows.append((name, weight, slope))
    rows.sort(key=lambda row: -math.inf if not math.isfinite(row[2]) else -row[2])
    lines = [
        f"  {name}: |weight| {weight:.3g}, |gradient| {slope:.3g}" for name, weight, slope in rows[:most]
    ]
    return "\n".join(["largest gradients:", *lines])


def is_healthy(losses: torch.Tensor, bound: float) -> bool:
    """Whether every loss is a number within the bound."""
    return bool((losses.isfinite() & (losses <= bound)).all())
