"""Gates: learned numbers per head and token that multiply values, memory or rows.

    y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s )

i is a ValueGate, f a DecayGate, o and p are RowGates before and after the norm. A gate declares the tensor
it takes (`Argument`) and what it does with it; `attention` takes that tensor under the argument's name, and
a layer makes it from the token by the argument's recipe.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from maclaurin.errors import SpecError
from maclaurin.spec.part import Argument, Part, Recipe, check_argument, register

if TYPE_CHECKING:
    from torch import Tensor


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

    @property
    def text(self) -> str:
        """The gate's factor in the formula."""
        return self.argument.symbol


@dataclass(frozen=True, slots=True)
class ValueGate(Gate):
    """Acts on each value before it is summed: v_s → gate(v_s)."""

    stage: ClassVar[int] = 2
    #: whether it is v·gate, which fused programs can do
    multiplies: ClassVar[bool] = False

    @classmethod
    def check_class(cls) -> None:
        check_argument(cls, getattr(cls, "argument", None), tokens="key", heads="key", per_channel=True)

    @abstractmethod
    def on_values(self, v: Tensor, gate: Tensor) -> Tensor:
        """The gated values, for v [B, K, S, e] and the gate [B, K, S, 1] or [B, K, S, e]."""


@dataclass(frozen=True, slots=True)
class DecayGate(Gate):
    """Multiplies the whole memory by f_t before token t is added: S_t = f_t S_{t−1} + …"""

    stage: ClassVar[int] = 3

    @classmethod
    def check_class(cls) -> None:
        check_argument(cls, getattr(cls, "argument", None), tokens="key", heads="key", per_channel=False)

    @abstractmethod
    def log_decay(self, gate: Tensor) -> Tensor:
        """ln f_t from the argument, of the same shape."""

    @property
    def where_text(self) -> str:
        """What f_r is in terms of the argument."""
        return ""


@dataclass(frozen=True, slots=True)
class RowGate(Gate):
    """Acts on each finished row, before the norm or after it: y_t → gate(y_t)."""

    stage: ClassVar[int] = 5
    #: whether it is y·gate with a positive gate: a norm per head after it then cancels a scalar gate
    multiplies: ClassVar[bool] = False

    @classmethod
    def check_class(cls) -> None:
        check_argument(cls, getattr(cls, "argument", None), tokens="query", heads="query", per_channel=True)

    @abstractmethod
    def on_rows(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gated rows, for y [B, T, H, e] and the gate [B, T, H, 1] or [B, T, H, e]."""


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

    def log_decay(self, gate: Tensor) -> Tensor:
        return gate


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
