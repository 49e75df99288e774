"""Denominators: the positive number D_t that a row is divided by, before its output gate and its norm.

A denominator computes D_t from what the row has seen (`Seen`). It never imports torch: it only calls methods
of the tensors it gets.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, final

from maclaurin.errors import SpecError
from maclaurin.spec.part import Argument, Part, Recipe, check_argument, flag, positive, register, written
from maclaurin.spec.polynomials import Sign

if TYPE_CHECKING:
    from torch import Tensor

    from maclaurin.spec.attention_spec import AttentionSpec


class Seen(Protocol):
    """What a denominator can read: one number per row [B, K, G, T] unless stated otherwise."""

    @property
    def keys(self) -> Tensor:
        """How many keys the row sees, at least 1."""
        ...

    @property
    def row_sum(self) -> Tensor:
        """Σ_s w_ts, 1 where that is 0; only where `uses_row_sum`. NaN where it overflows float64."""
        ...

    @property
    def log_row_sum(self) -> Tensor:
        """ln of `row_sum`, which does not overflow."""
        ...

    @property
    def scaled_row_sum(self) -> Tensor:
        """Σ_s w_ts times `unit`, for a denominator that `is_scaled`."""
        ...

    @property
    def unit(self) -> Tensor | float:
        """A positive number per row, such that `scaled_row_sum` does not overflow."""
        ...

    @property
    def argument(self) -> Tensor:
        """The tensor the denominator takes, if it takes one; ln Σ_{r≤t} e^{g_r} if that is running."""
        ...


@final
@dataclass(frozen=True, slots=True)
class FusedDivisor:
    """A division that a fused program can do: by the row's sum plus eps, or by its number of keys."""

    by: str  # "sum" or "count"
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Denominator(Part):
    """A positive number per head and token."""

    family: ClassVar[str] = "denominator"
    mark: ClassVar[str] = "/"
    stage: ClassVar[int] = 4
    #: whether `divisor` reads the row sum
    uses_row_sum: ClassVar[bool] = False
    #: whether `divisor` is D times `seen.unit`, computed from `seen.scaled_row_sum`: then nothing overflows
    is_scaled: ClassVar[bool] = False
    #: whether ln D is computed directly, because D itself may overflow
    in_log_domain: ClassVar[bool] = False
    #: the tensor it takes, if any
    argument: ClassVar[Argument | None] = None

    @classmethod
    def declared_argument(cls) -> Argument | None:
        return cls.argument

    @classmethod
    def check_class(cls) -> None:
        if cls.is_scaled and not cls.uses_row_sum:
            raise SpecError(
                f"the denominator {cls.__qualname__} is_scaled, so it must set uses_row_sum = True."
            )
        for promise, method in (("in_log_domain", "log_divisor"), ("has_log_slope", "log_slope")):
            if getattr(cls, promise) and getattr(cls, method) is getattr(Denominator, method):
                raise SpecError(
                    f"the denominator {cls.__qualname__} sets {promise} = True, so it must define {method}."
                )
        if cls.argument is not None:
            running = isinstance(cls.argument, Argument) and cls.argument.running
            tokens = "key" if running else "query"
            check_argument(cls, cls.argument, tokens=tokens, heads=None, per_channel=False, running=True)

    @abstractmethod
    def divisor(self, seen: Seen) -> Tensor:
        """D_t > 0 [B, K, G, T]; times `seen.unit` if it `is_scaled`."""

    def log_divisor(self, seen: Seen) -> Tensor:
        """ln D_t."""
        return self.divisor(seen).log()

    @abstractmethod
    def text(self, row_sum: str) -> str:
        """D as text, given the text of the row sum."""

    #: whether `log_slope` is defined; fused softmax needs it if the denominator uses the row sum
    has_log_slope: ClassVar[bool] = False

    def log_slope(self, seen: Seen) -> Tensor | None:
        """∂ ln D/∂ ln Σ_s w_ts [B, K, G, T]; None for zero."""
        return None

    @property
    def ignores_row_scale(self) -> bool:
        """Whether a factor on a whole row of weights changes neither the answer nor any gradient.

        That holds for any multiple of the row sum; for the row sum itself, `fused` says so.
        """
        return False

    @property
    def fused(self) -> FusedDivisor | None:
        """The division if a fused program can do it; None: it is done afterwards."""
        return None

    @property
    def has_gradient(self) -> bool:
        """Whether gradients flow through it."""
        return True

    @property
    def positive_for(self) -> Sign:
        """The row sums for which D > 0: POSITIVE ones, as for D = Σ_s w_ts itself.

        NONNEGATIVE: zero too, as for Σ_s w_ts + 1. INDEFINITE: any, as for max(Σ_s w_ts, 1).
        """
        return Sign.POSITIVE if self.uses_row_sum else Sign.INDEFINITE

    def can_vanish(self, spec: AttentionSpec) -> bool:
        """Whether some row makes D exactly zero; in a window the current key has a positive weight."""
        sign = spec.kernel.row_sum_sign
        if sign is Sign.NONNEGATIVE and spec.window is not None:
            sign = Sign.POSITIVE
        return not sign.is_within(self.positive_for)

    def check(self, spec: AttentionSpec) -> None:
        kernel = spec.kernel
        if kernel.row_sum_sign is not Sign.INDEFINITE or self.positive_for is Sign.INDEFINITE:
            return
        even = ", ".join(f"{alternative}/{self}" for alternative in kernel.positive_neighbours)
        hints = ([f"an even order ({even})"] if even else []) + [f"a norm: {kernel}/l2"]
        raise SpecError(
            f"{kernel}/{self} divides by a row sum that can be negative, so it can vanish.\n"
            f"Use {' or '.join(hints)}.",
            place=self,
        )


