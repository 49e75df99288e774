"""Polynomials of the score: their values, re-centring, sign, and how many numbers their state takes.

Coefficients are numbers, or one tensor per row; nothing here imports torch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maclaurin.spec.part import written

if TYPE_CHECKING:
    from torch import Tensor

#: 171! overflows float64
HIGHEST_ORDER = 170

#: coefficients a₀, a₁, … of a polynomial in the score: constants, or one tensor per row
Coefficients = Sequence[Any]


class Sign(enum.Enum):
    """POSITIVE never vanishes, NONNEGATIVE may be exactly zero, INDEFINITE may change sign."""

    POSITIVE = "positive"
    NONNEGATIVE = "nonnegative"
    INDEFINITE = "indefinite"

    def is_within(self, other: Sign) -> bool:
        """Whether every number of this sign has the other sign too."""
        widening = (Sign.POSITIVE, Sign.NONNEGATIVE, Sign.INDEFINITE)
        return widening.index(self) <= widening.index(other)


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


def number_of_multisets(d: int, n: int) -> int:
    """C(d+n−1, n), multisets of size n over d indices.

    Plain products, so that torch.compile can follow it with a symbolic d.
    """
    number = 1
    for i in range(n):
        number = number * (d + i) // (i + 1)
    return number


#: up to order 12, a polynomial that is small because its terms cancel is not much smaller than its error
MOST_TERMS_IN_FP32 = 13


def needs_double(coefficients: Coefficients, x: Tensor) -> bool:
    """Whether terms of the polynomial can cancel to less than the precision of x resolves.

    T80(−15) = 3e-7 is the sum of terms up to 3e5: fp32 gives −0.04, float64 gives 3e-7.
    """
    return len(coefficients) > MOST_TERMS_IN_FP32 and x.dtype.itemsize < 8


def horner(coefficients: Coefficients, x: Tensor) -> Tensor:
    """Σ aₙ xⁿ, from the highest order down; long ones in float64."""
    if needs_double(coefficients, x):
        return horner(coefficients, x.double()).to(x.dtype)
    if len(coefficients) == 1:
        return x * 0 + coefficients[0]
    *lower, highest = coefficients
    result = x * highest
    for a in reversed(lower[1:]):
        result = (result + a) * x
    return result + lower[0]


def recentred(coefficients: Coefficients, c: Any) -> list[Any]:
    """The aⱼ of Σ bₙ (x − c)ⁿ = Σ aⱼ xʲ:  aⱼ = Σ_{n≥j} bₙ C(n, j) (−c)^{n−j}."""
    top = len(coefficients)
    powers: list[Any] = [1.0]  # of −c
    for _ in range(top - 1):
        powers.append(powers[-1] * -c)
    return [sum(coefficients[n] * _choose(n, j) * powers[n - j] for n in range(j, top)) for j in range(top)]


def _choose(n: int, j: int) -> float:
    """C(n, j) as a float: at high orders the integer is too large to multiply a tensor."""
    return float(math.comb(n, j))


def factorial(n: int) -> float:
    """n! as a float."""
    return float(math.factorial(n))


def mean_score(moments: Sequence[Tensor]) -> Tensor:
    """z₁/z₀, and 0 where the row is empty."""
    return per_key(moments[1], moments[0])


#: a row whose mass has decayed to this or less counts as empty; one over it is still finite
_LEAST_MASS = 1e-30


def per_key(total: Tensor, mass: Tensor) -> Tensor:
    """total/mass, and 0 (with a gradient of 0) where the mass is almost zero."""
    empty = mass <= _LEAST_MASS
    return (total / mass.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def central_moments(moments: Sequence[Tensor], mean: Tensor) -> list[Any]:
    """μₙ = Σ_s (x_s − x̄)ⁿ / z₀ from the raw moments, by the binomial theorem."""
    result: list[Any] = []
    for n in range(len(moments)):
        terms = (_choose(n, j) * moments[j] * (-mean) ** (n - j) for j in range(n + 1))
        result.append(per_key(sum(terms), moments[0]))  # type: ignore[arg-type]
    return result


def hermite_polynomials(order: int, u: Any) -> list[list[Any]]:
    """Coefficients in c of H₀ … H_N with variance u:  H_{n+1} = c Hₙ − n u H_{n−1}."""
    result: list[list[Any]] = [[1.0], [0.0, 1.0]]
    for n in range(1, order):
        raised = [0.0, *result[n]]
        lowered = [*(n * u * b for b in result[n - 1]), 0.0, 0.0]
        result.append([a - b for a, b in zip(raised, lowered, strict=True)])
    return result


def text_of_series(series: Sequence[float], x: str) -> str:
    """a₀ + a₁·x + a₂·(x)^2 + …, without the terms that are zero."""
    terms = []
    for n, a in enumerate(series):
        if a == 0:
            continue
        power = "" if n == 0 else x if n == 1 else f"({x})^{n}"
        factor = written(a) if n == 0 else "" if a == 1 else f"{written(a)}·"
        terms.append(factor + power)
    return " + ".join(terms).replace("+ -", "− ") or "0"
