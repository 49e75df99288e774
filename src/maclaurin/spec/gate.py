"""Gates: learned numbers per head and token that act on values, memory or rows.

    y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s )

i is a ValueGate, f a DecayGate, o and p are RowGates before and after the norm. A gate declares the tensor
it takes (`Argument`), what it does with it, and how that is written (`text`). `attention` takes the tensor
under the argument's name, and a layer makes it from the token by the argument's recipe.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from maclaurin.errors import SpecError
from maclaurin.spec.part import Argument, Part, Recipe, check_argument, register

if TYPE_CHECKING:
    from torch import Tensor

    from maclaurin.spec.attention_spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Gate(Part):
    """A part written `*name` that takes one tensor; one of the three kinds below."""

    family: ClassVar[str] = "gate"
    mark: ClassVar[str] = "*"
    argument: ClassVar[Argument]

    @classmethod
    def declared_argument(cls) -> Argument | None:
        return cls.argument

    @classmethod
    def check_class(cls) -> None:
        raise SpecError(
            f"the gate {cls.__qualname__} acts on nothing: subclass ValueGate (it acts on values), "
            "DecayGate (on the memory) or RowGate (on finished rows) instead of Gate."
        )


@dataclass(frozen=True, slots=True)
class ValueGate(Gate):
    """Acts on each value before it is summed: v_s → gate(v_s)."""

    stage: ClassVar[int] = 2
    #: whether it is v·gate, which fused programs can do; another gate defines `text`
    multiplies: ClassVar[bool] = False

    @classmethod
    def check_class(cls) -> None:
        check_argument(cls, getattr(cls, "argument", None), tokens="key", heads="key", per_channel=True)
        if not cls.multiplies and cls.text is ValueGate.text:
            raise SpecError(_without_text(cls, "on_values", "v"))

    def text(self, v: str) -> str:
        """The gated value as text, given the text of the value."""
        return f"{self.argument.symbol} {v}"

    @abstractmethod
    def on_values(self, v: Tensor, gate: Tensor) -> Tensor:
        """The gated values, for v [B, K, S, e] and the gate [B, K, S, 1] or [B, K, S, e]."""


@dataclass(frozen=True, slots=True)
class DecayGate(Gate):
    """Multiplies the whole memory by f_t before token t is added: S_t = f_t S_{t−1} + …

    Its argument is ln f_t, and the symbol of the argument stands for f_t. A gate that takes another tensor
    defines `log_decay` and `text`; the symbol then stands for that tensor.
    """

    stage: ClassVar[int] = 3

    @classmethod
    def check_class(cls) -> None:
        check_argument(cls, getattr(cls, "argument", None), tokens="key", heads="key", per_channel=False)
        has_text, has_decay = cls.text is not DecayGate.text, cls.log_decay is not DecayGate.log_decay
        if has_text != has_decay:
            given, missing = ("log_decay", "text") if has_decay else ("text", "log_decay")
            raise SpecError(
                f"the gate {cls.__qualname__} defines {given} and not {missing}: its formula and its decay "
                "would differ. Define both, or neither for a gate whose tensor is ln f."
            )

    def log_decay(self, gate: Tensor) -> Tensor:
        """ln f_t from the argument, of the same shape."""
        return gate

    @property
    def takes_log(self) -> bool:
        """Whether its argument is ln f itself."""
        return type(self).log_decay is DecayGate.log_decay

    def text(self, g: str) -> str:
        """f as text, given the symbol of the argument."""
        return g


@dataclass(frozen=True, slots=True)
class RowGate(Gate):
    """Acts on each finished row, before the norm or after it: y_t → gate(y_t)."""

    stage: ClassVar[int] = 5
    #: whether it is y·gate with a positive gate, which a norm per head after it cancels; another gate
    #: defines `text`
    multiplies: ClassVar[bool] = False

    @classmethod
    def check_class(cls) -> None:
        check_argument(cls, getattr(cls, "argument", None), tokens="query", heads="query", per_channel=True)
        if not cls.multiplies and cls.text is RowGate.text:
            raise SpecError(_without_text(cls, "on_rows", "y"))

    def text(self, y: str) -> str:
        """The gated row as text, given the text of the row."""
        return f"{self.argument.symbol} {y}"

    def check(self, spec: AttentionSpec) -> None:
        """A factor before a norm is one number per head: that is what the norm cancels."""
        if self.argument.recipe is Recipe.SILU and not spec.may_be_per_channel(self.argument):
            raise SpecError(
                f"*{self} multiplies rows before the norm, where a gate has one number per head, but a layer "
                f"makes {self.argument.name} with one per channel (Recipe.SILU).\n"
                f"Put it after the norm: /{spec.norm}*{self}.",
                place=self,
            )

    @abstractmethod
    def on_rows(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gated rows, for y [B, T, H, e] and the gate [B, T, H, 1] or [B, T, H, e]."""


def _without_text(gate: type[Gate], method: str, u: str) -> str:
    return (
        f"the gate {gate.__qualname__} has no formula: define text(self, {u}), which writes what {method} "
        f'computes, such as f"{{{u}}} + b_t"; or set multiplies = True if it is {u} times a positive gate.'
    )


@register
@final
@dataclass(frozen=True, slots=True)
class InputGate(ValueGate):
    """i_s v_s"""

    notation: ClassVar[str] = "in"
    multiplies: ClassVar[bool] = True
    argument: ClassVar[Argument] = Argument("input_gate", symbol="i_s", tokens="key", heads="key")

    def on_values(self, v: Tensor, gate: Tensor) -> Tensor:
        return v * gate


@register
@final
@dataclass(frozen=True, slots=True)
class ForgetGate(DecayGate):
    """f_t, passed as its logarithm."""

    notation: ClassVar[str] = "forget"
    argument: ClassVar[Argument] = Argument(
        "log_forget", symbol="f_r", tokens="key", heads="key", recipe=Recipe.LOG_SIGMOID
    )


@register
@final
@dataclass(frozen=True, slots=True)
class OutputGate(RowGate):
    """o_t y_t, one number per head, or per channel where no norm follows."""

    notation: ClassVar[str] = "out"
    multiplies: ClassVar[bool] = True
    argument: ClassVar[Argument] = Argument(
        "output_gate", symbol="o_t", tokens="query", heads="query", per_channel=True
    )

    def on_rows(self, y: Tensor, gate: Tensor) -> Tensor:
        return y * gate
