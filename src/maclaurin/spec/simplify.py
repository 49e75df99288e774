"""Equal specs: each rule is an identity of the algebra, tested as a law for every spec it touches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.denominator import RowSum, VisibleKeys
from maclaurin.spec.kernel import Hermite, Taylor

Rule = Callable[[AttentionSpec], AttentionSpec]


def simplified(spec: AttentionSpec) -> AttentionSpec:
    """Apply the rules until none changes the spec."""
    for rule in _RULES:
        simpler = rule(spec)
        if simpler != spec:
            return simplified(simpler)
    return spec


def _shorter_kernel(spec: AttentionSpec) -> AttentionSpec:
    """poly(1,1,0.5) is taylor(2), power(1) is linear(identity): but a window needs its tail as is."""
    kernel = spec.kernel.simplified()
    return spec if spec.window and not kernel.expands_exp else _with(spec, kernel=kernel)


def _constant_needs_no_point(spec: AttentionSpec) -> AttentionSpec:
    """taylor(0) has no term that sees where it is expanded; beside a window the exact keys do."""
    if spec.kernel == Taylor(0, "mean") and spec.window is None:
        return _with(spec, kernel=Taylor(0))
    return spec


def _norm_divides_out(spec: AttentionSpec) -> AttentionSpec:
    """A norm per head ignores a positive factor per row: the denominator and the gate before it."""
    for part in spec.cancelled_parts:
        gone = {"output_gate": False} if part == "out" else {"denominator": None}
        spec = _with(spec, **gone)
    return spec


def _constant_weights_sum_to_length(spec: AttentionSpec) -> AttentionSpec:
    """Where the weights sum to the number of keys, /sum is /len; a forget gate would decay the sum."""
    kernel = spec.kernel
    counts = isinstance(kernel, Hermite) or (isinstance(kernel, Taylor) and kernel.order == 0)
    if counts and spec.denominator == RowSum() and not spec.forget_gate and spec.window is None:
        return _with(spec, denominator=VisibleKeys())
    return spec


def _first_hermite_is_centred_taylor(spec: AttentionSpec) -> AttentionSpec:
    """taylor(1,about=mean)/sum: its weights 1 + x − x̄ sum to the number of keys, as hermite(1)'s."""
    if spec.kernel == Taylor(1, "mean") and spec.window is None:
        return _with(spec, kernel=Hermite(1))
    return spec


def _with(spec: AttentionSpec, **changes: object) -> AttentionSpec:
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


_RULES: tuple[Rule, ...] = (
    _shorter_kernel,
    _constant_needs_no_point,
    _norm_divides_out,
    _first_hermite_is_centred_taylor,
    _constant_weights_sum_to_length,
)
