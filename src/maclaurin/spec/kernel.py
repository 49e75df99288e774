"""Kernels κ(q, k): what a key weighs for a query, as a function of the score x = scale·φ(q)·φ(k).

A kernel that is a polynomial in the score has a finite recurrent form, since (q·k)ⁿ = ⟨q^⊗n, k^⊗n⟩:
`orders` are the powers n that its state holds. A kernel whose polynomial depends on the row (about=mean,
hermite) takes it from the row's moments zₙ = Σ_s x_sⁿ, which such a state holds anyway.

Kernels never import torch: they only call methods of the tensors they get.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from maclaurin.errors import SpecError
from maclaurin.spec.feature_map import NO_MAP, FeatureMap, read_feature_map
from maclaurin.spec.part import Part, choice, number, numbers, option, register, required, whole, written
from maclaurin.spec.polynomials import (
    HIGHEST_ORDER,
    Coefficients,
    Sign,
    central_moments,
    factorial,
    hermite_polynomials,
    horner,
    mean_score,
    recentred,
    sign_of_polynomial,
    text_of_series,
)

if TYPE_CHECKING:
    from torch import Tensor

    from maclaurin.spec.attention_spec import AttentionSpec


@final
@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of a row of scores, each [..., T, 1]: mean x̄, variance u, coefficients in x − x̄."""

    mean: Tensor
    variance: Tensor | None = None
    coefficients: tuple[Any, ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> RowStatistics:
        """Apply `change` to every tensor; numbers stay."""
        return RowStatistics(
            change(self.mean),
            None if self.variance is None else change(self.variance),
            tuple(a if isinstance(a, int | float) else change(a) for a in self.coefficients),
        )

    @staticmethod
    def joined(parts: Sequence[RowStatistics], join: Callable[[list[Tensor]], Tensor]) -> RowStatistics:
        """The statistics of consecutive rows in one; `join` joins their tensors."""
        first = parts[0]
        return RowStatistics(
            join([p.mean for p in parts]),
            None if first.variance is None else join([p.variance for p in parts if p.variance is not None]),
            tuple(
                a if isinstance(a, int | float) else join([p.coefficients[i] for p in parts])
                for i, a in enumerate(first.coefficients)
            ),
        )


@final
@dataclass(frozen=True, slots=True)
class FusedWeight:
    """κ in the form that fused programs take.

    function "exp": e^min(x, clamp); "polynomial": Σ cₙ xⁿ, or Σ cₙ (x − x̄)ⁿ with about_mean;
    "balanced": the latter minus a number per row, so that the row's weights sum to its number of keys;
    "sigmoid": σ(c₀ + c₁ x).
    """

    function: str
    coefficients: tuple[float, ...] = (0.0, 1.0)
    clamp: float | None = None
    about_mean: bool = False


@dataclass(frozen=True, slots=True)
class Kernel(Part):
    """κ as a function of the score. Subclass `Polynomial` for one with a finite recurrent form."""

    family: ClassVar[str] = "kernel"

    @classmethod
    def check_class(cls) -> None:
        """What a kernel promises it must compute: a state by its coefficients, a row by its statistics."""
        super(Kernel, cls).check_class()
        for promise, methods in _PROMISES.items():
            missing = [m for m in methods if getattr(cls, m) is getattr(Kernel, m)]
            if getattr(cls, promise) not in (False, getattr(Kernel, promise)) and missing:
                raise SpecError(
                    f"the kernel {cls.__qualname__} defines {promise}, so it must define "
                    f"{' and '.join(missing)} too."
                )

    # ------------------------------------------------------------------------ its meaning

    @abstractmethod
    def weight(self, x: Tensor, statistics: RowStatistics | None = None) -> Tensor:
        """κ at the scores x [..., t, s]."""

    @property
    @abstractmethod
    def sign(self) -> Sign:
        """The sign of κ over all scores."""

    @abstractmethod
    def text(self, x: str) -> str:
        """κ as text, for the score x."""

    @property
    def where_text(self) -> tuple[str, str]:
        """What a name in `text` means: a formula, and words after it; both empty if no name needs this."""
        return "", ""

    # ------------------------------------------------------------------------ its score

    @property
    def feature_map(self) -> FeatureMap | None:
        """The map applied to queries and keys before the score; None for no map."""
        return None

    def default_scale(self, d: int) -> float:
        """The factor on φ(q)·φ(k) when the caller gives none."""
        return NO_MAP.default_scale(d)

    def scaled_text(self, product: str) -> str:
        """The score as text, given the text of φ(q)·φ(k)."""
        return NO_MAP.scaled_text(product)

    def key_size(self, d: int) -> int:
        """The size of φ(q) and φ(k) for queries and keys of size d."""
        return d if self.feature_map is None else self.feature_map.size(d)

    def mapped(self, u: Tensor) -> Tensor:
        """φ(u) over the last axis, u itself without a feature map."""
        feature_map = self.feature_map
        if feature_map is None:
            return u
        mapped, size = feature_map(u), self.key_size(u.shape[-1])
        if mapped.shape[-1] != size:
            raise SpecError(
                f"the feature map {feature_map} maps size {u.shape[-1]} to {mapped.shape[-1]}, but its "
                f"size(d) says {size}: define size(self, d) on the class {type(feature_map).__qualname__}."
            )
        return mapped

    # ------------------------------------------------------------------------ its recurrent form

    @property
    def has_finite_state(self) -> bool:
        """Whether κ is a polynomial of the score, so that a state of fixed size holds the past."""
        return False

    @property
    def orders(self) -> tuple[int, ...]:
        """The powers of the score that the state holds, ascending; empty without a finite state."""
        return ()

    @property
    def is_zero(self) -> bool:
        """Whether every weight is 0: beside a window there is then no tail."""
        return self.has_finite_state and len(self.orders) == 0

    def coefficients(self, statistics: RowStatistics | None = None) -> Coefficients:
        """κ as Σ aₙ xⁿ: a₀ … a_N, where it has a finite state."""
        raise SpecError(f"{self} is not a polynomial in the score.")

    @property
    def series(self) -> tuple[float, ...]:
        """a₀, a₁, …, a_N where they are numbers, the same for every row."""
        raise SpecError(f"{self} has no coefficients that are the same for every row.")

    def truncated(self, order: int) -> Kernel | None:
        """The power series of κ up to this order, where κ is the limit of such kernels; else None."""
        return None

    @property
    def unclamped(self) -> Kernel | None:
        """The same kernel without its clamp, where it has one."""
        return None

    # ------------------------------------------------------------------------ its row

    @property
    def depends_on_row(self) -> bool:
        """Whether κ depends on the moments of the whole row of scores."""
        return False

    def statistics(self, moments: Sequence[Tensor]) -> RowStatistics:
        """The row statistics that `weight` and `coefficients` need, from z₀, z₁, …, z_N."""
        raise SpecError(f"{self} does not depend on its row.")

    @property
    def row_sum_sign(self) -> Sign:
        """The sign of Σ_s κ(x_s) over all rows."""
        return self.sign

    @property
    def weights_count_keys(self) -> bool:
        """Whether the weights of every row sum to the number of its keys."""
        return False

    @property
    def positive_neighbours(self) -> tuple[Kernel, ...]:
        """Similar kernels whose row sum cannot vanish, for error messages."""
        return ()

    # ------------------------------------------------------------------------ with exact keys

    @property
    def is_exact_exp(self) -> bool:
        """Whether every key has its exact weight, so that a window adds nothing."""
        return False

    @property
    def expands_exp(self) -> bool:
        """Whether κ(x) approximates e^(x − r), so that exact keys can share its rows."""
        return False

    def reference(self, statistics: RowStatistics | None = None) -> Tensor | float:
        """The point r for which κ(x) approximates e^(x − r), where `expands_exp`."""
        return 0.0

    @property
    def reference_text(self) -> tuple[str, str]:
        """The point r as text, and what its symbols mean, in words."""
        return "0", ""

    def log_weight(self, x: Tensor) -> Tensor | None:
        """ln κ if κ is an exponential, so that the row's maximum can be subtracted first; else None."""
        return None

    # ------------------------------------------------------------------------ equal kernels, programs

    def simplified(self) -> Kernel:
        """An equal kernel with a shorter name, or itself; a window is not considered."""
        return self

    @property
    def fused(self) -> FusedWeight | None:
        """κ in the form that fused programs take; None if they do not support it."""
        return None


#: what a kernel must define together with a property
_PROMISES = {
    "has_finite_state": ("orders", "coefficients"),
    "orders": ("has_finite_state",),
    "depends_on_row": ("statistics",),
}


@dataclass(frozen=True, slots=True)
class Polynomial(Kernel):
    """κ = Σ aₙ xⁿ. A subclass gives `series`; all forms follow."""

    @classmethod
    def check_class(cls) -> None:
        """A class that changes what `series` gives also changes `fused`, from which programs take κ."""
        super(Polynomial, cls).check_class()
        fused = _depth(cls, "fused")
        changed = [name for name in ("weight", "coefficients", "orders") if _depth(cls, name) < fused]
        if changed:
            raise SpecError(
                f"the kernel {cls.__qualname__} defines {' and '.join(changed)}, but programs would compute "
                "Σ aₙ xⁿ of its series. Define `fused` too (None: κ runs in plain torch), or subclass Kernel "
                "if κ is not that polynomial."
            )

    @property
    @abstractmethod
    def series(self) -> tuple[float, ...]:
        """a₀, a₁, …, a_N."""

    @property
    def has_finite_state(self) -> bool:
        return True

    @property
    def orders(self) -> tuple[int, ...]:
        return tuple(n for n, a in enumerate(self.series) if a != 0)

    @property
    def sign(self) -> Sign:
        return sign_of_polynomial(self.series)

    def weight(self, x: Tensor, statistics: RowStatistics | None = None) -> Tensor:
        return horner(self.series, x)

    def coefficients(self, statistics: RowStatistics | None = None) -> Coefficients:
        return self.series

    def text(self, x: str) -> str:
        return text_of_series(self.series, x)

    @property
    def fused(self) -> FusedWeight | None:
        return FusedWeight("polynomial", self.series)


def _depth(cls: type, name: str) -> int:
    """How far up the bases of a class the attribute is defined."""
    return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))


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

    @property
    def is_exact_exp(self) -> bool:
        return True

    def log_weight(self, x: Tensor) -> Tensor:
        return x if self.clamp is None else x.clamp(max=self.clamp)

    def weight(self, x: Tensor, statistics: RowStatistics | None = None) -> Tensor:
        return self.log_weight(x).exp()

    def truncated(self, order: int) -> Kernel | None:
        return Taylor(order) if self.clamp is None else None

    @property
    def unclamped(self) -> Kernel | None:
        return None if self.clamp is None else Exp()

    def text(self, x: str) -> str:
        return f"exp({x})" if self.clamp is None else f"exp(min({x}, {written(self.clamp)}))"

    @property
    def fused(self) -> FusedWeight | None:
        return FusedWeight("exp", clamp=self.clamp)


