"""Polynomial kernels, and σ, on the fused quadratic program triton/quadratic_polynomial.py.

The program divides by the row sum, by the number of visible keys, or not at all; the rest of a spec (other
denominators, gates, norms) is applied to its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.state import State
from maclaurin.forms.stream import unlimited_log_decay
from maclaurin.forms.tracing import without_autocast
from maclaurin.programs.custom_operator import operator, present
from maclaurin.programs.fused_rows import (
    are_operands,
    finish_rows,
    operands,
    over_denominator,
    refuse_denominator,
    refuse_features,
    refuse_tensors,
    row_divisor,
    rows_are_divided,
    rows_are_final,
)
from maclaurin.programs.program import Call, Cost, Program, Run, dense_flops, first_reason
from maclaurin.spec import AttentionSpec

#: Horner's rule is unrolled, and no higher order was measured
_HIGHEST_ORDER = 12
#: how much longer a forward pass with a decay gate takes than taylor(2) (docs/LOG.md)
_GATED = 1.3


class QuadraticPolynomial(Program):
    """Σ cₙ xⁿ or σ(x + b) for every pair of query and key."""

    name = "quadratic polynomial"
    backend = "triton"
    form = Form.PARALLEL
    reads_packed = True

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        return first_reason(
            lambda: _refuse_weights(spec),
            lambda: _refuse_packed(spec) if call.packing is not None else None,
            lambda: "it carries no state" if call.carries_state else None,
            lambda: refuse_denominator(spec),
            lambda: refuse_features(spec, call.inputs.q.dtype),
            lambda: refuse_tensors(call),
        )

    def cost(self, call: Call) -> Cost:
        flops = dense_flops(call) / (2 if call.causal else 1)
        return Cost(_GATED * flops if call.spec.decay_gates else flops, 0.0, 5, 0.0)

    def prepared(self, call: Call) -> Run:
        spec, weight = call.spec, call.spec.kernel.fused
        assert weight is not None
        return _Pairs(
            tuple(map(float, weight.coefficients)),
            weight.function == "sigmoid",
            *row_divisor(spec),
            rows_are_final(spec, call.inputs.q.dtype),
            are_operands(spec, call.inputs),
        ).run


class _Pairs(NamedTuple):
    """What a call needs from its spec and its tensors' layout."""

    coefficients: tuple[float, ...]
    sigmoid: bool
    divisor: str
    eps: float
    is_final: bool
    as_given: bool

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        spec, inputs = call.spec, call.inputs
        decay = unlimited_log_decay(spec, inputs)
        with without_autocast(call.device):
            q, k, v = inputs[:3] if self.as_given else operands(spec, inputs)
            y, *_ = polynomial_attention(
                q,
                k,
                v,
                decay,
                None if call.packing is None else call.packing.cuts,
                [c * call.scale**n for n, c in enumerate(self.coefficients)],
                self.divisor,
                self.eps,
                call.causal,
                self.sigmoid,
                self.is_final,
            )
            if self.is_final:
                return y, None
            y, _ = over_denominator(spec, inputs, y, call.causal)
            return finish_rows(spec, y, inputs.gates, inputs.q.dtype), None


def _refuse_packed(spec: AttentionSpec) -> str | None:
    """Why packed sequences of this spec are not supported; None if they are."""
    if spec.decay_gates:
        return "packed sequences with a decay gate are not supported"
    return None if rows_are_divided(spec) else f"{spec.denominator} is counted along a row"


def _refuse_weights(spec: AttentionSpec) -> str | None:
    weight = spec.kernel.fused
    if weight is None or weight.function == "exp":
        return "it supports only polynomials of the score, or its sigmoid"
    if weight.about_mean:
        return "it supports only polynomials that are the same for every row"
    if weight.function == "polynomial" and not len(spec.orders) > 0:
        return "poly(0) has no weights to compute"
    if len(weight.coefficients) - 1 > _HIGHEST_ORDER:
        return f"it supports orders up to {_HIGHEST_ORDER}"
    return "it does not support a window" if spec.window is not None else None


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::polynomial_attention")
def polynomial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    cuts: Tensor | None,
    coefficients: Sequence[float],
    divisor: str,
    eps: float,
    causal: bool,
    sigmoid: bool,
    narrow: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Σ_s w_ts v_s / D_t [B, T, H, e] and D [B, H, T] in fp32, with w = Σ_n c_n (q·k)ⁿ or σ of it.

    `log_decay` [B, K, T] is ln f of a decay gate: w is multiplied by f_{s+1} … f_t.
    `cuts` [n + 1]: n sequences are packed into one row; s and t belong to the same one and count within it.
    `narrow`: y in bf16, and then its rounding error for the backward pass; else that is None.
    """
    from maclaurin.programs.triton import quadratic_polynomial as program

    call = program.Call(tuple(coefficients), divisor, eps, causal, sigmoid, narrow)
    return program.forward(q, k, v, call, log_decay, cuts)


@operator("maclaurin::polynomial_attention_backward")
def polynomial_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    rest: Tensor | None,
    z: Tensor,
    log_decay: Tensor | None,
    cuts: Tensor | None,
    coefficients: Sequence[float],
    divisor: str,
    causal: bool,
    sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, and the gradient of the log decay gate, if there is one."""
    from maclaurin.programs.triton import quadratic_polynomial as program

    call = program.Call(tuple(coefficients), divisor, 0.0, causal, sigmoid)
    return program.backward(dy, q, k, v, y, present(rest), z, call, log_decay, cuts)


@polynomial_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    batch, tokens, heads, _size = q.shape
    narrow = call[-1]
    y = v.new_empty(batch, tokens, heads, v.shape[3], dtype=torch.bfloat16 if narrow else torch.float32)
    rest = torch.empty_like(y) if narrow else None
    return y, rest, q.new_empty(batch, heads, tokens, dtype=torch.float32)


@polynomial_attention_backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    log_decay = rest[3]
    d_decay = None if log_decay is None else torch.empty_like(log_decay)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_decay


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None, Tensor]) -> None:
    q, k, v, decay, cuts, ctx.coefficients, ctx.divisor, _, ctx.causal, ctx.sigmoid, _ = inputs
    ctx.save_for_backward(q, k, v, decay, cuts, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The rounding error and the divisor get no gradient: only this pass uses them."""
    if dy is None:
        return (None,) * 11
    q, k, v, decay, cuts, y, rest, z = ctx.saved_tensors
    call = (ctx.coefficients, ctx.divisor, ctx.causal, ctx.sigmoid)
    *found, d_decay = polynomial_attention_backward(dy, q, k, v, y, rest, z, decay, cuts, *call)
    return *found, None if decay is None else d_decay, *(None,) * 7


polynomial_attention.register_autograd(_backward, setup_context=_save)
