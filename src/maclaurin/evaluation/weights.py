"""Which weights a result is about: a digest that training changes and copying does not."""

from __future__ import annotations

import hashlib

import torch

#: numbers read of each tensor, at equal distances
SAMPLE = 1024


def weights_fingerprint(model: torch.nn.Module) -> str:
    """sha256 over names, shapes and a sample of the numbers of every tensor."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].to("cpu", torch.float64)
        total.update(f"{name} {tuple(tensor.shape)}".encode())
        total.update(sample.numpy().tobytes())
    return total.hexdigest()
