"""The sizes of one measured call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

#: by how much texts are shorter where the full shapes would take too long
SMALL_IS_SHORTER_BY = 32
MOST_SMALL_ROWS = 2


@final
@dataclass(frozen=True)
class Size:
    """B sequences of T tokens, H heads with keys of size d and values of size e."""

    batch: int
    heads: int
    tokens: int
    d: int
    e: int

    @staticmethod
    def of(batch: int, heads: int, tokens: int, d: int, e: int | None = None) -> Size:
        """Values as long as keys unless told otherwise."""
        return Size(batch, heads, tokens, d, d if e is None else e)

    def __str__(self) -> str:
        per_head = f"D{self.d}" if self.d == self.e else f"d{self.d} e{self.e}"
        return f"B{self.batch} H{self.heads} T{self.tokens} {per_head}"

    def small(self) -> Size:
        """The same heads, fewer of them, over shorter texts: for machines without a GPU."""
        return Size(
            min(self.batch, MOST_SMALL_ROWS),
            min(self.heads, MOST_SMALL_ROWS),
            max(self.tokens // SMALL_IS_SHORTER_BY, 1),
            self.d,
            self.e,
        )
