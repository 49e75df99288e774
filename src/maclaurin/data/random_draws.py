"""The random numbers of one row of a task, in constant time.

Philox turns a counter into random bits: row i of a stream owns the counters (·, ·, i, stream). So no row
depends on another, and training shares no number with validation or test. Only raw 64-bit words are used,
which numpy promises never to change.
"""

from __future__ import annotations

import hashlib
from typing import final

import numpy as np


@final
class Draws:
    """A fresh stream of random numbers for (key, stream, index)."""

    def __init__(self, key: str, stream: int, index: int) -> None:
        words = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=16).digest(), dtype="<u8")
        counter = np.array([0, 0, index, stream], dtype=np.uint64)
        self._bits = np.random.Philox(key=words.astype(np.uint64), counter=counter)

    def uniform(self, count: int) -> np.ndarray:
        """Real numbers in [0, 1)."""
        return (self._words(count) >> np.uint64(11)) * 2.0**-53

    def below(self, bound: int, count: int) -> np.ndarray:
        """Integers 0 … bound−1, with repetition."""
        return np.floor(self.uniform(count) * bound).astype(np.int64)

    def distinct_below(self, bound: int, count: int) -> np.ndarray:
        """Distinct integers 0 … bound−1 in random order."""
        return np.argsort(self._words(bound), kind="stable")[:count]

    def distinct_weighted(self, weights: np.ndarray, count: int) -> np.ndarray:
        """Distinct indices, drawn one after the other in proportion to their weights.

        The `count` earliest of exponential clocks with these rates.
        """
        clocks = -np.log1p(-self.uniform(len(weights))) / weights
        return np.argsort(clocks, kind="stable")[:count]

    def _words(self, count: int) -> np.ndarray:
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64)
