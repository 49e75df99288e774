"""exp of a changed score (a clamp, a forget gate, a window with sinks) through the fused program for it
(backends/triton/exp_modified.py): softmax rows and their log-sum-exp, both with gradients.

    Σ_s e^x v_s / D = e^{lse − ln D} o,          dx = P∘(do Vᵀ − δ),   δ = Σ do∘o − dlse

Where D is no variable, dx = e^{x − ln D}∘(dy Vᵀ): the way back takes ln D for the log-sum-exp and needs no
rows.

Operators (operators.py), so torch.compile keeps them whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maclaurin.backends import triton as programs
from maclaurin.backends.fused_inputs import operands, tensors_are_served
from maclaurin.backends.operators import operator
from maclaurin.backends.row_gain import log_row_sum, scaled_rows, scaled_rows_backward, weights_fit
from maclaurin.backends.row_norm import finish_rows
from maclaurin.forms.divisors import log_divisor
from maclaurin.forms.inputs import Inputs, clamped_log_forget
from maclaurin.forms.stream import running_totals
from maclaurin.spec import AttentionSpec, Exp, RowSum, RunningSum


def changed_score_serves(spec: AttentionSpec, inputs: Inputs, causal: bool) -> bool:
    """Whether softmax of a changed score and a function of its rows is all that the spec asks for."""
    if not (_changes_exp(spec) or _is_window_alone(spec)):
        return False
    over_heads = spec.norm is not None and not spec.norm.per_head
    return not over_heads and tensors_are_served(inputs, causal)


def changed_score_attend(spec: AttentionSpec, inputs: Inputs, *, scale: float, causal: bool) -> Tensor:
    """y [B, T, H, e] in the dtype of q."""
    row_sum = _row_sum(spec)
    if row_sum is None and _divisor_is_given(spec, inputs):
        y = _directly(spec, inputs, scale, causal)
        return finish_rows(spec, y.transpose(1, 2), inputs.output_gate, inputs.q.dtype)
    o, lse = exact_rows(spec, inputs, scale=scale, causal=causal)
    if row_sum is None or row_sum.sees_row_scale:
        o = _scaled(spec, inputs, row_sum, o, lse, causal)
    return finish_rows(spec, o.transpose(1, 2), inputs.output_gate, inputs.q.dtype)


def exact_rows(spec: AttentionSpec, inputs: Inputs, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax rows [B, H, T, e] and log-sum-exp [B, H, T] over the keys whose weight is e^x."""
    return changed_softmax(*_arguments(spec, inputs, scale, causal))


def _arguments(spec: AttentionSpec, inputs: Inputs, scale: float, causal: bool) -> tuple[Any, ...]:
    """What the program takes, as the operators below list it."""
    log_forget = clamped_log_forget(inputs)
    clamp = spec.kernel.clamp if isinstance(spec.kernel, Exp) else None
    return (
        *(u.transpose(1, 2) for u in operands(spec, inputs)),
        None if log_forget is None else running_totals(log_forget),
        scale,
        causal,
        clamp,
        None if spec.window is None else spec.window.size,
        0 if spec.window is None else spec.window.sinks,
    )


def _divisor_is_given(spec: AttentionSpec, inputs: Inputs) -> bool:
    """Whether D is no variable, and weights over it can be multiplied as they are."""
    return not isinstance(spec.denominator, RunningSum) and weights_fit(inputs.q)


def _directly(spec: AttentionSpec, inputs: Inputs, scale: float, causal: bool) -> Tensor:
    """The rows [B, H, T, e] over a denominator that is no variable."""
    q, divisor = inputs.q, log_divisor(spec, inputs, causal)
    log = q.new_zeros((), dtype=torch.float32) if divisor is None else divisor.transpose(1, 2).float()
    log = log.expand(q.shape[0], q.shape[2], q.shape[1]).contiguous()
    return _DividedRows.apply(log, *_arguments(spec, inputs, scale, causal))  # type: ignore[no-any-return]


