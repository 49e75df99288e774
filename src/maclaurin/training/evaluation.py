"""The test set, whole: means weighted by tokens, perplexity from the mean, loss by position."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from maclaurin.data.batch import NOT_SCORED, Batch
from maclaurin.training.objectives import Objective, next_token
from maclaurin.training.processes import Processes


@dataclass(frozen=True)
class Evaluation:
    """What a pass over the test set gave."""

    loss: float
    tokens: int
    accuracy: float
    loss_by_position: list[float]

    @property
    def perplexity(self) -> float:
        """e^loss, of the mean loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    processes: Processes,
    length: int,
    objective: Objective = next_token,
) -> Evaluation:
    """Loss, accuracy and loss by position over all batches of all processes."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(length, dtype=torch.float64, device=processes.device)
    counts, hits = torch.zeros_like(sums), torch.zeros_like(sums)
    for batch in batches:
        here = batch.to(processes.device, non_blocking=True)
        losses, right = objective(model, here)
        scored = here.targets != NOT_SCORED
        sums += losses.double().sum(0)
        counts += scored.sum(0)
        if right is not None:
            hits += (right & scored).sum(0)
    model.train(was_training)
    sums, counts, hits = (processes.total(t) for t in (sums, counts, hits))
    tokens = int(counts.sum())
    by_position = (sums / counts.clamp(min=1)).tolist()
    return Evaluation(
        float(sums.sum()) / max(tokens, 1), tokens, float(hits.sum()) / max(tokens, 1), by_position
    )
