"""Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv 2312.04927)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from maclaurin.data.batch import NOT_SCORED, Row
from maclaurin.data.tasks.draws import Draws
from maclaurin.data.tasks.task import Task


@final
@dataclass(frozen=True)
class Recall(Task):
    """k₁ v₁ k₂ v₂ … then noise among which keys return: at each, its value is asked.

    Keys come from the lower half of the vocabulary, values from the upper, all different within a row.
    Query g of the slots 1, 2, … after the pairs (two tokens each) is drawn with p(g) ∝ g^(distance − 1):
    distance=0.01, as in Zoology, asks mostly soon after the pairs; distance=1 anywhere alike. Noise comes
    from the upper half, so that nothing but a query looks like one.
    """

    notation = "mqar"

    pairs: int = 8
    vocab: int = 256
    queries: int = 0  # 0: as many as pairs; keys are asked again only when each has been asked
    distance: float = 0.01

    def __post_init__(self) -> None:
        self._need(self.pairs >= 1, f"pairs={self.pairs} leaves nothing to recall. Use pairs=1 or more.")
        self._need(self.queries >= 0, f"queries={self.queries} must not be negative.")
        self._need(self.distance > 0, f"distance={self.distance:g} must be above 0; 1 asks anywhere alike.")
        self._need(
            self.vocab >= 2 * self.pairs,
            f"vocab={self.vocab} is too small for {self.pairs} keys and as many values. "
            f"Use vocab={2 * self.pairs} or more.",
        )
        least = 2 * self.pairs + 2 * self._asked - 1
        self._need_length(least, f"{self.pairs} pairs and {self._asked} queries need {least} places")

    @property
    def vocab_size(self) -> int:
        """Keys and values."""
        return self.vocab

    def row(self, draws: Draws) -> Row:
        """Pairs, then queries in noise."""
        keys = draws.distinct_below(self._half, self.pairs)
        values = self._half + draws.distinct_below(self.vocab - self._half, self.pairs)
        tokens = self._half + draws.below(self.vocab - self._half, self.length)
        tokens[0 : 2 * self.pairs : 2] = keys
        tokens[1 : 2 * self.pairs : 2] = values
        places = 2 * self.pairs + 2 * draws.distinct_weighted(self._weights, self._asked)
        which = draws.distinct_below(self.pairs, self.pairs)[np.arange(self._asked) % self.pairs]
        targets = np.full(self.length, NOT_SCORED)
        tokens[places], targets[places] = keys[which], values[which]
        return Row(tokens, targets)

    @property
    def _half(self) -> int:
        return self.vocab // 2

    @property
    def _asked(self) -> int:
        return self.queries or self.pairs

    @property
    def _weights(self) -> np.ndarray:
        slots = (self.length - 2 * self.pairs + 1) // 2
        return np.arange(1, slots + 1) ** (self.distance - 1.0)
