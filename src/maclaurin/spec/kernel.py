"""Kernels κ(q, k): what a key weighs for a query, as a function of the score x = scale·φ(q)·φ(k).

A kernel that is a polynomial in the score has a finite recurrent form, since (q·k)ⁿ = ⟨q^⊗n, k^⊗n⟩:
it names the orders n it needs in the state. `statistics` and `coefficients` are for kernels whose
polynomial depends on the row (about=mean, hermite): both follow from the row's moments
zₙ = Σ_s x_sⁿ, which such a state holds anyway.

Parts never import torch: they only call methods of the tensors they are handed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from maclaurin.errors import SpecError
from maclaurin.spec.feature_map import FeatureMap, read_feature_map
from maclaurin.spec.part import Part, choice, number, numbers, option, register, required, whole, written
from maclaurin.spec.sign import Sign, sign_of_polynomial

if TYPE_CHECKING:
    from torch import Tensor

#: 171! is beyond float64
HIGHEST_ORDER = 170

#: coefficients a₀, a₁, … of a polynomial in the score: constants, or one tensor per row
Coefficients = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Kernel(Part):
    """κ as a function of the score. Subclass `Polynomial` for one with a finite recurrent form."""

    family: ClassVar[str] = "kernel"

    @property
    def orders(self) -> tuple[int, ...] | None:
        """The powers of the score in κ, ascending; None where no finite number is enough."""
        return None

    @property
    @abstractmethod
    def sign(self) -> Sign:
        """The sign of κ over all scores."""

    @property
    def row_sum_sign(self) -> Sign:
        """The sign of Σ_s κ(x_s) over all rows."""
        return self.sign

    @property
    def depends_on_row(self) -> bool:
        """Whether κ looks at the moments of the whole row of scores."""
        return False

    @property
    def feature_map(self) -> FeatureMap | None:
        """What is applied to queries and keys before the score; None for nothing."""
        return None

    @property
    def expands_exp(self) -> bool:
        """Whether κ(x) stands for e^(x − reference), so that exact keys may stand beside it."""
        return False

    def default_scale(self, d: int) -> float:
        """The factor on q·k when the caller names none."""
        return 1 / math.sqrt(d)

    def statistics(self, moments: Sequence[Tensor]) -> Any:
        """What `weight` and `coefficients` need to know of the row, from z₀, z₁, …, z_N."""
        return None

    @abstractmethod
    def weight(self, x: Tensor, statistics: Any = None) -> Tensor:
        """κ at the scores x [..., t, s]; statistics are [..., t, 1]."""

    def coefficients(self, statistics: Any = None) -> Coefficients:
        """κ as Σ aₙ xⁿ: a₀ … a_N, where `orders` is not None."""
        raise SpecError(f"{self} is not a polynomial in the score.")

    def reference(self, statistics: Any = None) -> Any:
        """The point r for which κ(x) stands for e^(x − r), where `expands_exp`."""
        return 0.0

    @abstractmethod
    def text(self, x: str) -> str:
        """κ as text, for the score x."""

    @abstractmethod
    def latex(self, x: str) -> str:
        """κ as LaTeX, for the score x."""

    def simplified(self) -> Kernel:
        """An equal kernel with a shorter name, or itself."""
        return self


@dataclass(frozen=True, slots=True)
class Polynomial(Kernel):
    """κ = Σ aₙ xⁿ. A subclass gives `series`; all three forms follow."""

    @property
    @abstractmethod
    def series(self) -> tuple[float, ...]:
        """a₀, a₁, …, a_N."""

    @property
    def orders(self) -> tuple[int, ...] | None:
        return tuple(n for n, a in enumerate(self.series) if a != 0)

    @property
    def sign(self) -> Sign:
        return sign_of_polynomial(self.series)

    def weight(self, x: Tensor, statistics: Any = None) -> Tensor:
        return horner(self.series, x)

    def coefficients(self, statistics: Any = None) -> Coefficients:
        return self.series

    def text(self, x: str) -> str:
        return _text_of_series(self.series, x)

    def latex(self, x: str) -> str:
        return _text_of_series(self.series, x).replace("·", r"\,")


@register
@final
@dataclass(frozen=True, slots=True)
class Exp(Kernel):
    """κ = eˣ, or e^min(x, clamp). The clamp is not analytic, so it has no finite recurrent form."""

    notation: ClassVar[str] = "exp"
    clamp: float | None = number(default=None)

    @property
    def sign(self) -> Sign:
        return Sign.POSITIVE

    def log_weight(self, x: Tensor) -> Tensor:
        """ln κ, from which the row's maximum can be taken before the exponential."""
        return x if self.clamp is None else x.clamp(max=self.clamp)

    def weight(self, x: Tensor, statistics: Any = None) -> Tensor:
        return self.log_weight(x).exp()

    def text(self, x: str) -> str:
        return f"exp({x})" if self.clamp is None else f"exp(min({x}, {written(self.clamp)}))"

    def latex(self, x: str) -> str:
        return f"e^{{{x}}}" if self.clamp is None else rf"e^{{\min({x},\,{written(self.clamp)})}}"


