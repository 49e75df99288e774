"""Random inputs of a case, drawn where they are used: the large shapes would take seconds on a processor."""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.bench.size import Size
from maclaurin.spec import AttentionSpec
from maclaurin.testing.cases import TensorCase

SEED = 0
#: a log forget gate lies between −this and 0: what was said a hundred tokens ago still counts
STRONGEST_FORGET = 0.02


def draw_inputs(spec: AttentionSpec, size: Size, dtype: torch.dtype, device: torch.device) -> TensorCase:
    """Normal q, k, v, so that scores have deviation 1; gates in (0.1, 0.9)."""
    generator = torch.Generator(device).manual_seed(SEED)
    rows = (size.batch, size.tokens, size.heads)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def uniform(low: float, high: float) -> Tensor:
        numbers = torch.rand(rows, generator=generator, device=device, dtype=torch.float32)
        return (low + (high - low) * numbers).to(dtype)

    tensors = {"q": normal(*rows, size.d), "k": normal(*rows, size.d), "v": normal(*rows, size.e)}
    decays = {gate.argument for gate in spec.decay_gates}
    for argument in spec.arguments:
        limits = (-STRONGEST_FORGET, 0.0) if argument in decays else (0.1, 0.9)
        tensors[argument.name] = uniform(*limits)
    return TensorCase(spec, tensors)


def draw_direction(size: Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random gradient of the output, [B, T, H, e]."""
    generator = torch.Generator(device).manual_seed(SEED + 1)
    shape = (size.batch, size.tokens, size.heads, size.e)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