class _DividedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_divisor: Tensor, *arguments: Any) -> Tensor:
        q, k, v, totals, *ctx.call = arguments
        ctx.save_for_backward(q, k, v, totals, log_divisor)
        o, lse = changed_softmax(*arguments)
        return scaled_rows(o, lse - log_divisor, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, totals, log_divisor = ctx.saved_tensors
        dq, dk, dv, d_totals = changed_softmax_backward(
            programs.dense(dy), q, k, v, totals, log_divisor, None, None, *ctx.call
        )
        return None, dq, dk, dv, None if totals is None else d_totals, *(None,) * 5


def _changes_exp(spec: AttentionSpec) -> bool:
    changed = isinstance(spec.kernel, Exp) and (spec.kernel.clamp is not None or spec.forget_gate)
    return changed and spec.window is None


def _is_window_alone(spec: AttentionSpec) -> bool:
    """A window beside a tail that weighs nothing."""
    return spec.window is not None and spec.orders == ()


def _row_sum(spec: AttentionSpec) -> RowSum | None:
    """What the row is divided by; under a norm that does not see it, the sum that keeps numbers small."""
    if isinstance(spec.denominator, RowSum):
        return spec.denominator
    return RowSum() if spec.ignores_row_scale else None


def _scaled(
    spec: AttentionSpec, inputs: Inputs, row_sum: RowSum | None, o: Tensor, lse: Tensor, causal: bool
) -> Tensor:
    """The rows over their denominator."""
    if row_sum is not None:
        log_sum, _ = log_row_sum(row_sum, lse.detach() if row_sum.detach else lse)
        return scale_rows(o, lse - log_sum)
    divisor = log_divisor(spec, inputs, causal)
    return scale_rows(o, lse if divisor is None else lse - divisor.transpose(1, 2))


def scale_rows(o: Tensor, log_gain: Tensor) -> Tensor:
    """e^g o for o [B, H, T, e]."""
    return _ScaledRows.apply(o, log_gain.contiguous())  # type: ignore[no-any-return]


class _ScaledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, log_gain: Tensor) -> Tensor:
        ctx.save_for_backward(o, log_gain)
        return scaled_rows(o, log_gain, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """dg is made of do as rounded: δ = Σ do∘o − dlse then vanishes where D does not know the row."""
        o, log_gain = ctx.saved_tensors
        do, _, _ = scaled_rows_backward(dy, o, log_gain, None, None, sums=False)
        return do, row_products(do, o)


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::changed_softmax")
def changed_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    totals: Tensor | None,
    scale: float,
    causal: bool,
    clamp: float | None,
    window: int | None,
    sinks: int,
) -> tuple[Tensor, Tensor]:
    """o [B, H, T, e] and lse [B, H, T] for q [B, H, T, d], k, v [B, K, T, ·] and totals [B, K, T] of ln f."""
    from maclaurin.backends.triton import exp_modified as program

    return program.forward(q, k, v, totals, program.Call(scale, causal, clamp, window, sinks))


@operator("maclaurin::row_products")
def row_products(do: Tensor, o: Tensor) -> Tensor:
    """Σ do∘o [B, H, T] in fp32."""
    from maclaurin.backends.triton import row_scale as program

    return program.delta(do, o, None)


@row_products.register_fake
def _(do: Tensor, o: Tensor) -> Tensor:
    return o.new_empty(o.shape[:3], dtype=torch.float32)


@operator("maclaurin::changed_softmax_backward")
def changed_softmax_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    totals: Tensor | None,
    lse: Tensor,
    o: Tensor | None,
    dlse: Tensor | None,
    scale: float,
    causal: bool,
    clamp: float | None,
    window: int | None,
    sinks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradient of the totals (empty without them); without rows o, δ is 0."""
    from maclaurin.backends.triton import exp_modified as program
    from maclaurin.backends.triton import row_scale

    delta = torch.zeros_like(lse) if o is None else row_scale.delta(do, o, dlse)
    call = program.Call(scale, causal, clamp, window, sinks)
    dq, dk, dv, d_totals = program.backward(do, q, k, v, totals, lse, delta, call)
    return dq, dk, dv, q.new_empty(0) if totals is None or d_totals is None else d_totals.to(totals.dtype)


@changed_softmax.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _size = q.shape
    lse = q.new_empty(batch, heads, tokens, dtype=torch.float32)
    return v.new_empty(batch, heads, tokens, v.shape[3]), lse


@changed_softmax_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, totals: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_totals = q.new_empty(0) if totals is None else torch.empty_like(totals)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_totals


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, totals, *ctx.call = inputs
    ctx.save_for_backward(q, k, v, totals, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, totals, o, lse = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 9
    do = torch.zeros_like(o) if do is None else programs.dense(do)
    dq, dk, dv, d_totals = changed_softmax_backward(do, q, k, v, totals, lse, o, dlse, *ctx.call)
    return dq, dk, dv, None if totals is None else d_totals, *(None,) * 5


changed_softmax.register_autograd(_backward, setup_context=_save)
