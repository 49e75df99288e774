"""Polynomial kernels, and σ, through the fused quadratic program (backends/triton/polynomial_quadratic.py).

The program divides by the row sum, by the number of visible keys, or not; what is left of a spec (gates,
norms) follows on its rows. Operators (operators.py), so torch.compile keeps them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maclaurin.backends.fused_inputs import (
    denominator_is_served,
    loses_digits,
    operands,
    over_denominator,
    row_divisor,
    rows_are_final,
    tensors_are_served,
)
from maclaurin.backends.operators import operator
from maclaurin.backends.row_norm import finish_rows
from maclaurin.forms.inputs import Inputs
from maclaurin.spec import AttentionSpec, Sigmoid

#: Horner's rule is unrolled, and no higher order was measured
HIGHEST_FUSED_ORDER = 12


def fused_serves(spec: AttentionSpec, inputs: Inputs, causal: bool) -> bool:
    """Whether the fused program computes this spec for such tensors."""
    if loses_digits(spec, inputs):
        return False
    return _spec_is_served(spec) and tensors_are_served(inputs, causal)


def fused_attend(spec: AttentionSpec, inputs: Inputs, *, scale: float, causal: bool) -> Tensor:
    """y [B, T, H, e] in the dtype of q."""
    is_sigmoid = isinstance(spec.kernel, Sigmoid)
    y, *_ = polynomial_attention(
        *operands(spec, inputs),
        _series(spec, scale),
        *row_divisor(spec),
        causal,
        is_sigmoid,
        rows_are_final(spec, inputs),
    )
    y = over_denominator(spec, inputs, y, causal, None)
    return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype)


def _series(spec: AttentionSpec, scale: float) -> list[float]:
    """Coefficients of the score without its scale; of what σ is taken of, where the kernel is σ."""
    if isinstance(spec.kernel, Sigmoid):
        return [spec.kernel.bias, scale]
    return [float(c) * scale**n for n, c in enumerate(spec.kernel.coefficients())]


def _spec_is_served(spec: AttentionSpec) -> bool:
    low = bool(spec.orders) and max(spec.orders or ()) <= HIGHEST_FUSED_ORDER
    if not (low or isinstance(spec.kernel, Sigmoid)):
        return False
    if spec.kernel.depends_on_row or spec.forget_gate or spec.window is not None:
        return False
    return denominator_is_served(spec)


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::polynomial_attention")
def polynomial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Sequence[float],
    divisor: str,
    eps: float,
    causal: bool,
    sigmoid: bool,
    narrow: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_s w_ts v_s / D_t [B, T, H, e] and D [B, H, T] in fp32, with w = Σ_n c_n (q·k)ⁿ or σ of it.

    `narrow`: y in bf16, and behind it what rounding took from it, for the way back; else that is empty.
    """
    from maclaurin.backends.triton import polynomial_quadratic as program

    call = program.Call(tuple(coefficients), divisor, eps, causal, sigmoid, narrow)
    y, rest, z = program.forward(q, k, v, call)
    return y, q.new_empty(0) if rest is None else rest, z


@operator("maclaurin::polynomial_attention_backward")
def polynomial_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    rest: Tensor,
    z: Tensor,
    coefficients: Sequence[float],
    divisor: str,
    causal: bool,
    sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    from maclaurin.backends.triton import polynomial_quadratic as program

    call = program.Call(tuple(coefficients), divisor, 0.0, causal, sigmoid)
    return program.backward(dy, q, k, v, y, rest if rest.numel() else None, z, call)


@polynomial_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _size = q.shape
    narrow = call[-1]
    y = v.new_empty(batch, tokens, heads, v.shape[3], dtype=torch.bfloat16 if narrow else torch.float32)
    rest = torch.empty_like(y) if narrow else q.new_empty(0)
    return y, rest, q.new_empty(batch, heads, tokens, dtype=torch.float32)


@polynomial_attention_backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, ctx.coefficients, ctx.divisor, _, ctx.causal, ctx.sigmoid, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """What rounding took and the divisor z are for this pass only: nothing of a spec reads them."""
    if dy is None:
        return (None,) * 9
    q, k, v, y, rest, z = ctx.saved_tensors
    call = (ctx.coefficients, ctx.divisor, ctx.causal, ctx.sigmoid)
    return *polynomial_attention_backward(dy, q, k, v, y, rest, z, *call), *(None,) * 6


polynomial_attention.register_autograd(_backward, setup_context=_save)