@register
@final
@dataclass(frozen=True, slots=True)
class Taylor(Polynomial):
    """κ = Σ_{n≤N} (x − c)ⁿ/n!, with c = 0 or c = z₁/z₀, the row's mean score.

    Positive for every x when N is even. Expanding about the row's mean costs nothing: softmax
    does not see a constant added to a row, and the state of orders ≤ N already holds z₁/z₀.
    """

    notation: ClassVar[str] = "taylor"
    order: int = whole(at_least=0, at_most=HIGHEST_ORDER)
    about: str = choice("zero", "mean")

    @property
    def series(self) -> tuple[float, ...]:
        return tuple(1 / math.factorial(n) for n in range(self.order + 1))

    @property
    def orders(self) -> tuple[int, ...] | None:
        """About the mean, order 1 is kept even for taylor(0): the mean is read off it."""
        return tuple(range((max(self.order, 1) if self.depends_on_row else self.order) + 1))

    @property
    def row_sum_sign(self) -> Sign:
        """About the mean, first-order terms cancel: Σ(1 + x − c) is the number of keys."""
        return Sign.POSITIVE if self.order == 1 and self.depends_on_row else self.sign

    @property
    def sign(self) -> Sign:
        """An even truncation of exp has no real root; an odd one has one."""
        return Sign.POSITIVE if self.order % 2 == 0 else Sign.INDEFINITE

    @property
    def depends_on_row(self) -> bool:
        return self.about == "mean"

    @property
    def expands_exp(self) -> bool:
        return True

    def statistics(self, moments: Sequence[Tensor]) -> Any:
        return _mean(moments) if self.depends_on_row else None

    def weight(self, x: Tensor, statistics: Any = None) -> Tensor:
        return horner(self.series, x - statistics if self.depends_on_row else x)

    def coefficients(self, statistics: Any = None) -> Coefficients:
        if not self.depends_on_row:
            return self.series
        return recentred(self.series, statistics) if self.order else (1.0, 0.0)

    def reference(self, statistics: Any = None) -> Any:
        return statistics if self.depends_on_row else 0.0

    def text(self, x: str) -> str:
        return f"T{self.order}({x} − x̄)" if self.depends_on_row else f"T{self.order}({x})"

    def latex(self, x: str) -> str:
        argument = rf"({x}-\bar x_t)" if self.depends_on_row else x
        return rf"\sum_{{n=0}}^{{{self.order}}} \frac{{{argument}^n}}{{n!}}"


