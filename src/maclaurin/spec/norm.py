"""Norms of a head's output vector. They are exactly scale-invariant: no eps, and zero stays zero.

With an eps inside, the answer would depend on the size of the un-normalised row, which a flash
kernel never forms; docs/adr/0003 explains why it is left out.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from maclaurin.spec.part import Part, flag, option, register, written

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm(Part):
    """N(y) for y [..., H, e]."""

    family: ClassVar[str] = "norm"
    mark: ClassVar[str] = "/"
    stage: ClassVar[int] = 6
    #: whether N(a·y) = N(y) for every positive a; exp then needs no row sum, and the laws check it
    ignores_row_scale: ClassVar[bool] = False
    #: whether the mean is subtracted first
    centred: ClassVar[bool] = False

    @property
    def per_head(self) -> bool:
        """Whether each head is normalised by itself."""
        return True

    def length(self, e: int) -> float | None:
        """‖N(y)‖ if N only rescales y (or y minus its mean) to that length; else None."""
        return None

    @property
    def divides_out_row_scale(self) -> bool:
        """Whether a positive factor per head and token cancels in it."""
        return self.ignores_row_scale and self.per_head

    @abstractmethod
    def __call__(self, y: Tensor) -> Tensor:
        """N over the last axis (and over the heads, where not per_head)."""

    @property
    @abstractmethod
    def text(self) -> str:
        """N as text."""


def _unit(y: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """y/‖y‖₂, and 0 where y = 0 (with a finite gradient there).

    y is first divided by its largest entry, which does not change the result, so that no square
    overflows or vanishes.
    """
    largest = y.detach().abs().amax(dims, keepdim=True)
    y = y / (largest + (largest == 0))
    squared = y.square().sum(dims, keepdim=True)
    return y * (squared + (squared == 0)).rsqrt()


def _read_scale(text: str) -> float | str:
    if text == "dim":
        return text
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise ValueError
    return value


@register
@final
@dataclass(frozen=True, slots=True)
class L2(Norm):
    """N(y) = scale·y/‖y‖₂; scale is a number, or `dim` for the size of y."""

    notation: ClassVar[str] = "l2"
    ignores_row_scale: ClassVar[bool] = True
    scale: float | str = option(1.0, _read_scale, "a positive number or dim")

    def length(self, e: int) -> float:
        return float(e if isinstance(self.scale, str) else self.scale)

    def __call__(self, y: Tensor) -> Tensor:
        unit = _unit(y)
        return unit if self.scale == 1.0 else unit * self.length(y.shape[-1])

    @property
    def text(self) -> str:
        if self.scale == 1:
            return "L2"
        return f"{'e' if isinstance(self.scale, str) else written(self.scale)}·L2"


@register
@final
@dataclass(frozen=True, slots=True)
class RMS(Norm):
    """N(y) = y/√mean(y²), over the head's e values, or with `heads` over all heads of the token."""

    notation: ClassVar[str] = "rms"
    ignores_row_scale: ClassVar[bool] = True
    heads: bool = flag()

    @property
    def per_head(self) -> bool:
        return not self.heads

    def length(self, e: int) -> float | None:
        return None if self.heads else math.sqrt(e)

    def __call__(self, y: Tensor) -> Tensor:
        if self.heads:
            return _unit(y, (-2, -1)) * math.sqrt(y.shape[-1] * y.shape[-2])
        return _unit(y) * math.sqrt(y.shape[-1])

    @property
    def text(self) -> str:
        return "RMS_heads" if self.heads else "RMS"


@register
@final
@dataclass(frozen=True, slots=True)
class Layer(Norm):
    """N(y) = (y − mean y)/std y, without an affine map: that belongs to the layer."""

    notation: ClassVar[str] = "layer"
    ignores_row_scale: ClassVar[bool] = True
    centred: ClassVar[bool] = True

    def length(self, e: int) -> float | None:
        return math.sqrt(e)

    def __call__(self, y: Tensor) -> Tensor:
        return _unit(y - y.mean(-1, keepdim=True)) * math.sqrt(y.shape[-1])

    @property
    def text(self) -> str:
        return "LayerNorm"
