"""The test set, whole: means weighted by tokens, perplexity from the mean, loss by position."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maclaurin.data.batch import Batch
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


def losses_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every scored position [B, T] (0 elsewhere), and the logits."""
    logits = model(input_ids=batch.tokens, documents=batch.documents).logits
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.unflatten(0, batch.targets.shape), logits


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], processes: Processes, length: int) -> Evaluation:
    """Loss, accuracy and loss by position over all batches of all processes."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(length, dtype=torch.float64, device=processes.device)
    counts, hits = torch.zeros_like(sums), torch.zeros_like(sums)
    for batch in batches:
        here = batch.to(processes.device, non_blocking=True)
        losses, logits = losses_of(model, here)
        scored = here.targets != -100
        sums += losses.double().sum(0)
        counts += scored.sum(0)
        hits += ((logits.argmax(-1) == here.targets) & scored).sum(0)
    model.train(was_training)
    sums, counts, hits = (processes.total(t) for t in (sums, counts, hits))
    tokens = int(counts.sum())
    by_position = (sums / counts.clamp(min=1)).tolist()
    return Evaluation(
        float(sums.sum()) / max(tokens, 1), tokens, float(hits.sum()) / max(tokens, 1), by_position
    )