@register
@final
@dataclass(frozen=True, slots=True)
class Hermite(Kernel):
    """κ = 1 + Σ_{1≤n≤N} (Hₙ(x − x̄) − mean Hₙ)/n!: softmax itself expanded, not exp.

    For Gaussian scores of mean x̄ and variance u, e^{x−x̄}/E[e^{x−x̄}] = Σ Hₙ(x − x̄)/n! with the
    Hermite polynomials H₁ = c, H₂ = c² − u, H_{n+1} = c Hₙ − n u H_{n−1}. Taking off each term's
    own mean over the row (zero for n ≤ 2) makes the weights sum to exactly the number of keys.
    """

    notation: ClassVar[str] = "hermite"
    order: int = whole(at_least=0, at_most=HIGHEST_ORDER)

    @property
    def orders(self) -> tuple[int, ...] | None:
        return tuple(range(self.order + 1))

    @property
    def sign(self) -> Sign:
        return Sign.POSITIVE if self.order == 0 else Sign.INDEFINITE

    @property
    def row_sum_sign(self) -> Sign:
        return Sign.POSITIVE

    @property
    def depends_on_row(self) -> bool:
        return self.order > 0

    @property
    def expands_exp(self) -> bool:
        return True

    def statistics(self, moments: Sequence[Tensor]) -> Any:
        """Mean, variance, and the polynomial's coefficients in c = x − x̄."""
        if self.order == 0:
            return None
        mean = _mean(moments)
        central = _central_moments(moments, mean)
        variance = central[2] if self.order >= 2 else mean * 0
        terms = _hermite_polynomials(self.order, variance)
        in_c: list[Any] = [1.0, *[0.0] * self.order]
        for n in range(1, self.order + 1):
            average = sum(b * m for b, m in zip(terms[n], central, strict=False)) if n > 2 else 0.0
            for power, b in enumerate(terms[n]):
                in_c[power] = in_c[power] + b / _factorial(n)
            in_c[0] = in_c[0] - average / _factorial(n)
        return mean, variance, tuple(in_c)

    def weight(self, x: Tensor, statistics: Any = None) -> Tensor:
        if self.order == 0:
            return x * 0 + 1
        mean, _, in_c = statistics
        return horner(in_c, x - mean)

    def coefficients(self, statistics: Any = None) -> Coefficients:
        if self.order == 0:
            return (1.0,)
        mean, _, in_c = statistics
        return recentred(in_c, mean)

    def reference(self, statistics: Any = None) -> Any:
        """κ stands for e^{x − x̄ − u/2}: u/2 is the log of a Gaussian row's mean e^{x − x̄}."""
        if self.order == 0:
            return 0.0
        mean, variance, _ = statistics
        return mean + variance / 2

    def text(self, x: str) -> str:
        return f"H{self.order}({x} − x̄)"

    def latex(self, x: str) -> str:
        return (
            rf"1+\sum_{{n=1}}^{{{self.order}}} "
            rf"\frac{{H_n({x}-\bar x_t)-\overline{{H_n}}}}{{n!}}"
        )

    def simplified(self) -> Kernel:
        return Taylor(0) if self.order == 0 else self


@register
@final
@dataclass(frozen=True, slots=True)
class Power(Polynomial):
    """κ = xᵖ: one order alone. Nonnegative for even p."""

    notation: ClassVar[str] = "power"
    exponent: int = whole(at_least=0, at_most=HIGHEST_ORDER)

    @property
    def series(self) -> tuple[float, ...]:
        return (*[0.0] * self.exponent, 1.0)

    def text(self, x: str) -> str:
        return f"({x})^{self.exponent}"

    def latex(self, x: str) -> str:
        return f"({x})^{{{self.exponent}}}"

    def simplified(self) -> Kernel:
        if self.exponent == 0:
            return Taylor(0)
        return Linear(read_feature_map("identity")) if self.exponent == 1 else self


@register
@final
@dataclass(frozen=True, slots=True)
class Poly(Polynomial):
    """κ = a₀ + a₁x + a₂x² + …, any coefficients. poly(0) is the kernel that weighs nothing."""

    notation: ClassVar[str] = "poly"
    series: tuple[float, ...] = numbers()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not self.series:
            raise SpecError("poly needs at least one coefficient: poly(1,1,0.5).")
        Part.__post_init__(self)

    @property
    def expands_exp(self) -> bool:
        return True

    def simplified(self) -> Kernel:
        highest = max((n for n, a in enumerate(self.series) if a), default=0)
        if highest > HIGHEST_ORDER:
            return self
        series = self.series[: highest + 1]
        for known in (Taylor(highest), Power(highest)):
            if series == known.series:
                return known.simplified()
        return self if series == self.series else Poly(series)


