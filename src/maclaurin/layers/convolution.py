"""A short depthwise causal convolution:  y_t = Σ_{j<w} c_j ∘ u_{t−j}, then SiLU if configured.

Taps that would reach into another document, or into padding, count as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maclaurin.layers.layer_memory import LayerMemory
from maclaurin.layers.layout import Layout


class ShortConvolution(nn.Module):
    """One filter of `width` taps per channel; the newest tap is the first."""

    def __init__(self, channels: int, width: int, silu: bool) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(width, channels))
        self.silu = silu
        self.reset()

    def reset(self) -> None:
        """Start as the identity plus small random taps, whatever the width."""
        nn.init.normal_(self.taps, std=0.02)
        with torch.no_grad():
            self.taps[0] += 1

    def forward(self, u: Tensor, layout: Layout, memory: LayerMemory | None = None) -> Tensor:
        """u [B, T, C] → [B, T, C], continuing from the memory."""
        mask = layout.key_padding_mask
        if mask is not None:
            u = torch.where(mask[..., None], u, 0.0)
        y = self._within(u, layout) if memory is None else self._behind(memory.before(u))
        return torch.nn.functional.silu(y) if self.silu else y

    def _behind(self, line: Tensor) -> Tensor:
        """Outputs for the last T tokens of [B, width − 1 + T, C]."""
        reach = self.taps.shape[0] - 1
        tokens = line.shape[1] - reach
        return sum(
            (line[:, reach - back : reach - back + tokens] * self.taps[back] for back in range(1, reach + 1)),
            start=line[:, reach:] * self.taps[0],
        )

    def _within(self, u: Tensor, layout: Layout) -> Tensor:
        y = u * self.taps[0]
        for back in range(1, self.taps.shape[0]):
            earlier = torch.nn.functional.pad(u, (0, 0, back, 0))[:, : u.shape[1]]
            if layout.documents is not None:
                earlier = earlier * _same_document(layout.documents, back)[..., None]
            y = y + earlier * self.taps[back]
        return y


def _same_document(documents: Tensor, back: int) -> Tensor:
    earlier = torch.nn.functional.pad(documents, (back, 0), value=-1)[:, : documents.shape[1]]
    return earlier == documents
