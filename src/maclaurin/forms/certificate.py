"""How many orders of the series of exp are enough, certified before anything is computed.

For |x| ≤ R the remainder in Lagrange's form gives |e^x − T_N(x)| ≤ ε e^x with
ε = R^{N+1} e^R / (N+1)!. If every weight of a row is off by at most a relative ε, then

    |Σ ŵ v/Σ ŵ − Σ w v/Σ w| ≤ 2ε/(1−ε) · max|v|

The terms of the series are as large as e^R while the weight may be as small as e^{−R}, so rounding in
float64 (the series is always computed and kept in it) adds up to about 16(N+1) u e^{2R}, u = 2⁻⁵³.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from maclaurin.spec.polynomials import HIGHEST_ORDER

UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True)
class Certificate:
    """For |x| ≤ score_bound, taylor(order)/sum is within tolerance·max|v| of exp/sum."""

    order: int
    score_bound: float
    tolerance: float

    @property
    def error_bound(self) -> float:
        """The largest error of the output, relative to max|v|."""
        return output_error(self.order, self.score_bound)

    @property
    def summary(self) -> str:
        """What runs, without its error."""
        return f"exp runs as its series up to order {self.order}, in float64"

    def __str__(self) -> str:
        return (
            f"{self.summary}: for |x| ≤ {self.score_bound:.3g} every weight is within a relative "
            f"{weight_error(self.order, self.score_bound):.1e} of e^x, so over a row sum the output is "
            f"within {self.error_bound:.1e}·max|v| (tolerance: {self.tolerance:.0e})"
        )


def weight_error(order: int, score_bound: float) -> float:
    """R^{N+1} e^R / (N+1)! + 16(N+1) u e^{2R}, the largest relative error of a weight."""
    if score_bound == 0:
        return 0.0
    log = (order + 1) * math.log(score_bound) + score_bound - math.lgamma(order + 2)
    truncation = math.exp(log) if log < 700 else math.inf
    rounding = 16 * (order + 1) * UNIT_ROUNDOFF * math.exp(min(2 * score_bound, 700))
    return truncation + rounding


def output_error(order: int, score_bound: float) -> float:
    """2ε/(1−ε), the largest error of the output relative to max|v|."""
    epsilon = weight_error(order, score_bound)
    return 2 * epsilon / (1 - epsilon) if epsilon < 1 else math.inf


def certified_order(score_bound: float, tolerance: float) -> Certificate | None:
    """The smallest even order that keeps the output within the tolerance; None if none does."""
    for order in range(0, HIGHEST_ORDER + 1, 2):
        if output_error(order, score_bound) <= tolerance:
            return Certificate(order, score_bound, tolerance)
    return None
