"""A user's own kernel, feature map and norm: one small class each, all laws inherited."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest

from maclaurin import SpecError
from maclaurin.spec import FeatureMap, Norm, Polynomial, register, whole
from maclaurin.testing import SpecLaws


@register
@dataclass(frozen=True, slots=True)
class Cosh(Polynomial):
    """κ = Σ_{n≤N, n even} xⁿ/n!: blind to the sign of the score."""

    notation: ClassVar[str] = "cosh"
    order: int = whole(at_least=0)

    @property
    def series(self):
        return tuple((n % 2 == 0) / math.factorial(n) for n in range(self.order + 1))


@register
@dataclass(frozen=True, slots=True)
class Square(FeatureMap):
    """φ(u) = u²"""

    notation: ClassVar[str] = "square"
    text: ClassVar[str] = "{u}²"
    latex: ClassVar[str] = "{u}^2"

    def __call__(self, u):
        return u * u


@register
@dataclass(frozen=True, slots=True)
class L1(Norm):
    """N(y) = y/‖y‖₁"""

    notation: ClassVar[str] = "l1"

    def __call__(self, y):
        return y / y.abs().sum(-1, keepdim=True)


class TestOwnParts(SpecLaws):
    specs: ClassVar[list[str]] = ["cosh(4)/sum", "cosh(3)*forget/l1", "linear(square)*in/l2"]


def test_a_taken_name_is_an_error():
    with pytest.raises(SpecError, match="already the norm L2"):

        @register
        @dataclass(frozen=True, slots=True)
        class Other(Norm):
            notation: ClassVar[str] = "l2"

            def __call__(self, y):
                return y
