"""A short depthwise causal convolution:  y_t = Σ_{j<w} c_j ∘ u_{t−j}, then SiLU where asked for.

Taps that would reach into another document, or into padding, count as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maclaurin.layers.layout import Layout


class ShortConvolution(nn.Module):
    """One filter of `width` taps per channel; the newest tap is the first."""

    def __init__(self, channels: int, width: int, silu: bool) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(width, channels))
        self.silu = silu
        self.reset()

    def reset(self) -> None:
        """Begin as the identity with a little of the past, whatever the width."""
        nn.init.normal_(self.taps, std=0.02)
        with torch.no_grad():
            self.taps[0] += 1

    def forward(self, u: Tensor, layout: Layout) -> Tensor:
        """u [B, T, C] → [B, T, C]."""
        mask = layout.key_padding_mask
        if mask is not None:
            u = torch.where(mask[..., None], u, 0.0)
        y = u * self.taps[0]
        for back in range(1, self.taps.shape[0]):
            earlier = torch.nn.functional.pad(u, (0, 0, back, 0))[:, : u.shape[1]]
            if layout.documents is not None:
                earlier = earlier * _same_document(layout.documents, back)[..., None]
            y = y + earlier * self.taps[back]
        return torch.nn.functional.silu(y) if self.silu else y


def _same_document(documents: Tensor, back: int) -> Tensor:
    earlier = torch.nn.functional.pad(documents, (back, 0), value=-1)[:, : documents.shape[1]]
    return earlier == documents
