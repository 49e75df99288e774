"""AttentionSpec: one variant of attention as one small piece of frozen data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from maclaurin.errors import SpecError
from maclaurin.spec.denominator import Denominator, RowSum, RunningSum
from maclaurin.spec.kernel import Exp, Kernel
from maclaurin.spec.multisets import number_of_multisets
from maclaurin.spec.norm import Norm
from maclaurin.spec.part import Part, registered
from maclaurin.spec.sign import Sign
from maclaurin.spec.window import Window


@final
@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s )

    kernel κ, input gate i, forget gate f, denominator 1/G, output gate o before the norm N or
    p after it. Written left to right in that order: `exp(clamp=5)*in/len*out/layer`.
    """

    kernel: Kernel
    window: Window | None = None
    input_gate: bool = False
    forget_gate: bool = False
    denominator: Denominator | None = None
    output_gate: bool = False
    norm: Norm | None = None
    gate_after_norm: bool = False

    def __post_init__(self) -> None:
        _refuse_wrong_types(self)
        _refuse_row_sum_that_changes_sign(self)
        _refuse_visible_shift(self)
        _refuse_window_without_exp(self)
        _refuse_two_output_gates(self)

    # --------------------------------------------------------------------- what it is called

    def __str__(self) -> str:
        parts = [str(self.kernel)]
        parts += [f"+{self.window}"] if self.window else []
        parts += ["*in"] if self.input_gate else []
        parts += ["*forget"] if self.forget_gate else []
        parts += [f"/{self.denominator}"] if self.denominator else []
        parts += ["*out"] if self.output_gate else []
        parts += [f"/{self.norm}"] if self.norm else []
        parts += ["*out"] if self.gate_after_norm else []
        return "".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; absent parts are left out."""
        data: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if value:
                data[name] = value.to_dict() if isinstance(value, Part) else value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """The inverse of to_dict; unknown keys are errors."""
        unknown = set(data) - set(cls.__slots__)
        if unknown or "kernel" not in data:
            problem = f"unknown key {sorted(unknown)[0]!r}" if unknown else "no kernel"
            raise SpecError(f"a spec cannot have {problem}; it has {', '.join(cls.__slots__)}.")
        for name in _FAMILIES:
            if name in data and not isinstance(data[name], Mapping):
                raise SpecError(f"{name} of a spec in JSON is an object with a name, not {data[name]!r}.")
        values: dict[str, Any] = {
            k: _part_from_dict(k, v) if isinstance(v, Mapping) else v for k, v in data.items()
        }
        return cls(**values)

    def to_json(self) -> str:
        """to_dict as a JSON string."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> AttentionSpec:
        """The inverse of to_json."""
        return cls.from_dict(json.loads(text))

    # ------------------------------------------------------------------------- what it needs

    @property
    def gates(self) -> tuple[str, ...]:
        """The gate arguments `attention` must be given, in the order of the formula."""
        needed = {
            "input_gate": self.input_gate,
            "log_forget": self.forget_gate,
            "denominator_gate": isinstance(self.denominator, RunningSum),
            "output_gate": self.output_gate or self.gate_after_norm,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    @property
    def output_gate_is_scalar(self) -> bool:
        """Whether the output gate must be one number per head: a norm follows it.

        Where none does, it may also be one number per channel.
        """
        return self.output_gate and self.norm is not None

    @property
    def needs_row_sum(self) -> bool:
        """Whether the sum of weights is computed: to divide by it, or to know the row's moments."""
        return isinstance(self.denominator, RowSum) or self.kernel.depends_on_row

    @property
    def ignores_row_scale(self) -> bool:
        """Whether a positive factor on a whole row of weights leaves the answer as it is."""
        row_sum = isinstance(self.denominator, RowSum) and not self.denominator.sees_row_scale
        norm = self.norm is not None and self.norm.ignores_row_scale and self.norm.per_head
        return row_sum or norm

    # --------------------------------------------------------------------- what it can become

    @property
    def orders(self) -> tuple[int, ...] | None:
        """The orders n of the Kronecker states k^⊗n vᵀ; None without a finite recurrent form."""
        return self.kernel.orders

    @property
    def has_finite_state(self) -> bool:
        """Whether it runs as a recurrent network with a state of fixed size."""
        return self.orders is not None

    @property
    def has_series(self) -> bool:
        """Whether it is the limit of specs with a finite state: exp without a clamp."""
        return isinstance(self.kernel, Exp) and self.kernel.clamp is None

    def features(self, d: int) -> int:
        """Rows of the state for head size d: Σ_n C(d+n−1, n), the distinct entries of k^⊗n."""
        if self.orders is None:
            raise SpecError(f"{self} has no finite recurrent form, so its state has no size.")
        return sum(number_of_multisets(d, n) for n in self.orders)

    def state_size(self, d: int, e: int) -> int:
        """Numbers held per sequence and key-value head, for key size d and value size e.

        Moments and exact keys; beside them a state holds a count, and a number or so per gate.
        """
        columns = e + int(self.needs_row_sum)
        exact = (self.window.size + self.window.sinks) * (d + e) if self.window else 0
        return self.features(d) * columns + exact

    # ------------------------------------------------------------------------- what cancels

    @property
    def denominator_can_vanish(self) -> bool:
        """Whether some row makes the denominator exactly zero.

        A window always holds the current key at a positive weight, and eps lifts the sum too.
        """
        if not isinstance(self.denominator, RowSum):
            return False
        if self.denominator.floor is not None and self.denominator.floor > 0:
            return False
        sign = self.kernel.row_sum_sign
        lifted = self.window is not None or (self.denominator.eps or 0) > 0
        return sign is Sign.INDEFINITE or (sign is Sign.NONNEGATIVE and not lifted)

    @property
    def cancelled_parts(self) -> tuple[str, ...]:
        """The parts that the norm divides out again, as they are written."""
        if self.norm is None or not (self.norm.ignores_row_scale and self.norm.per_head):
            return ()
        cancelled = [str(self.denominator)] if self.denominator and self._positive_divisor else []
        return (*cancelled, "out") if self.output_gate else tuple(cancelled)

    @property
    def _positive_divisor(self) -> bool:
        if not isinstance(self.denominator, RowSum):
            return True
        return not self.denominator_can_vanish

    # ------------------------------------------------------------------------ how it is told

    @property
    def formula(self) -> str:
        """The parallel form, as text."""
        from maclaurin.spec.formula import text_formula

        return text_formula(self)

    @property
    def latex(self) -> str:
        """The parallel form, as LaTeX."""
        from maclaurin.spec.formula import latex_formula

        return latex_formula(self)

    @property
    def recurrence(self) -> str:
        """The recurrent form, as text, or why there is none."""
        from maclaurin.spec.formula import text_recurrence

        return text_recurrence(self)

    def simplified(self) -> AttentionSpec:
        """An equal spec with fewer or simpler parts, or this one."""
        from maclaurin.spec.simplify import simplified

        return simplified(self)


def _part_from_dict(field: str, data: Mapping[str, Any]) -> Part:
    known = registered(field)
    name = data.get("name")
    if not isinstance(name, str) or name not in known:
        raise SpecError(f"there is no {field} {name!r}; known are {', '.join(sorted(known))}.")
    return known[name].from_dict(data)


# ----------------------------------------------------------------------------------- validation

_FAMILIES: dict[str, type[Part]] = {
    "kernel": Kernel,
    "window": Window,
    "denominator": Denominator,
    "norm": Norm,
}


def _refuse_wrong_types(spec: AttentionSpec) -> None:
    for name in spec.__slots__:
        value = getattr(spec, name)
        family = _FAMILIES.get(name)
        if family is None and not isinstance(value, bool):
            raise SpecError(f"{name} of a spec is True or False, not {value!r}.")
        if family is not None and not isinstance(value, family) and (name == "kernel" or value is not None):
            raise SpecError(f"{name} of a spec is a {family.__name__}, not {value!r}.")


def _refuse_row_sum_that_changes_sign(spec: AttentionSpec) -> None:
    den = spec.denominator
    if not isinstance(den, RowSum) or spec.kernel.row_sum_sign is not Sign.INDEFINITE:
        return
    if den.floor is not None and den.floor > 0:
        return
    kernel = spec.kernel
    order = kernel.orders[-1] if kernel.orders else None
    even = [f"{kernel.notation}({n})/sum" for n in _even_neighbours(order)]
    hints = [f"an even order ({', '.join(even)})"] if kernel.notation in ("taylor", "power") else []
    hints += [f"a norm: {kernel}/l2"]
    raise SpecError(
        f"{kernel}/{den} divides by a row sum that can be negative, so it can vanish.\n"
        f"Use {' or '.join(hints)}.",
        place="denominator",
    )


def _even_neighbours(order: int | None) -> list[int]:
    return [] if order is None else [n for n in (order - 1, order + 1) if n > 0]


def _refuse_visible_shift(spec: AttentionSpec) -> None:
    shifted = spec.kernel.depends_on_row and spec.kernel.notation == "taylor"
    if not shifted or spec.ignores_row_scale:
        return
    if isinstance(spec.denominator, RowSum):
        raise SpecError(
            f"{spec.kernel} drops the factor e^x̄ of its row, and /{spec.denominator} sees it.\n"
            f"Use a plain row sum: {spec.kernel}/sum.",
            place="denominator",
        )
    raise SpecError(
        f"{spec.kernel} drops the factor e^x̄ of its row, so it needs a row sum or a norm, "
        f"which do not see it.\nUse {spec.kernel}/sum or {spec.kernel}/l2."
    )


def _refuse_window_without_exp(spec: AttentionSpec) -> None:
    if spec.window is None or spec.kernel.expands_exp:
        return
    if isinstance(spec.kernel, Exp):
        raise SpecError(
            f"{spec.kernel} is exact for every key, so a window beside it changes nothing.\n"
            f"Use taylor(2,about=mean)+{spec.window}/sum, or poly(0)+{spec.window}/sum for the "
            "window alone.",
            place="window",
        )
    raise SpecError(
        f"+{spec.window} keeps keys at their exact weight e^x, and {spec.kernel} does not stand "
        f"for e^x, so the two cannot share a row.\nUse taylor(N), hermite(N) or poly(…) as the tail.",
        place="window",
    )


def _refuse_two_output_gates(spec: AttentionSpec) -> None:
    if spec.output_gate and spec.gate_after_norm:
        raise SpecError(
            f"{spec} has an output gate before and after the norm, and there is one output_gate.\n"
            "The norm divides the first one out again: keep the one after it.",
            place="output_gate",
        )
    if spec.gate_after_norm and spec.norm is None:
        raise SpecError("a gate after the norm needs a norm; without one write *out before it.")