@register
@final
@dataclass(frozen=True, slots=True)
class Taylor(Polynomial):
    """κ = Σ_{n≤N} (x − c)ⁿ/n!, with c = 0 or c = z₁/z₀, the row's mean score.

    Positive for every x when N is even. Expanding about the row's mean costs nothing: softmax
    ignores a constant added to a row, and the state of orders ≤ N already holds z₁/z₀.
    """

    notation: ClassVar[str] = "taylor"
    order: int = whole(at_least=0, at_most=HIGHEST_ORDER)
    about: str = choice("zero", "mean")

    @property
    def series(self) -> tuple[float, ...]:
        return tuple(1 / math.factorial(n) for n in range(self.order + 1))

    @property
    def orders(self) -> tuple[int, ...]:
        """About the mean, order 1 is kept even for taylor(0): the mean is computed from it."""
        return tuple(range((max(self.order, 1) if self.depends_on_row else self.order) + 1))

    @property
    def sign(self) -> Sign:
        """An even truncation of exp has no real root; an odd one has one."""
        return Sign.POSITIVE if self.order % 2 == 0 else Sign.INDEFINITE

    @property
    def row_sum_sign(self) -> Sign:
        """About the mean, first-order terms cancel: Σ(1 + x − c) is the number of keys."""
        return Sign.POSITIVE if self.order == 1 and self.depends_on_row else self.sign

    @property
    def positive_neighbours(self) -> tuple[Kernel, ...]:
        return tuple(Taylor(n, self.about) for n in (self.order - 1, self.order + 1) if n > 0)

    @property
    def weights_count_keys(self) -> bool:
        return self.order == 0

    @property
    def depends_on_row(self) -> bool:
        return self.about == "mean"

    @property
    def expands_exp(self) -> bool:
        return True

    def statistics(self, moments: Sequence[Tensor]) -> RowStatistics:
        return RowStatistics(mean_score(moments))

    def weight(self, x: Tensor, statistics: RowStatistics | None = None) -> Tensor:
        return horner(self.series, x if statistics is None else x - statistics.mean)

    def coefficients(self, statistics: RowStatistics | None = None) -> Coefficients:
        if statistics is None:
            return self.series
        return recentred(self.series, statistics.mean) if self.order else (1.0, 0.0)

    def reference(self, statistics: RowStatistics | None = None) -> Tensor | float:
        return 0.0 if statistics is None else statistics.mean

    @property
    def reference_text(self) -> tuple[str, str]:
        return "x̄" if self.depends_on_row else "0", ""

    def check(self, spec: AttentionSpec) -> None:
        if not self.depends_on_row or spec.ignores_row_scale:
            return
        if spec.denominator is not None and spec.denominator.uses_row_sum:
            raise SpecError(
                f"{self} drops the factor e^x̄ of its row, but /{spec.denominator} depends on it.\n"
                f"Use a plain row sum: {self}/sum.",
                place=spec.denominator,
            )
        raise SpecError(
            f"{self} drops the factor e^x̄ of its row, so it needs a row sum or a norm per "
            f"head, which cancel it.\nUse {self}/sum or {self}/l2."
        )

    def text(self, x: str) -> str:
        return f"T{self.order}({x} − x̄)" if self.depends_on_row else f"T{self.order}({x})"

    @property
    def where_text(self) -> tuple[str, str]:
        return f"T{self.order}(x) = Σ_n≤{self.order} x^n/n!", ""

    def simplified(self) -> Kernel:
        """taylor(0) is constant, so its point does not matter; 1 + x − x̄ is also hermite(1)."""
        if not self.depends_on_row or self.order > 1:
            return self
        return Taylor(0) if self.order == 0 else Hermite(1)

    @property
    def fused(self) -> FusedWeight | None:
        return FusedWeight("polynomial", self.series, about_mean=self.depends_on_row)


