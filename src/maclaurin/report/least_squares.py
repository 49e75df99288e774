"""y = Xβ + noise by least squares, also where X has fewer ranks than columns."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@final
@dataclass(frozen=True, eq=False)
class Fit:
    """β̂ of least norm, and which combinations cᵀβ the data can tell.

    Columns are indicators, so X is nearly always rank-deficient; cᵀβ means something only where c lies in
    the row space of X.
    """

    x: Vector
    y: Vector

    @functools.cached_property
    def _inverse(self) -> Vector:
        return np.asarray(np.linalg.pinv(self.x, rcond=1e-10), dtype=np.float64)

    @functools.cached_property
    def rank(self) -> int:
        """Rank of X."""
        return int(np.linalg.matrix_rank(self.x, tol=1e-8)) if self.x.size else 0

    @property
    def df(self) -> int:
        """Degrees of freedom left for the noise."""
        return len(self.y) - self.rank

    @functools.cached_property
    def coefficients(self) -> Vector:
        """β̂."""
        return self._inverse @ self.y

    @functools.cached_property
    def residual_sum(self) -> float:
        """|y − Xβ̂|²."""
        return float(np.sum((self.y - self.x @ self.coefficients) ** 2))

    def can_tell(self, c: Vector) -> bool:
        """Whether cᵀβ is the same for every β that fits."""
        return bool(np.allclose(c, (c @ self._inverse) @ self.x, atol=1e-7))

    def value(self, c: Vector) -> float:
        """cᵀβ̂."""
        return float(c @ self.coefficients)

    def variance_factor(self, c: Vector) -> float:
        """Var(cᵀβ̂)/σ²."""
        return float(np.sum((c @ self._inverse) ** 2))


def indicators(labels: list[str], levels: tuple[str, ...]) -> Vector:
    """One column per level, 1 where the label is that level."""
    return np.array([[float(label == level) for level in levels] for label in labels]).reshape(
        len(labels), len(levels)
    )
