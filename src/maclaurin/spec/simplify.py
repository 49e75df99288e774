"""Simpler specs that are equal: each rule is an identity of the algebra, and a law tests it on every spec."""

from __future__ import annotations

from collections.abc import Callable

from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.denominator import FusedDivisor, VisibleKeys

Rule = Callable[[AttentionSpec], AttentionSpec]


def simplified(spec: AttentionSpec) -> AttentionSpec:
    """Apply the rules until none changes the spec."""
    for rule in _RULES:
        simpler = rule(spec)
        if simpler != spec:
            return simplified(simpler)
    return spec


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


_RULES: tuple[Rule, ...] = (_shorter_kernel, _norm_divides_out, _weights_sum_to_length)
