"""A digest that identifies the weights of a model: training changes it, copying and precision do not."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

#: values read of each tensor, evenly spaced
SAMPLE = 1024


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, shapes and a sample of the values, rounded to bf16, of every tensor."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].to("cpu", torch.bfloat16)
        total.update(f"{name} {tuple(tensor.shape)}".encode())
        total.update(sample.view(torch.int16).numpy().tobytes())
    return total.hexdigest()
