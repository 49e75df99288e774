"""k − c, one c per key-value head: q·(k − c) = q·k − q·c takes one number off a whole row of scores.

Softmax does not see that, nor does an expansion about the row's mean; but moments of small keys cancel less
when they are re-centred in low precision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KeyOffset(nn.Module):
    """Keys [B, T, kv heads, d] less their offset, zero until it is calibrated."""

    offset: Tensor

    def __init__(self, kv_heads: int, key_size: int) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(kv_heads, key_size))

    def forward(self, k: Tensor) -> Tensor:
        """k − c"""
        return k - self.offset.to(k.dtype)
