"""What is known about the sign of a kernel, a row sum or a polynomial for every real score."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np


class Sign(enum.Enum):
    """POSITIVE never vanishes, NONNEGATIVE may be exactly zero, INDEFINITE may change sign."""

    POSITIVE = "positive"
    NONNEGATIVE = "nonnegative"
    INDEFINITE = "indefinite"


def sign_of_polynomial(coefficients: Sequence[float]) -> Sign:
    """The sign of Σ aₙ xⁿ over all real x, from its values at its stationary points."""
    a = np.trim_zeros(np.asarray(coefficients, dtype=np.float64), "b")
    if a.size == 0:
        return Sign.NONNEGATIVE
    if a.size == 1:
        return Sign.POSITIVE if a[0] > 0 else Sign.INDEFINITE
    if a.size % 2 == 0 or a[-1] < 0:  # odd degree, or falling on both sides
        return Sign.INDEFINITE
    polynomial = np.polynomial.Polynomial(a)
    stationary = polynomial.deriv().roots()
    real = stationary[np.abs(stationary.imag) < 1e-6 * (1 + np.abs(stationary))].real
    values = polynomial(real)
    size = np.polynomial.Polynomial(np.abs(a))(np.abs(real))  # what rounding is relative to
    if np.all(values > 1e-9 * size):
        return Sign.POSITIVE
    return Sign.NONNEGATIVE if np.all(values >= -1e-9 * size) else Sign.INDEFINITE
