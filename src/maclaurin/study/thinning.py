"""Long curves as short ones: means over stretches."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[int, float]


def thinned(points: Sequence[Point], most: int, *, name_first: bool = False) -> tuple[Point, ...]:
    """At most `most` points: the mean of each stretch at its last place, or at its first.

    Stretches are equally long but for one point; values that are no numbers are left out before.
    """
    kept = [point for point in points if math.isfinite(point[1])]
    count = min(most, len(kept))
    ends = [len(kept) * (i + 1) // count for i in range(count)]
    stretches = [kept[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return tuple((s[0 if name_first else -1][0], _rounded(sum(y for _, y in s) / len(s))) for s in stretches)


def _rounded(value: float) -> float:
    """Six digits: more than any figure shows."""
    return float(f"{value:.6g}")
