"""Where the real tokens of a batch are, found once per forward pass and shared by all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from maclaurin.errors import InputError


@dataclass(frozen=True)
class Layout:
    """Positions of the tokens, and padding, or documents, which must not see each other."""

    positions: Tensor  # [1, T] or [B, T], counting from 0
    key_padding_mask: Tensor | None = None  # [B, T], True for real tokens
    documents: Tensor | None = None  # [B, T], the number of each token's document within its row
    cu_seqlens: Tensor | None = None  # cuts of all documents of the batch in one packed row
    max_seqlen: int | None = None
    #: [B, S + T], True for the real ones of all tokens so far; None if there is no padding
    present: Tensor | None = None
    #: rotary angles by head size and dtype, made once for all layers; None: layers make them
    angles: Mapping[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def unpadded(self) -> int:
        """How many of the last tokens are real in every row; reading that waits for the GPU."""
        mask = self.key_padding_mask
        return self.positions.shape[1] if mask is None else real_at_end(mask)

    @staticmethod
    def of(positions: Tensor, attention_mask: Tensor | None, documents: Tensor | None) -> Layout:
        """The layout for a padding mask [B, T] (1 for real) or documents [B, T], but not both."""
        if attention_mask is not None and documents is not None:
            raise InputError("a batch has padding (attention_mask) or documents, not both.")
        if documents is not None:
            cuts, longest = _cuts(documents)
            return Layout(positions, None, documents, cuts, longest)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise InputError(
                "attention_mask must be [batch, tokens] with 1 for real tokens, got "
                f"{list(attention_mask.shape)}."
            )
        mask = None if attention_mask is None else attention_mask.bool()
        return Layout(positions, mask)

    def with_extra_tokens(self, number: int) -> Layout:
        """The same batch with `number` extra tokens in front of every document."""
        if self.documents is not None:
            raise InputError(
                "extra tokens are put in front of a row, so documents within it cannot be kept apart: "
                "use rows of one document (rows='documents') with this attention."
            )
        mask = self.key_padding_mask
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (number, 0), value=True)
        extra = torch.arange(number, device=self.positions.device).expand(self.positions.shape[0], -1)
        positions = torch.cat([extra, self.positions + number], dim=1)
        return Layout(positions, mask, present=self._present_behind(number))

    def behind_extra_tokens(self, number: int) -> Layout:
        """The layout of later tokens of a text that has `number` extra tokens in front."""
        return dataclasses.replace(
            self, positions=self.positions + number, present=self._present_behind(number), angles={}
        )

    def _present_behind(self, number: int) -> Tensor | None:
        present = self.present
        return None if present is None else torch.nn.functional.pad(present, (number, 0), value=True)


def real_at_end(mask: Tensor) -> int:
    """How many of the last tokens are real in every row of a mask [B, T]."""
    gaps = (~mask.all(0)).nonzero()
    return mask.shape[1] - 1 - int(gaps[-1]) if len(gaps) else mask.shape[1]


def _cuts(documents: Tensor) -> tuple[Tensor, int]:
    """Offsets of documents when all rows are concatenated, and the length of the longest."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    cuts = torch.cat([starts, starts.new_tensor([documents.numel()])])
    return cuts, int(cuts.diff().max())
