"""A shuffled order that is not stored: index → position, in constant time and memory.

A Feistel network permutes the 4^h numbers (l, r) of 2h bits, whatever its round function F is:

    (l, r) → (r, l ⊕ F_k(r))

Numbers that fall outside 0 … N−1 are sent through again until they fall inside (cycle walking),
which leaves a permutation of 0 … N−1. With 4^(h−1) < N ≤ 4^h, fewer than four passes are expected.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from maclaurin.data.data_errors import DataError

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
    """The finaliser of splitmix64: every input bit reaches every output bit. Sums wrap at 2⁶⁴."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
