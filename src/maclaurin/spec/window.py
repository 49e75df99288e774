"""Exact keys beside a polynomial tail."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from maclaurin.errors import SpecError
from maclaurin.spec.part import Part, register, whole

if TYPE_CHECKING:
    from torch import Tensor

    from maclaurin.spec.attention_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Window(Part):
    """The last `size` keys, the current one included, and the first `sinks` weigh e^(x − r + bias) exactly.

    The others, the tail, weigh κ(x), which stands for e^(x − r); both share numerator and denominator.
    With about=mean, r is the mean score over the keys in the tail.
    """

    family: ClassVar[str] = "window"
    mark: ClassVar[str] = "+"
    stage: ClassVar[int] = 1

    @property
    @abstractmethod
    def size(self) -> int:
        """How many of the last keys are exact, at least 1."""

    @property
    @abstractmethod
    def sinks(self) -> int:
        """How many of the first keys are exact."""

    def log_bias(self, age: Tensor) -> Tensor | None:
        """What is added to the score of an exact key that came `age` tokens ago; None for nothing."""
        return None

    @property
    def bias_text(self) -> str:
        """The bias as text, such as " − 0.1 (t−s)"; empty for none."""
        return ""

    @property
    def is_plain(self) -> bool:
        """Whether there is no bias, so that fused programs know the window."""
        return self.bias_text == ""

    @property
    def text(self) -> str:
        """Which keys are exact."""
        first = f" and the first {self.sinks}" if self.sinks else ""
        return f"the last {self.size} keys{first}"

    def check(self, spec: AttentionSpec) -> None:
        kernel = spec.kernel
        if kernel.expands_exp:
            return
        if kernel.is_exact_exp:
            raise SpecError(
                f"{kernel} is exact for every key, so a window beside it changes nothing.\n"
                f"Use taylor(2,about=mean)+{self}/sum, or poly(0)+{self}/sum for the "
                "window alone.",
                place=self,
            )
        raise SpecError(
            f"+{self} keeps keys at their exact weight e^x, and {kernel} does not stand "
            f"for e^x, so the two cannot share a row.\nUse taylor(N), hermite(N) or poly(…) as the tail.",
            place=self,
        )


@register
@final
@dataclass(frozen=True, slots=True)
class SlidingWindow(Window):
    """The last `size` keys and the first `sinks`, without a bias."""

    notation: ClassVar[str] = "window"
    size: int = whole(at_least=1)  # type: ignore[assignment]
    sinks: int = whole(default=0, at_least=0)  # type: ignore[assignment]
