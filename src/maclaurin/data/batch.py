"""Rows and batches: tokens with the target at each position.

B rows, T positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

NOT_SCORED = -100
"""The target of a position that is not scored; the default ignore_index of torch's cross_entropy."""


class Row(NamedTuple):
    """One row of a batch, still in numpy."""

    tokens: np.ndarray  # [T]
    targets: np.ndarray  # [T], NOT_SCORED where there is no target
    documents: np.ndarray | None = None  # [T], counting from 0

    def unscored(self) -> Row:
        """The same row as padding: nothing in it is scored."""
        return self._replace(targets=np.full_like(self.targets, NOT_SCORED))


@dataclass(frozen=True)
class Batch:
    """Tokens, the target at each position, and the document each token belongs to."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64, the next token or the answer; NOT_SCORED where not scored
    documents: Tensor | None = None  # [B, T] int32, from 0 in each row; None: attention may cross them

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Batch:
        """Stack rows of equal length."""
        import torch

        documents = [row.documents for row in rows if row.documents is not None]
        return cls(
            torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64)),
            torch.from_numpy(np.stack([row.targets for row in rows]).astype(np.int64)),
            torch.from_numpy(np.stack(documents).astype(np.int32)) if documents else None,
        )

    @property
    def scored(self) -> int:
        """Number of scored positions: the weight of this batch in a token-weighted mean."""
        return int((self.targets != NOT_SCORED).sum())

    def to(self, device: str | object, *, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        moved = [
            None if part is None else part.to(device, non_blocking=non_blocking)  # pyright: ignore
            for part in (self.tokens, self.targets, self.documents)
        ]
        return Batch(*moved)  # pyright: ignore[reportArgumentType]