@register
@final
@dataclass(frozen=True, slots=True)
class Hermite(Kernel):
    """κ = 1 + Σ_{1≤n≤N} (Hₙ(x − x̄) − mean Hₙ)/n!: the expansion of softmax itself, not of exp.

    For Gaussian scores of mean x̄ and variance u, e^{x−x̄}/E[e^{x−x̄}] = Σ Hₙ(x − x̄)/n! with the
    Hermite polynomials H₁ = c, H₂ = c² − u, H_{n+1} = c Hₙ − n u H_{n−1}. Subtracting each
    term's mean over the row (zero for n ≤ 2) makes the weights sum to exactly the number of keys.
    """

    notation: ClassVar[str] = "hermite"
    order: int = whole(at_least=0, at_most=HIGHEST_ORDER)

    @property
    def has_finite_state(self) -> bool:
        return True

    @property
    def orders(self) -> tuple[int, ...]:
        return tuple(range(self.order + 1))

    @property
    def sign(self) -> Sign:
        return Sign.POSITIVE if self.order == 0 else Sign.INDEFINITE

    @property
    def row_sum_sign(self) -> Sign:
        return Sign.POSITIVE

    @property
    def weights_count_keys(self) -> bool:
        return True

    @property
    def depends_on_row(self) -> bool:
        return self.order > 0

    @property
    def expands_exp(self) -> bool:
        return True

    def statistics(self, moments: Sequence[Tensor]) -> RowStatistics:
        """Mean, variance, and the polynomial's coefficients in c = x − x̄."""
        mean = mean_score(moments)
        central = central_moments(moments, mean)
        variance = central[2] if self.order >= 2 else mean * 0
        terms = hermite_polynomials(self.order, variance)
        in_c: list[Any] = [1.0, *[0.0] * self.order]
        for n in range(1, self.order + 1):
            average = sum(b * m for b, m in zip(terms[n], central, strict=False)) if n > 2 else 0.0
            for power, b in enumerate(terms[n]):
                in_c[power] = in_c[power] + b / factorial(n)
            in_c[0] = in_c[0] - average / factorial(n)
        return RowStatistics(mean, variance, tuple(in_c))

    def weight(self, x: Tensor, statistics: RowStatistics | None = None) -> Tensor:
        if statistics is None:
            return horner((1.0,), x)
        return horner(statistics.coefficients, x - statistics.mean)

    def coefficients(self, statistics: RowStatistics | None = None) -> Coefficients:
        if statistics is None:
            return (1.0,)
        return recentred(statistics.coefficients, statistics.mean)

    def reference(self, statistics: RowStatistics | None = None) -> Tensor | float:
        """κ approximates e^{x − x̄ − u/2}: u/2 is the log of a Gaussian row's mean e^{x − x̄}.

        At first order it approximates e^{x − x̄}, and u is 0.
        """
        if statistics is None or statistics.variance is None:
            return 0.0
        return statistics.mean + statistics.variance / 2

    @property
    def reference_text(self) -> tuple[str, str]:
        if self.order < 2:
            return "x̄" if self.order else "0", ""
        return "x̄ + u/2", "u the variance of the scores over the tail"

    def text(self, x: str) -> str:
        return f"H{self.order}({x} − x̄)" if self.order else "1"

    @property
    def where_text(self) -> tuple[str, str]:
        if not self.order:
            return "", ""
        return (
            f"H{self.order}(c) = 1 + Σ_1≤n≤{self.order} (h_n(c) − m_n)/n!",
            "with the Hermite polynomials h for the variance of the scores and their means m",
        )

    @property
    def fused(self) -> FusedWeight | None:
        """1 + c + (c² − u)/2: taylor(2,about=mean) minus u/2."""
        return FusedWeight("balanced", (1.0, 1.0, 0.5), about_mean=True) if self.order == 2 else None

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

    @property
    def positive_neighbours(self) -> tuple[Kernel, ...]:
        return tuple(Power(n) for n in (self.exponent - 1, self.exponent + 1) if n > 0)

    @property
    def weights_count_keys(self) -> bool:
        return self.exponent == 0

    def text(self, x: str) -> str:
        return f"({x})^{self.exponent}"

    def simplified(self) -> Kernel:
        if self.exponent == 0:
            return Taylor(0)
        return Linear(read_feature_map("identity")) if self.exponent == 1 else self


