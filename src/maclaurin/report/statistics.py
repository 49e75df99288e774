"""The difference between two cells, from few seeds.

Every cell runs with the same seeds, and a seed affects all cells in the same way (the same data in the same
order), so cells are compared seed by seed. From the n differences d of a pair:

    mean(d) ± t_{n−1} · sd(d)/√n

This is the paired t-test. It uses only the spread of this pair: spreads differ between cells, and a pooled
spread would be too small for the cells that vary most (with three seeds, a pooled 95 % interval of a cell
whose spread is twice the usual contains the true value in only 80 % of cases).

Differences are taken on the scale of the metric: unchanged for losses, log-odds for shares between 0 and 1,
logarithms for sizes and speeds. One seed gives a number and no interval.

An accuracy is a count of answers, so near 0 and 1 few values are possible, and seeds may have the same
differences by chance: at 1,000 answers and an accuracy of 0.999 that happens with three seeds in 0.6 % of
cases for differences other than zero and in 3 % for zero. Their spread would be zero and any conclusion
certain. So the spread of differences is at least that of rounding to whole answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from scipy import special, stats
from statsmodels.stats.multitest import multipletests

CONFIDENCE = 0.95
#: assumed number of answers of a test set, if a run did not record it
ASSUMED_ANSWERS = 1000


def to_scale(value: float, scale: str, answers: float | None = None) -> float:
    """A metric on its scale of comparison.

    A share of 0 or 1 is clipped by half an answer, as its log-odds would be infinite.
    """
    if scale == "logit":
        half = 0.5 / (answers or ASSUMED_ANSWERS)
        share = min(max(value, half), 1 - half)
        return math.log(share / (1 - share))
    return math.log(value) if scale == "log" else value


def rounding_of(value: float, scale: str, answers: float | None = None) -> float:
    """Standard deviation, on the scale, of what is lost by counting whole answers; 0 for other metrics."""
    if scale != "logit":
        return 0.0
    half = 0.5 / (answers or ASSUMED_ANSWERS)
    centre = min(max(value, 2 * half), 1 - 2 * half)
    low, high = (to_scale(end, scale, answers) for end in (centre - half, centre + half))
    return (high - low) / math.sqrt(12)


def margin_on_scale(
    reference: float, within: float, scale: str, answers: float | None = None
) -> tuple[float, float]:
    """The ends of reference ± `within`, relative to the reference, on the scale.

    They are clipped by half an answer, as values are. An end that no value can pass is infinite: no accuracy
    is above 1.
    """
    if scale == "linear":
        return -within, within

    def end(value: float) -> float:
        return to_scale(value, scale, answers) - to_scale(reference, scale, answers)

    low, high = reference - within, reference + within
    largest = 1.0 if scale == "logit" else math.inf
    return (end(low) if low > 0 else -math.inf), (end(high) if high < largest else math.inf)


@final
@dataclass(frozen=True)
class Difference:
    """Mean of n paired differences, on the metric's scale.

    error      standard error; None if n < 2
    df         degrees of freedom of t
    unbounded  1 or −1 if a run of one of the two cells diverged: the difference has no bound on that side
    """

    value: float
    error: float | None
    df: int
    n: int
    unbounded: int = 0

    @property
    def is_tested(self) -> bool:
        """Whether a conclusion is possible."""
        return self.error is not None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The 95 % interval, if there is one."""
        return self.interval(CONFIDENCE)

    def interval(self, level: float) -> tuple[float, float] | None:
        """The confidence interval at this level."""
        if self.error is None:
            return None
        half = (
            float(special.stdtrit(self.df, 0.5 + level / 2)) * self.error
            if math.isfinite(self.value)
            else 0.0
        )
        low, high = self.value - half, self.value + half
        return (
            -math.inf if self.unbounded < 0 else low,
            math.inf if self.unbounded > 0 else high,
        )

    def p_above(self, bound: float) -> float:
        """One-sided p of 'the difference is at most `bound`': small if it is significantly above."""
        return 1.0 if self.unbounded < 0 else self._tail(self.value - bound)

    def p_below(self, bound: float) -> float:
        """One-sided p of 'the difference is at least `bound`': small if it is significantly below."""
        return 1.0 if self.unbounded > 0 else self._tail(bound - self.value)

    def _tail(self, distance: float) -> float:
        if self.error is None or math.isnan(distance):  # nan: both are infinite
            return 1.0
        if math.isinf(distance):
            return 0.0 if distance > 0 else 1.0
        return float(special.stdtr(self.df, -distance / self.error))

    def __neg__(self) -> Difference:
        return Difference(-self.value, self.error, self.df, self.n, -self.unbounded)


def paired(
    first: Mapping[int, float], second: Mapping[int, float], rounding: float = 0.0
) -> Difference | None:
    """first − second, seed by seed; None if they share no seed. The spread is at least `rounding`."""
    shared = sorted(set(first) & set(second))
    if not shared:
        return None
    found = np.array([first[seed] - second[seed] for seed in shared])
    size = max(abs(value) for seed in shared for value in (first[seed], second[seed]))
    return _from_sample(found, max(rounding, 1e-9 * max(size, 1e-30)))


def mean_of(values: Sequence[float], rounding: float = 0.0) -> Difference:
    """The mean of one number per seed, such as a sum over cells. The spread is at least `rounding`."""
    sample = np.array(values)
    return _from_sample(sample, max(rounding, 1e-9 * max(float(np.abs(sample).max()), 1e-6)))


def _from_sample(sample: np.ndarray, rounding: float) -> Difference:
    """Mean and error of a sample. The spread is at least rounding, by which even equal runs differ."""
    n = len(sample)
    mean = float(sample.mean())
    if n < 2:
        return Difference(mean, None, 0, n)
    return Difference(mean, max(float(sample.std(ddof=1)), rounding) / math.sqrt(n), n - 1, n)


@final
@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the seeds of one cell, on the metric's own scale."""

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without values; one value has no deviation."""
        if not values:
            return None
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), deviation, len(values))


def two_sided(difference: Difference) -> float:
    """p of 'the difference is zero'."""
    return min(1.0, 2 * min(difference.p_above(0.0), difference.p_below(0.0)))


def holm(ps: Sequence[float]) -> list[float]:
    """Each p corrected for the number of tests, by Holm's method."""
    return np.asarray(multipletests(list(ps), method="holm")[1]).tolist() if ps else []


def spreads_differ(groups: Sequence[Sequence[float]]) -> float | None:
    """p of Bartlett's test that the groups have the same spread; None if it cannot be done."""
    usable = [np.asarray(group) for group in groups if len(group) > 1 and np.std(group) > 0]
    return float(stats.bartlett(*usable).pvalue) if len(usable) > 1 else None
