"""AdamW with the usual groups: matrices decay, vectors and gate parameters do not."""

from __future__ import annotations

import torch
from torch import nn

from maclaurin.training.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Matrices and embeddings with weight decay; norms, biases, convolutions and rates without."""
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in parameters if _decays(n, p)]
    kept = [p for n, p in parameters if not _decays(n, p)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    fused = any(p.is_cuda for _, p in parameters)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=fused,
    )


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 2 and "convolution" not in name
