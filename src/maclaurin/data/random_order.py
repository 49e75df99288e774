"""Random orders and random numbers as functions of an index: nothing is stored, rows are read in any order.

An order (`Permutation`): a Feistel network permutes the 4^h numbers (l, r) of 2h bits, whatever its round
function F is:

    (l, r) → (r, l ⊕ F_k(r))

Numbers that fall outside 0 … N−1 are sent through again until they fall inside (cycle walking),
which leaves a permutation of 0 … N−1. With 4^(h−1) < N ≤ 4^h, fewer than four passes are expected.

Numbers (`Draws`): Philox turns a counter into random bits; row i of a stream owns the counters
(·, ·, i, stream). So no row depends on another, and training shares no random number with validation or test.
Only raw 64-bit words are used, which numpy promises never to change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from maclaurin.errors import DataError

ROUNDS = 6


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 … size−1 chosen by a key; equal keys give equal orders on every machine."""

    size: int
    key: str

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError(f"a permutation needs at least one row, got {self.size}.")

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """The positions of these indices."""
        if np.any((indices < 0) | (indices >= self.size)):
            raise DataError(
                f"indices of this permutation lie in 0 … {self.size - 1}; got {indices.tolist()}."
            )
        places = self._pass_once(indices.astype(np.uint64))
        while np.any(outside := places >= self.size):
            places[outside] = self._pass_once(places[outside])
        return places.astype(np.int64)

    @cached_property
    def _half_bits(self) -> int:
        return max(1, ((self.size - 1).bit_length() + 1) // 2)

    @cached_property
    def _round_keys(self) -> np.ndarray:
        seed = hashlib.blake2b(self.key.encode(), digest_size=8 * ROUNDS).digest()
        return np.frombuffer(seed, dtype="<u8").astype(np.uint64)

    def _pass_once(self, numbers: np.ndarray) -> np.ndarray:
        bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = numbers >> bits, numbers & mask
        for key in self._round_keys:
            left, right = right, left ^ (_scramble(right ^ key) & mask)
        return left << bits | right


def _scramble(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit affects every output bit. Sums wrap at 2⁶⁴."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


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

        These are the `count` earliest of exponential clocks with these rates.
        """
        clocks = -np.log1p(-self.uniform(len(weights))) / weights
        return np.argsort(clocks, kind="stable")[:count]

    def _words(self, count: int) -> np.ndarray:
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64)
