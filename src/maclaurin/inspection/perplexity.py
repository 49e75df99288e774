"""The loss of a model on a context."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

#: predictions whose logits are in memory at a time
ROWS = 256


@torch.inference_mode()
def summed_loss(model: Any, context: Tensor) -> float:
    """Σ −ln p(token) over tokens 1 … T−1 of a context [T], each after those before it."""
    hidden = model.model(input_ids=context[None], use_cache=False).last_hidden_state[0]
    total = 0.0
    for start in range(0, len(context) - 1, ROWS):
        logits = model.lm_head(hidden[start : min(start + ROWS, len(context) - 1)]).float()
        targets = context[start + 1 : start + 1 + len(logits)]
        total += float(cross_entropy(logits, targets, reduction="none").double().sum())
    return total


def perplexity(loss: float) -> float:
    """e^loss, ∞ where that is no number."""
    return math.exp(loss) if loss < 700 else math.inf
