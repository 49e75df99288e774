"""What a source gives: rows of tokens with the answer that is scored at each place.

B rows, T places
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

NOT_SCORED = -100
"""The target of a place that no loss and no accuracy looks at; torch's cross_entropy ignores it."""


class Row(NamedTuple):
    """One row of a batch, still in numpy."""

    tokens: np.ndarray  # [T]
    targets: np.ndarray  # [T], NOT_SCORED where nothing is asked
    documents: np.ndarray | None = None  # [T], counting from 0

    def unscored(self) -> Row:
        """The same row as filler: nothing in it counts."""
        return self._replace(targets=np.full_like(self.targets, NOT_SCORED))


@dataclass(frozen=True)
class Batch:
    """Tokens, the right answer at each place, and the document each token belongs to."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64, the next token or the answer; -100 where not scored
    documents: Tensor | None = None  # [B, T] int32, from 0 in each row; None: attention may cross

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Batch:
        """Rows of equal length, one above the other."""
        import torch

        documents = [row.documents for row in rows if row.documents is not None]
        return cls(
            torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64)),
            torch.from_numpy(np.stack([row.targets for row in rows]).astype(np.int64)),
            torch.from_numpy(np.stack(documents).astype(np.int32)) if documents else None,
        )

    @property
    def scored(self) -> int:
        """How many places are scored: the weight of this batch in a token-weighted mean."""
        return int((self.targets != NOT_SCORED).sum())

    def to(self, device: str | object, *, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        moved = [
            None if part is None else part.to(device, non_blocking=non_blocking)  # pyright: ignore
            for part in (self.tokens, self.targets, self.documents)
        ]
        return Batch(*moved)  # pyright: ignore[reportArgumentType]
