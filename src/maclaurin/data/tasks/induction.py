"""Induction heads: what followed this token before? (Fu et al. 2023, H3; Gu & Dao 2023, Mamba)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from maclaurin.data.batch import NOT_SCORED, Row
from maclaurin.data.tasks.draws import Draws
from maclaurin.data.tasks.task import Task


@final
@dataclass(frozen=True)
class Induction(Task):
    """… 0 a … 0 → a: token 0 stands once somewhere and once at the end, where its old follower is asked."""

    notation = "induction"

    vocab: int = 64

    def __post_init__(self) -> None:
        self._need(self.vocab >= 3, f"vocab={self.vocab} leaves no choice of answers. Use vocab=3 or more.")
        self._need_length(3, "it must hold the token, its follower and the token again")

    @property
    def vocab_size(self) -> int:
        """The special token 0 and the ordinary ones."""
        return self.vocab

    def row(self, draws: Draws) -> Row:
        """Ordinary tokens, with the special one at two places."""
        tokens = 1 + draws.below(self.vocab - 1, self.length)
        place = int(draws.below(self.length - 2, 1)[0])
        tokens[[place, -1]] = 0
        targets = np.full(self.length, NOT_SCORED)
        targets[-1] = tokens[place + 1]
        return Row(tokens, targets)
