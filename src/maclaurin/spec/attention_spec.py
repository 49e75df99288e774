"""AttentionSpec: one variant of attention as a tuple of parts, in the order of its formula."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from maclaurin.errors import SpecError
from maclaurin.spec.denominator import Denominator, FusedDivisor, VisibleKeys
from maclaurin.spec.gate import DecayGate, Gate, RowGate, ValueGate
from maclaurin.spec.kernel import Kernel
from maclaurin.spec.norm import Norm
from maclaurin.spec.part import Argument, Part, registered
from maclaurin.spec.polynomials import number_of_multisets
from maclaurin.spec.window import Window

#: how a notation reads, for error messages
ORDER_OF_PARTS = (
    "a spec reads: kernel + window * in * forget / denominator * out / norm * out; "
    "everything except the kernel is optional"
)


@final
@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s )

    kernel κ, value gates i, decay gates f, denominator 1/G, row gates o before the norm N and p after it.
    `parts` holds them in that order; the notation writes them left to right:
    `exp(clamp=5)*in/len*out/layer`. The other fields give the same parts by role.
    """

    parts: tuple[Part, ...]
    kernel: Kernel = field(init=False, repr=False, compare=False)
    window: Window | None = field(init=False, repr=False, compare=False)
    value_gates: tuple[ValueGate, ...] = field(init=False, repr=False, compare=False)
    decay_gates: tuple[DecayGate, ...] = field(init=False, repr=False, compare=False)
    denominator: Denominator | None = field(init=False, repr=False, compare=False)
    gates_before_norm: tuple[RowGate, ...] = field(init=False, repr=False, compare=False)
    norm: Norm | None = field(init=False, repr=False, compare=False)
    gates_after_norm: tuple[RowGate, ...] = field(init=False, repr=False, compare=False)
    #: every tensor the parts take besides q, k and v, in the order of the formula
    arguments: tuple[Argument, ...] = field(init=False, repr=False, compare=False)
    #: its notation, and the hash of its parts, computed once: specs are keys of every cache
    notation: str = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)
    #: whether it is the limit of specs with a finite state: exp without a clamp
    has_series: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = in_formula_order(self.parts)
        norm_at = next((i for i, p in enumerate(parts) if isinstance(p, Norm)), len(parts))
        row_gates = [(i, p) for i, p in enumerate(parts) if isinstance(p, RowGate)]
        derived: dict[str, Any] = {
            "parts": parts,
            "kernel": _only(parts, Kernel),
            "window": _only(parts, Window),
            "value_gates": tuple(p for p in parts if isinstance(p, ValueGate)),
            "decay_gates": tuple(p for p in parts if isinstance(p, DecayGate)),
            "denominator": _only(parts, Denominator),
            "gates_before_norm": tuple(p for i, p in row_gates if i < norm_at),
            "norm": _only(parts, Norm),
            "gates_after_norm": tuple(p for i, p in row_gates if i > norm_at),
            "arguments": tuple(a for p in parts for a in p.arguments),
            "notation": "".join(f"{p.mark}{p}" for p in parts),
            "_hash": hash(parts),
            "has_series": parts[0].truncated(0) is not None,  # type: ignore[attr-defined]
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        _refuse_parts_without_role(self)
        _refuse_arguments_taken_twice(self)
        for part in parts:
            part.check(self)

    @classmethod
    def of(cls, *parts: Part | None) -> AttentionSpec:
        """A spec of these parts, kernel first; None is skipped."""
        return cls(tuple(p for p in parts if p is not None))

    def __hash__(self) -> int:
        return self._hash

    # --------------------------------------------------------------------- notation and JSON

    def __str__(self) -> str:
        return self.notation

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"parts": [{"family": "kernel", "name": "taylor", "order": 2}, …]}."""
        return {"parts": [{"family": p.family, **p.to_dict()} for p in self.parts]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """The inverse of to_dict; unknown keys are errors."""
        if set(data) != {"parts"} or not isinstance(data["parts"], list | tuple):
            raise SpecError(f"a spec as data is {{'parts': [...]}} and nothing else, got {data!r}.")
        return cls(tuple(_part_from_dict(each) for each in data["parts"]))

    def to_json(self) -> str:
        """to_dict as a JSON string."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> AttentionSpec:
        """The inverse of to_json."""
        return cls.from_dict(json.loads(text))

    # --------------------------------------------------------------------- changed copies

    def replaced(self, old: Part, new: Part | None) -> AttentionSpec:
        """The spec with part `old` replaced by `new`, or removed if `new` is None."""
        if old not in self.parts:
            raise SpecError(f"{self} has no part {old}.")
        at = self.parts.index(old)
        between = () if new is None else (new,)
        return AttentionSpec((*self.parts[:at], *between, *self.parts[at + 1 :]))

    def with_kernel(self, kernel: Kernel) -> AttentionSpec:
        """The spec with another kernel."""
        return self.replaced(self.kernel, kernel)

    def simplified(self) -> AttentionSpec:
        """An equal spec with fewer or simpler parts, or this one: the rules below, until none changes it."""
        for rule in _RULES:
            simpler = rule(self)
            if simpler != self:
                return simpler.simplified()
        return self

    # ------------------------------------------------------------------------- inputs

    @property
    def gates(self) -> tuple[str, ...]:
        """The names of the tensors `attention` must be given, in the order of the formula."""
        return tuple(argument.name for argument in self.arguments)

    def may_be_per_channel(self, argument: Argument) -> bool:
        """Whether the argument may have one number per channel: not that of a factor before a norm.

        A norm cancels such a factor, which is one number per head. Other gates before it are not cancelled.
        """
        factors = (gate.argument for gate in self.gates_before_norm if gate.multiplies)
        return argument.per_channel and not (self.norm is not None and argument in factors)

    @property
    def running_argument(self) -> Argument | None:
        """The argument whose running log-sum the state holds."""
        return next((a for a in self.arguments if a.running), None)

    @property
    def needs_row_sum(self) -> bool:
        """Whether the sum of weights is computed: to divide by it, or to know the row's moments."""
        divides = self.denominator is not None and self.denominator.uses_row_sum
        return divides or self.kernel.depends_on_row

    @property
    def ignores_row_scale(self) -> bool:
        """Whether a positive factor on a whole row of weights leaves the answer unchanged."""
        row_sum = self.denominator is not None and self.denominator.ignores_row_scale
        return row_sum or self.norm_cancels_row_scale

    @property
    def rows_are_means(self) -> bool:
        """Whether rows may be divided by their plain sum: that is the denominator, or a norm cancels it."""
        divisor = None if self.denominator is None else self.denominator.fused
        return divisor == FusedDivisor("sum") or self.norm_cancels_row_scale

    @property
    def has_order_of_time(self) -> bool:
        """Whether it is defined only for causal attention: each query sees the keys up to its own."""
        return len(self.decay_gates) > 0 or self.window is not None

    # --------------------------------------------------------------------- recurrent form

    @property
    def orders(self) -> tuple[int, ...]:
        """The orders n of the Kronecker states k^⊗n vᵀ; empty without a finite recurrent form."""
        return self.kernel.orders

    @property
    def highest_order(self) -> int:
        """The largest of the orders, 0 if there are none."""
        return max(self.kernel.orders, default=0)

    @property
    def has_finite_state(self) -> bool:
        """Whether it runs as a recurrent network with a state of fixed size."""
        return self.kernel.has_finite_state

    def features(self, d: int) -> int:
        """Rows of the state for keys of size d: the distinct entries of φ(k)^⊗n, for all orders n."""
        return self.features_of_mapped(self.kernel.key_size(d))

    def features_of_mapped(self, size: int) -> int:
        """Rows of the state for φ(k) of this size: Σ_n C(size+n−1, n)."""
        if not self.has_finite_state:
            raise SpecError(f"{self} has no finite recurrent form, so its state has no size.")
        return sum(number_of_multisets(size, n) for n in self.orders)

    def state_size(self, d: int, e: int) -> int:
        """Numbers held per sequence and key-value head, for key size d and value size e.

        Counts the moments, the exact keys and values, and the scores that decide which keys are kept. A state
        also holds a count of tokens and about one number per gate.
        """
        return self.moments_size(d, e) + self.exact_size(d, e)

    def moments_size(self, d: int, e: int) -> int:
        """Numbers in the moments."""
        return self.features(d) * (e + int(self.needs_row_sum))

    def exact_size(self, d: int, e: int) -> int:
        """Numbers in the exact keys and values, and in the scores that decide which keys are kept."""
        return self.window.slots * (d + e) + self._scores if self.window else 0

    @property
    def _scores(self) -> int:
        return self.window.size + self.window.kept if self.window and self.window.kept else 0

    def state_bytes(self, d: int, e: int, *, own: int, working: int) -> int:
        """Bytes of the state: `own` per number in the inputs' dtype, `working` in the working dtype.

        Exact keys and values keep the inputs' dtype, unless a gate changes the values; the rest is in the
        working dtype.
        """
        slots = self.window.slots if self.window else 0
        keys = slots * (own * d + (working if self.value_gates else own) * e)
        return working * (self.moments_size(d, e) + self._scores) + keys

    @property
    def irreversible_part(self) -> Part | None:
        """The part that discards what a rollback of the state would need."""
        return self.decay_gates[0] if self.decay_gates else self.window

    # ------------------------------------------------------------------------- what cancels

    @property
    def denominator_can_vanish(self) -> bool:
        """Whether some row makes the denominator exactly zero."""
        return self.denominator is not None and self.denominator.can_vanish(self)

    @property
    def cancelled_parts(self) -> tuple[Part, ...]:
        """The parts that the norm cancels: factors with nothing but factors between them and the norm."""
        if self.norm is None or not self.norm.divides_out_row_scale:
            return ()
        gates: list[RowGate] = []
        for gate in reversed(self.gates_before_norm):
            if not gate.multiplies:
                return tuple(reversed(gates))
            gates.append(gate)
        divisor = [self.denominator] if self.denominator and not self.denominator_can_vanish else []
        return (*divisor, *reversed(gates))

    @property
    def norm_cancels_row_scale(self) -> bool:
        """Whether the norm cancels a positive factor per row: the gates before it are factors too."""
        if self.norm is None or not self.norm.divides_out_row_scale:
            return False
        return all(gate.multiplies for gate in self.gates_before_norm)

    # ------------------------------------------------------------------------ its formula

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


