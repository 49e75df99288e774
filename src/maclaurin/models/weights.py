"""Which weights something is about: a digest that training changes and neither copying nor precision."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

#: numbers read of each tensor, at equal distances
SAMPLE = 1024


def weights_fingerprint(model: nn.Module) -> str:
    """sha256 over names, shapes and a sample, rounded to bf16, of the numbers of every tensor."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].to("cpu", torch.bfloat16)
        total.update(f"{name} {tuple(tensor.shape)}".encode())
        total.update(sample.view(torch.int16).numpy().tobytes())
    return total.hexdigest()
