"""Feature maps φ of the linear kernels κ(q, k) = φ(q)·φ(k), each a small registered class.

Parts never import torch: they only call methods of the tensors they get.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from maclaurin.errors import SpecError
from maclaurin.spec.part import Part, register, registered, split_arguments
from maclaurin.spec.polynomials import Sign
from maclaurin.wording import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FeatureMap(Part):
    """φ, applied to queries and keys of size d after their rotary embedding; gives vectors of `size(d)`."""

    family: ClassVar[str] = "feature map"
    #: what is known about the sign of φ(q)·φ(k)
    sign: ClassVar[Sign] = Sign.INDEFINITE
    #: whether φ(u) is exact in the dtype of u, so that a program may multiply in low precision
    keeps_digits: ClassVar[bool] = False
    #: whether φ(u) = u, so that nothing need be computed
    is_identity: ClassVar[bool] = False
    #: whether φ(q)·φ(k) is divided by √d when the caller gives no scale
    divided_by_root: ClassVar[bool] = False
    #: its name in the fused program for linear(φ); None: φ is computed before the program runs
    fused: ClassVar[str | None] = None

    @abstractmethod
    def __call__(self, u: Tensor) -> Tensor:
        """φ over the last axis."""

    @abstractmethod
    def text(self, u: str) -> str:
        """φ(u) as text."""

    def slope(self, mapped: Tensor) -> Tensor | None:
        """dφ/du from φ(u), if φ acts on each number by itself: then a gradient needs nothing but φ(u)."""
        return None

    def size(self, d: int) -> int:
        """The size of φ(u) for u of size d."""
        return d

    def default_scale(self, d: int) -> float:
        """The factor on φ(q)·φ(k) when the caller gives none."""
        return 1 / math.sqrt(d) if self.divided_by_root else 1.0

    def scaled_text(self, product: str) -> str:
        """The score as text, given the text of φ(q)·φ(k)."""
        return f"{product}/√d" if self.divided_by_root else product


@register
@final
@dataclass(frozen=True, slots=True)
class Identity(FeatureMap):
    """φ(u) = u"""

    notation: ClassVar[str] = "identity"
    fused: ClassVar[str | None] = "identity"
    divided_by_root: ClassVar[bool] = True
    keeps_digits: ClassVar[bool] = True
    is_identity: ClassVar[bool] = True

    def __call__(self, u: Tensor) -> Tensor:
        return u

    def text(self, u: str) -> str:
        return u


#: what a kernel without a feature map applies
NO_MAP = Identity()


@register
@final
@dataclass(frozen=True, slots=True)
class Elu1(FeatureMap):
    """φ(u) = elu(u) + 1:  u + 1 where u > 0, eᵘ elsewhere."""

    notation: ClassVar[str] = "elu1"
    fused: ClassVar[str | None] = "elu1"
    sign: ClassVar[Sign] = Sign.POSITIVE

    def __call__(self, u: Tensor) -> Tensor:
        return u.relu() + (-(-u).relu()).exp()

    def slope(self, mapped: Tensor) -> Tensor:
        """1 where u > 0, so that φ(u) > 1; eᵘ = φ(u) elsewhere."""
        return mapped.clamp(max=1)

    def text(self, u: str) -> str:
        return f"(elu({u})+1)"


@register
@final
@dataclass(frozen=True, slots=True)
class Relu(FeatureMap):
    """φ(u) = max(u, 0)"""

    notation: ClassVar[str] = "relu"
    fused: ClassVar[str | None] = "relu"
    divided_by_root: ClassVar[bool] = True
    keeps_digits: ClassVar[bool] = True
    sign: ClassVar[Sign] = Sign.NONNEGATIVE

    def __call__(self, u: Tensor) -> Tensor:
        return u.relu()

    def text(self, u: str) -> str:
        return f"relu({u})"


@register
@final
@dataclass(frozen=True, slots=True)
class Cosine(FeatureMap):
    """φ(u) = u/‖u‖₂, so κ is the cosine of the angle; a zero vector stays zero."""

    notation: ClassVar[str] = "cosine"
    fused: ClassVar[str | None] = "cosine"

    def __call__(self, u: Tensor) -> Tensor:
        length = u.square().sum(-1, keepdim=True)
        return u * (length + (length == 0)).rsqrt()

    def text(self, u: str) -> str:
        return f"{u}/‖{u}‖"


def read_feature_map(text: str) -> FeatureMap:
    """The feature map that is written like this: relu, or shifted(0.5) for one of your own with a field."""
    name, positional, named = split_arguments(text)
    known = registered("feature map")
    if name not in known:
        raise SpecError(
            f"there is no feature map {name!r}; choose from {', '.join(sorted(known))}."
            + did_you_mean(name, list(known)),
            place=name,
        )
    return known[name].from_arguments(positional, named)  # type: ignore[return-value]
