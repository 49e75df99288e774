"""Selective copying (Jing et al. 2019; Gu & Dao 2023, Mamba)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from maclaurin.data.batch import NOT_SCORED, Row
from maclaurin.data.tasks.draws import Draws
from maclaurin.data.tasks.task import Task

BLANK, ASK = 0, 1


@final
@dataclass(frozen=True)
class SelectiveCopy(Task):
    """_ a _ _ b _ c ? ? ? → a b c: tokens lie scattered among blanks, and are asked in their order."""

    notation = "copy"

    tokens: int = 16
    vocab: int = 18

    def __post_init__(self) -> None:
        self._need(self.tokens >= 1, f"tokens={self.tokens} leaves nothing to copy. Use tokens=1 or more.")
        self._need(
            self.vocab >= 4,
            f"vocab={self.vocab} is too small: a blank, a question mark and two tokens are "
            "the least. Use vocab=4 or more.",
        )
        self._need_length(
            2 * self.tokens, f"{self.tokens} tokens need a place each and a place to be asked at"
        )

    @property
    def vocab_size(self) -> int:
        """Blank, question mark and the tokens to copy."""
        return self.vocab

    def row(self, draws: Draws) -> Row:
        """Blanks with tokens among them, then question marks."""
        seen = self.length - self.tokens
        copied = 2 + draws.below(self.vocab - 2, self.tokens)
        row = np.full(self.length, BLANK)
        row[np.sort(draws.distinct_below(seen, self.tokens))] = copied
        row[seen:] = ASK
        targets = np.full(self.length, NOT_SCORED)
        targets[seen:] = copied
        return Row(row, targets)
