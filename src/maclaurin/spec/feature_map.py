"""Feature maps φ of the linear kernels κ(q, k) = φ(q)·φ(k), each a small registered class.

Parts never import torch: they only call methods of the tensors they are handed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from maclaurin.errors import SpecError, did_you_mean
from maclaurin.spec.part import Part, register, registered
from maclaurin.spec.sign import Sign

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
    #: φ in text and in LaTeX, with {u} for the argument
    text: ClassVar[str]
    latex: ClassVar[str]

    @abstractmethod
    def __call__(self, u: Tensor) -> Tensor:
        """φ over the last axis."""

    def default_scale(self, d: int) -> float:
        """The factor on φ(q)·φ(k) when the caller names none."""
        return 1.0


@register
@final
@dataclass(frozen=True, slots=True)
class Identity(FeatureMap):
    """φ(u) = u"""

    notation: ClassVar[str] = "identity"
    keeps_digits: ClassVar[bool] = True
    text: ClassVar[str] = "{u}"
    latex: ClassVar[str] = "{u}"

    def __call__(self, u: Tensor) -> Tensor:
        return u

    def default_scale(self, d: int) -> float:
        return 1 / math.sqrt(d)


@register
@final
@dataclass(frozen=True, slots=True)
class Elu1(FeatureMap):
    """φ(u) = elu(u) + 1:  u + 1 where u > 0, eᵘ elsewhere."""

    notation: ClassVar[str] = "elu1"
    sign: ClassVar[Sign] = Sign.POSITIVE
    text: ClassVar[str] = "(elu({u})+1)"
    latex: ClassVar[str] = r"(\mathrm{{elu}}({u})+1)"

    def __call__(self, u: Tensor) -> Tensor:
        return u.relu() + (-(-u).relu()).exp()


@register
@final
@dataclass(frozen=True, slots=True)
class Relu(FeatureMap):
    """φ(u) = max(u, 0)"""

    notation: ClassVar[str] = "relu"
    keeps_digits: ClassVar[bool] = True
    sign: ClassVar[Sign] = Sign.NONNEGATIVE
    text: ClassVar[str] = "relu({u})"
    latex: ClassVar[str] = r"\mathrm{{relu}}({u})"

    def __call__(self, u: Tensor) -> Tensor:
        return u.relu()

    def default_scale(self, d: int) -> float:
        return 1 / math.sqrt(d)


@register
@final
@dataclass(frozen=True, slots=True)
class Cosine(FeatureMap):
    """φ(u) = u/‖u‖₂, so κ is the cosine of the angle; a zero vector stays zero."""

    notation: ClassVar[str] = "cosine"
    text: ClassVar[str] = "{u}/‖{u}‖"
    latex: ClassVar[str] = r"\frac{{{u}}}{{\|{u}\|}}"

    def __call__(self, u: Tensor) -> Tensor:
        length = u.square().sum(-1, keepdim=True)
        return u * (length + (length == 0)).rsqrt()


def read_feature_map(text: str) -> FeatureMap:
    """The feature map of that name, or an error that lists the known ones."""
    known = registered("feature map")
    if text not in known:
        raise SpecError(
            f"there is no feature map {text!r}; known are {', '.join(sorted(known))}."
            + did_you_mean(text, list(known))
        )
    return known[text]()  # type: ignore[return-value]
