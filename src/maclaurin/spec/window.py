"""Exact keys next to a polynomial tail: the last, the first, and the most attended of the others."""

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

    With `kept` slots, keys that have left the window can stay exact too: those that received the most
    attention in it, a_s = Σ_{s≤u<s+size} p_us, p the softmax over window and sinks, mean over the queries of
    a key-value head. Of two equal scores the later key wins. A key that is not kept when it leaves, or that a
    better one displaces later, never comes back, since its rank can only fall: the rule is causal and needs
    constant memory.

    The others, the tail, weigh κ(x), which approximates e^(x − r); both share numerator and denominator.
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
    def sinks(self) -> int:
        """How many of the first keys are exact."""
        return 0

    @property
    def kept(self) -> int:
        """How many of the keys that have left the window stay exact."""
        return 0

    @property
    def slots(self) -> int:
        """How many exact keys a state holds."""
        return self.size + self.sinks + self.kept

    def log_bias(self, age: Tensor) -> Tensor | None:
        """What is added to the score of an exact key that came `age` tokens ago; None for nothing."""
        return None

    @property
    def bias_text(self) -> str:
        """The bias as text, such as " − 0.1 (t−s)"; empty for none."""
        return ""

    @property
    def has_bias(self) -> bool:
        """Whether it adds something to scores."""
        return type(self).log_bias is not Window.log_bias

    @property
    def is_plain(self) -> bool:
        """Whether there is no bias and no kept key, so that fused programs support the window."""
        return not self.has_bias and self.kept == 0

    @classmethod
    def check_class(cls) -> None:
        has_text, has_bias = cls.bias_text is not Window.bias_text, cls.log_bias is not Window.log_bias
        if has_text != has_bias:
            given, missing = ("log_bias", "bias_text") if has_bias else ("bias_text", "log_bias")
            raise SpecError(
                f"the window {cls.__qualname__} defines {given} and not {missing}: its formula and weights "
                "would differ. Define both or neither."
            )

    @property
    def text(self) -> str:
        """Which keys are exact."""
        if not self.kept:
            return self._near_text
        return f"{self._near_text} and the {self.kept} with the largest score a of those before"

    @property
    def _near_text(self) -> str:
        first = f" and the first {self.sinks}" if self.sinks else ""
        return f"the last {self.size} keys{first}"

    @property
    def score_text(self) -> tuple[str, str]:
        """The score that decides which keys are kept: its formula, and its meaning in words."""
        meaning = (
            f"over the queries u with s in their window, p the softmax over {self._near_text}, "
            "mean over the queries of a key-value head"
        )
        return "a_s = Σ_u p_us", meaning

    def check(self, spec: AttentionSpec) -> None:
        kernel = spec.kernel
        for name, least in (("size", 1), ("sinks", 0), ("kept", 0)):
            number = getattr(self, name)
            if not isinstance(number, int) or number < least:
                raise SpecError(
                    f"{self} has {name} = {number!r}: the {name} of a window is a whole number ≥ {least}.",
                    place=self,
                )
        if self.kept and self.has_bias:
            raise SpecError(
                f"{self} has a bias by the age of a key and keeps keys, whose age is not stored: "
                "leave out one of the two.",
                place=self,
            )
        if kernel.expands_exp:
            return
        if kernel.is_exact_exp:
            raise SpecError(
                f"{kernel} is exact for every key, so a window added to it changes nothing.\n"
                f"Use taylor(2,about=mean)+{self}/sum, or poly(0)+{self}/sum for the "
                "window alone.",
                place=self,
            )
        raise SpecError(
            f"+{self} keeps keys at their exact weight e^x, and {kernel} does not approximate e^x, so the "
            f"two cannot share a row.\nUse taylor(N), hermite(N) or poly(…) as the tail.",
            place=self,
        )


@register
@final
@dataclass(frozen=True, slots=True)
class SlidingWindow(Window):
    """The last `size` keys, the first `sinks`, and `kept` of those between, without a bias."""

    notation: ClassVar[str] = "window"
    size: int = whole(at_least=1)  # type: ignore[assignment]
    sinks: int = whole(default=0, at_least=0)  # type: ignore[assignment]
    kept: int = whole(default=0, at_least=0)  # type: ignore[assignment]