@register
@final
@dataclass(frozen=True, slots=True)
class Poly(Polynomial):
    """κ = a₀ + a₁x + a₂x² + …, any coefficients. poly(0) gives every key weight 0."""

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


def _nonzero(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value == 0:
        raise ValueError
    return value


@register
@final
@dataclass(frozen=True, slots=True)
class Linear(Kernel):
    """κ = scale·φ(q)·φ(k), of order 1 alone. With a clamp it is min(·, clamp) and has no finite form.

    The scale is the feature map's own (1/√d for identity and relu, 1 for elu1 and cosine) unless
    the spec fixes it.
    """

    notation: ClassVar[str] = "linear"
    feature: FeatureMap = required(read_feature_map, "a feature map")
    clamp: float | None = number(default=None)
    scale: float | None = option(None, _nonzero, "a number other than 0")

    @property
    def has_finite_state(self) -> bool:
        return self.clamp is None

    @property
    def orders(self) -> tuple[int, ...]:
        return (1,) if self.clamp is None else ()

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

    def scaled_text(self, product: str) -> str:
        if self.scale is None:
            return self.feature.scaled_text(product)
        return product if self.scale == 1 else f"{written(self.scale)} {product}"

    @property
    def unclamped(self) -> Kernel | None:
        return None if self.clamp is None else Linear(self.feature, None, self.scale)

    def weight(self, x: Tensor, statistics: RowStatistics | None = None) -> Tensor:
        return x if self.clamp is None else x.clamp(max=self.clamp)

    @property
    def series(self) -> tuple[float, ...]:
        return (0.0, 1.0)

    def coefficients(self, statistics: RowStatistics | None = None) -> Coefficients:
        return self.series

    def text(self, x: str) -> str:
        return x if self.clamp is None else f"min({x}, {written(self.clamp)})"

    @property
    def fused(self) -> FusedWeight | None:
        return FusedWeight("polynomial", self.series) if self.clamp is None else None


@register
@final
@dataclass(frozen=True, slots=True)
class Sigmoid(Kernel):
    """κ = σ(x + b): each key is weighted on its own. No finite recurrent form."""

    notation: ClassVar[str] = "sigmoid"
    bias: float = number()

    @property
    def sign(self) -> Sign:
        return Sign.POSITIVE

    def weight(self, x: Tensor, statistics: RowStatistics | None = None) -> Tensor:
        return (x + self.bias).sigmoid()

    def text(self, x: str) -> str:
        return f"σ({x} {'−' if self.bias < 0 else '+'} {written(abs(self.bias))})"

    @property
    def fused(self) -> FusedWeight | None:
        return FusedWeight("sigmoid", (self.bias, 1.0))
