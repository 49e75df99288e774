"""Key offsets from sample text: each head's mean key, which softmax does not see (layers/key_offset.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from maclaurin.layers.key_offset import KeyOffset
from maclaurin.models import MaclaurinForCausalLM


@torch.no_grad()
def calibrate_key_offsets(model: MaclaurinForCausalLM, rows: Tensor) -> None:
    """Give every layer its mean key over rows [B, T] as an offset; answers stay what they were."""
    offsets = [_offset_of(block.self_attn) for block in model.model.layers]
    means = [_Mean() for _ in offsets]
    hooks = [offset.register_forward_hook(mean) for offset, mean in zip(offsets, means, strict=True)]
    try:
        for row in rows:
            model(input_ids=row[None])
    finally:
        for hook in hooks:
            hook.remove()
    for offset, mean in zip(offsets, means, strict=True):
        offset.offset += mean.value.to(offset.offset)
    model.config.key_offset = True


class _Mean:
    """The mean key that passed by."""

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._count = 0

    def __call__(self, module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        self._total = self._total + output.double().sum((0, 1))
        self._count += output.shape[0] * output.shape[1]

    @property
    def value(self) -> Tensor:
        return self._total / self._count


def _offset_of(attention: Any) -> KeyOffset:
    """The layer's offset, made if it has none yet."""
    if not hasattr(attention, "key_offset"):
        attention.key_offset = KeyOffset(attention.kv_heads, attention.key_size).to(
            attention.k_proj.weight.device
        )
    return attention.key_offset