# ----------------------------------------------------------------------------------- its parts

_AFTER_NORM = Norm.stage + 1
_ON_KEYS = (ValueGate.stage, DecayGate.stage)


def in_formula_order(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts, with value gates before decay gates; a SpecError where they do not make a spec."""
    if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], Kernel):
        raise SpecError(f"a spec is a tuple of parts that begins with a kernel, not {parts!r}.")
    stages: list[int] = []
    for at, part in enumerate(parts):
        if not isinstance(part, Part):
            raise SpecError(f"a spec is made of parts, and {part!r} is not a part.")
        if not isinstance(part, Gate) and any(p.family == part.family for p in parts[:at]):
            raise SpecError(f"a spec has one {part.family}, and this is a second.", place=part)
        stage = _AFTER_NORM if isinstance(part, RowGate) and Norm.stage in stages else part.stage
        if any(before > stage for before in stages if {before, stage} != set(_ON_KEYS)):
            raise SpecError(f"this {part.family} is out of order; {ORDER_OF_PARTS}.", place=part)
        stages.append(stage)
    order = sorted(range(len(parts)), key=lambda at: stages[at])
    return tuple(parts[at] for at in order)


def _only(parts: tuple[Part, ...], family: type[Part]) -> Any:
    return next((p for p in parts if isinstance(p, family)), None)


def _refuse_parts_without_role(spec: AttentionSpec) -> None:
    """Raise if a part appears in the formula but no form applies it."""
    one = (spec.kernel, spec.window, spec.denominator, spec.norm)
    gates = (*spec.value_gates, *spec.decay_gates, *spec.gates_before_norm, *spec.gates_after_norm)
    for part in spec.parts:
        if not any(part is each for each in (*one, *gates)):
            raise SpecError(
                f"{part.mark}{part} is not a ValueGate, DecayGate or RowGate, so no form would apply it.",
                place=part,
            )


def _refuse_arguments_taken_twice(spec: AttentionSpec) -> None:
    names = [argument.name for argument in spec.arguments]
    for name in names:
        if names.count(name) < 2:
            continue
        gates = [p for p in spec.parts if any(a.name == name for a in p.arguments)]
        both = " and ".join(f"{p.mark}{p}" for p in gates)
        reason = f"{spec} takes {name} in {both}, but there is only one {name}."
        if gates[0] in spec.cancelled_parts:
            reason += "\nThe norm cancels the first one: keep the one after it."
        raise SpecError(reason, place=gates[0])


def _part_from_dict(data: Any) -> Part:
    if not isinstance(data, Mapping) or "family" not in data:
        raise SpecError(f"a part as data is an object with a family and a name, not {data!r}.")
    known = registered(data["family"])
    name = data.get("name")
    if not isinstance(name, str) or name not in known:
        raise SpecError(f"there is no {data['family']} {name!r}; choose from {', '.join(sorted(known))}.")
    return known[name].from_dict({k: v for k, v in data.items() if k != "family"})


# --------------------------------- simpler specs that are equal: identities, which a law tests on every spec


def _shorter_kernel(spec: AttentionSpec) -> AttentionSpec:
    """poly(1,1,0.5) is taylor(2), power(1) is linear(identity).

    With a window, the tail must still approximate e^(x − r) with the same r.
    """
    kernel = spec.kernel.simplified()
    moves = kernel.reference_text != spec.kernel.reference_text or not kernel.expands_exp
    return spec if spec.window and moves else spec.with_kernel(kernel)


def _norm_divides_out(spec: AttentionSpec) -> AttentionSpec:
    """A norm per head ignores a positive factor per row: the denominator and the gate before it."""
    for part in spec.cancelled_parts:
        spec = spec.replaced(part, None)
    return spec


def _weights_sum_to_length(spec: AttentionSpec) -> AttentionSpec:
    """Where the weights sum to the number of keys, /sum is /len; a decay gate would change the sum."""
    counts = spec.kernel.weights_count_keys and not spec.decay_gates and spec.window is None
    denominator = spec.denominator
    plain_sum = denominator is not None and denominator.fused == FusedDivisor("sum")
    return spec.replaced(denominator, VisibleKeys()) if counts and plain_sum and denominator else spec


_RULES: tuple[Callable[[AttentionSpec], AttentionSpec], ...] = (
    _shorter_kernel,
    _norm_divides_out,
    _weights_sum_to_length,
)
