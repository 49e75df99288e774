"""Student's t and Fisher's F, from the regularised incomplete beta function.

I_x(a, b) = B(x; a, b)/B(a, b)
P(T ≤ t) = 1 − ½ I_{ν/(ν+t²)}(ν/2, ½)   for t ≥ 0
P(F > f) = I_{n/(n+mf)}(n/2, m/2)       with m and n degrees of freedom
"""

from __future__ import annotations

import functools
import math

_SMALLEST = 1e-300
_MOST_TERMS = 10_000


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), by its continued fraction on the side where that converges fast."""
    if not 0.0 <= x <= 1.0:
        raise ValueError(f"I_x(a, b) is defined for x between 0 and 1, not for {x}.")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a
    return front * _continued_fraction(x, a, b)


def _continued_fraction(x: float, a: float, b: float) -> float:
    """1/(1 + d₁/(1 + d₂/(1 + …))), by Lentz's method."""
    value, c, d = 1.0, 1.0, 0.0
    for term in range(_MOST_TERMS):
        m = term // 2
        if term == 0:
            numerator = 1.0
        elif term % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        d = 1.0 / _away_from_zero(1.0 + numerator * d)
        c = _away_from_zero(1.0 + numerator / c)
        change = c * d
        value *= change
        if abs(change - 1.0) < 1e-15:
            break
    return value - 1.0


def _away_from_zero(number: float) -> float:
    return number if abs(number) > _SMALLEST else _SMALLEST


def t_cdf(t: float, df: float) -> float:
    """P(T ≤ t) with df degrees of freedom."""
    tail = 0.5 * incomplete_beta(df / (df + t * t), df / 2.0, 0.5)
    return 1.0 - tail if t > 0 else tail


@functools.lru_cache(maxsize=4096)
def t_quantile(p: float, df: float) -> float:
    """The t with P(T ≤ t) = p, by bisection: slow, short and right."""
    if not 0.0 < p < 1.0:
        raise ValueError(f"a quantile is asked for 0 < p < 1, not for {p}.")
    if p < 0.5:
        return -t_quantile(1.0 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        low, high = high, 2.0 * high
    while high - low > 1e-13 * max(1.0, high):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return 0.5 * (low + high)


def f_tail(f: float, df1: float, df2: float) -> float:
    """P(F > f) with df1 and df2 degrees of freedom."""
    if math.isinf(f):
        return 0.0
    return incomplete_beta(df2 / (df2 + df1 * f), df2 / 2.0, df1 / 2.0)
