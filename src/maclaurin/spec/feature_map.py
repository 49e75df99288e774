"""Feature maps φ of the linear kernels κ(q, k) = φ(q)·φ(k), each a small registered class.

Parts never import torch: they only call methods of the tensors they get.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from maclaurin.errors import SpecError
from maclaurin.spec.part import Part, register, registered
from maclaurin.spec.polynomials import Sign
from maclaurin.spec.typeset import typeset
from maclaurin.wording import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FeatureMap(Part):
    """φ: R^d → R^d, applied to queries and keys after their rotary embedding."""

    family: ClassVar[str] = "feature map"
    #: what is known about the sign of φ(q)·φ(k)
    sign: ClassVar[Sign] = Sign.INDEFINITE
    #: whether φ(u) is exact in the dtype of u, so that a program may multiply in low precision
    keeps_digits: ClassVar[bool] = False
    #: whether φ(u) = u, so that nothing need be computed
    is_identity: ClassVar[bool] = False
    #: its name in the fused program for linear(φ); None: φ is computed before the program runs
    fused: ClassVar[str | None] = None

    @abstractmethod
    def __call__(self, u: Tensor) -> Tensor:
        """φ over the last axis."""

    @abstractmethod
    def text(self, u: str) -> str:
        """φ(u) as text."""

    def latex(self, u: str) -> str:
        """φ(u) as LaTeX."""
        return typeset(self.text(u))

    def default_scale(self, d: int) -> float:
        """The factor on φ(q)·φ(k) when the caller gives none."""
        return 1.0

    def scaled_text(self, product: str) -> str:
        """The score as text, given the text of φ(q)·φ(k)."""
        return product


@register
@final
@dataclass(frozen=True, slots=True)
class Identity(FeatureMap):
    """φ(u) = u"""

    notation: ClassVar[str] = "identity"
    fused: ClassVar[str | None] = "identity"
    keeps_digits: ClassVar[bool] = True
    is_identity: ClassVar[bool] = True

    def __call__(self, u: Tensor) -> Tensor:
        return u

    def text(self, u: str) -> str:
        return u

    def default_scale(self, d: int) -> float:
        return 1 / math.sqrt(d)

    def scaled_text(self, product: str) -> str:
        return f"{product}/√d"


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

    def text(self, u: str) -> str:
        return f"(elu({u})+1)"


@register
@final
@dataclass(frozen=True, slots=True)
class Relu(FeatureMap):
    """φ(u) = max(u, 0)"""

    notation: ClassVar[str] = "relu"
    fused: ClassVar[str | None] = "relu"
    keeps_digits: ClassVar[bool] = True
    sign: ClassVar[Sign] = Sign.NONNEGATIVE

    def __call__(self, u: Tensor) -> Tensor:
        return u.relu()

    def text(self, u: str) -> str:
        return f"relu({u})"

    def default_scale(self, d: int) -> float:
        return 1 / math.sqrt(d)

    def scaled_text(self, product: str) -> str:
        return f"{product}/√d"


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
    """The feature map of that name, or an error that lists the known ones."""
    known = registered("feature map")
    if text not in known:
        raise SpecError(
            f"there is no feature map {text!r}; known are {', '.join(sorted(known))}."
            + did_you_mean(text, list(known))
        )
    return known[text]()  # type: ignore[return-value]