@register
@final
@dataclass(frozen=True, slots=True)
class RowSum(Denominator):
    """max(Σ_s D_ts κ_ts + eps, floor); with `detach`, no gradient flows through it.

    The row sum contains the forget gate D and not the input gate, which belongs to the values.
    """

    notation: ClassVar[str] = "sum"
    uses_row_sum: ClassVar[bool] = True
    is_scaled: ClassVar[bool] = True
    has_log_slope: ClassVar[bool] = True
    floor: float | None = positive(default=None)
    eps: float | None = positive(default=None)
    detach: bool = flag()

    def divisor(self, seen: Seen) -> Tensor:
        total = seen.scaled_row_sum
        if self.eps is not None:
            total = total + seen.unit * self.eps
        if self.floor is not None:
            total = total.clamp(min=seen.unit * self.floor)  # type: ignore[arg-type]
        return total.detach() if self.detach else total

    def log_slope(self, seen: Seen) -> Tensor | None:
        if self.detach:
            return None
        row_sum = seen.scaled_row_sum
        total = row_sum if self.eps is None else row_sum + seen.unit * self.eps
        slope = row_sum / total
        return slope if self.floor is None else slope * (total > seen.unit * self.floor)

    def text(self, row_sum: str) -> str:
        body = row_sum if self.eps is None else f"{row_sum} + {written(self.eps)}"
        if self.floor is not None:
            body = f"max({body}, {written(self.floor)})"
        return f"detach({body})" if self.detach else body

    @property
    def has_gradient(self) -> bool:
        return not self.detach

    @property
    def ignores_row_scale(self) -> bool:
        return self.floor is None and self.eps is None and not self.detach

    @property
    def fused(self) -> FusedDivisor | None:
        return None if self.floor is not None or self.detach else FusedDivisor("sum", self.eps or 0.0)

    @property
    def positive_for(self) -> Sign:
        if self.floor is not None:
            return Sign.INDEFINITE
        return Sign.POSITIVE if self.eps is None else Sign.NONNEGATIVE


@register
@final
@dataclass(frozen=True, slots=True)
class VisibleKeys(Denominator):
    """t, the number of keys the query can see."""

    notation: ClassVar[str] = "len"

    def divisor(self, seen: Seen) -> Tensor:
        return seen.keys

    def text(self, row_sum: str) -> str:
        return "t"

    @property
    def fused(self) -> FusedDivisor | None:
        return FusedDivisor("count")


@register
@final
@dataclass(frozen=True, slots=True)
class RunningSum(Denominator):
    """max(Σ_{r≤t} exp(g_r), floor), times t with `len`: a learned running sum of its own logits."""

    notation: ClassVar[str] = "running"
    in_log_domain: ClassVar[bool] = True
    argument: ClassVar[Argument | None] = Argument(
        "denominator_gate", symbol="g_r", tokens="key", heads="query", running=True, recipe=Recipe.LINEAR
    )
    floor: float | None = positive(default=None)
    len: bool = flag()

    def divisor(self, seen: Seen) -> Tensor:
        return self.log_divisor(seen).exp()

    def log_divisor(self, seen: Seen) -> Tensor:
        log_sum = seen.argument
        if self.floor is not None:
            log_sum = log_sum.clamp(min=math.log(self.floor))
        log_sum = log_sum.masked_fill(log_sum == -math.inf, 0.0)  # where no token has come yet
        return log_sum + seen.keys.log() if self.len else log_sum

    def text(self, row_sum: str) -> str:
        body = "Σ_r≤t exp(g_r)"
        body = f"({body})" if self.floor is None else f"max({body}, {written(self.floor)})"
        return f"t·{body}" if self.len else body