def _read_scale(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value == 0:
        raise ValueError
    return value


@register
@final
@dataclass(frozen=True, slots=True)
class Linear(Kernel):
    """κ = scale·φ(q)·φ(k), first order only; with a clamp min(·, clamp), and then no finite form.

    The scale is the feature map's own (1/√d for identity and relu, 1 for elu1 and cosine) unless
    the spec fixes it.
    """

    notation: ClassVar[str] = "linear"
    feature: FeatureMap = required(read_feature_map, "a feature map")
    clamp: float | None = number(default=None)
    scale: float | None = option(None, _read_scale, "a number other than 0")

    @property
    def orders(self) -> tuple[int, ...] | None:
        return (1,) if self.clamp is None else None

    @property
    def sign(self) -> Sign:
        scaled_down = self.scale is not None and self.scale < 0
        clamped_down = self.clamp is not None and self.clamp <= 0
        return Sign.INDEFINITE if scaled_down or clamped_down else self.feature.sign

    @property
    def feature_map(self) -> FeatureMap | None:
        return self.feature

    def default_scale(self, d: int) -> float:
        return self.feature.default_scale(d) if self.scale is None else self.scale

    def weight(self, x: Tensor, statistics: Any = None) -> Tensor:
        return x if self.clamp is None else x.clamp(max=self.clamp)

    def coefficients(self, statistics: Any = None) -> Coefficients:
        return (0.0, 1.0)

    def text(self, x: str) -> str:
        return x if self.clamp is None else f"min({x}, {written(self.clamp)})"

    def latex(self, x: str) -> str:
        return x if self.clamp is None else rf"\min({x},\,{written(self.clamp)})"


@register
@final
@dataclass(frozen=True, slots=True)
class Sigmoid(Kernel):
    """κ = σ(x + b): each key is judged alone. No finite recurrent form."""

    notation: ClassVar[str] = "sigmoid"
    bias: float = number()

    @property
    def sign(self) -> Sign:
        return Sign.POSITIVE

    def weight(self, x: Tensor, statistics: Any = None) -> Tensor:
        return (x + self.bias).sigmoid()

    def text(self, x: str) -> str:
        return f"σ({x} {'−' if self.bias < 0 else '+'} {written(abs(self.bias))})"

    def latex(self, x: str) -> str:
        return rf"\sigma({x}{'-' if self.bias < 0 else '+'}{written(abs(self.bias))})"


# --------------------------------------------------------------------------------- polynomials


def horner(coefficients: Coefficients, x: Tensor) -> Tensor:
    """Σ aₙ xⁿ, from the highest order down."""
    if len(coefficients) == 1:
        return x * 0 + coefficients[0]
    *lower, highest = coefficients
    result = x * highest
    for a in reversed(lower[1:]):
        result = (result + a) * x
    return result + lower[0]


def recentred(coefficients: Coefficients, c: Any) -> list[Any]:
    """The aⱼ of Σ bₙ (x − c)ⁿ = Σ aⱼ xʲ:  aⱼ = Σ_{n≥j} bₙ C(n, j) (−c)^{n−j}."""
    top = len(coefficients)
    powers: list[Any] = [1.0]  # of −c
    for _ in range(top - 1):
        powers.append(powers[-1] * -c)
    return [sum(coefficients[n] * _choose(n, j) * powers[n - j] for n in range(j, top)) for j in range(top)]


def _choose(n: int, j: int) -> float:
    """C(n, j) as a float: from order 25 on, integers would not fit where tensors take them."""
    return float(math.comb(n, j))


def _factorial(n: int) -> float:
    return float(math.factorial(n))


def _mean(moments: Sequence[Tensor]) -> Tensor:
    """z₁/z₀, and 0 where the row is empty."""
    return _per_key(moments[1], moments[0])


#: a row whose keys have been forgotten down to this counts as empty: one over it is still finite
_LEAST_MASS = 1e-30


def _per_key(total: Tensor, mass: Tensor) -> Tensor:
    """total/mass, and 0 (with a gradient of 0) where there is next to no mass."""
    empty = mass <= _LEAST_MASS
    return (total / mass.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def _central_moments(moments: Sequence[Tensor], mean: Tensor) -> list[Any]:
    """μₙ = Σ_s (x_s − x̄)ⁿ / z₀ from the raw moments, by the binomial theorem."""
    result: list[Any] = []
    for n in range(len(moments)):
        terms = (_choose(n, j) * moments[j] * (-mean) ** (n - j) for j in range(n + 1))
        result.append(_per_key(sum(terms), moments[0]))  # type: ignore[arg-type]
    return result


def _hermite_polynomials(order: int, u: Any) -> list[list[Any]]:
    """Coefficients in c of H₀ … H_N with variance u:  H_{n+1} = c Hₙ − n u H_{n−1}."""
    result: list[list[Any]] = [[1.0], [0.0, 1.0]]
    for n in range(1, order):
        raised = [0.0, *result[n]]
        lowered = [*(n * u * b for b in result[n - 1]), 0.0, 0.0]
        result.append([a - b for a, b in zip(raised, lowered, strict=True)])
    return result


def _text_of_series(series: Sequence[float], x: str) -> str:
    terms = []
    for n, a in enumerate(series):
        if a == 0:
            continue
        power = "" if n == 0 else x if n == 1 else f"({x})^{n}"
        factor = written(a) if n == 0 else "" if a == 1 else f"{written(a)}·"
        terms.append(factor + power)
    return " + ".join(terms).replace("+ -", "− ") or "0"
