"""Denominators 1/G: what a row is divided by before its output gate and its norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from maclaurin.spec.part import Part, flag, positive, register


@dataclass(frozen=True, slots=True)
class Denominator(Part):
    """A positive number per head and token."""

    family: ClassVar[str] = "denominator"


@register
@final
@dataclass(frozen=True, slots=True)
class RowSum(Denominator):
    """max(Σ_s D_ts κ_ts + eps, floor); with `detach`, no gradient flows through it.

    The row sum contains the forget gate D and not the input gate, which belongs to the values.
    """

    notation: ClassVar[str] = "sum"
    floor: float | None = positive(default=None)
    eps: float | None = positive(default=None)
    detach: bool = flag()

    @property
    def sees_row_scale(self) -> bool:
        """Whether multiplying a whole row of weights by a factor changes values or gradients."""
        return self.floor is not None or self.eps is not None or self.detach


@register
@final
@dataclass(frozen=True, slots=True)
class VisibleKeys(Denominator):
    """t, the number of keys the query can see."""

    notation: ClassVar[str] = "len"


@register
@final
@dataclass(frozen=True, slots=True)
class RunningSum(Denominator):
    """max(Σ_{r≤t} exp(g_r), floor), times t with `len`: a learned running sum of its own logits."""

    notation: ClassVar[str] = "running"
    floor: float | None = positive(default=None)
    len: bool = flag()
