"""linear(φ) in linear time through its own fused program (programs/triton/first_order.py).

The program computes feature map, gates, denominator and norm; an output gate, or a norm of another kind,
follows on its rows. Operators (operators.py), so torch.compile keeps them whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maclaurin.programs.operators import operator
from maclaurin.programs.row_norm import finish_rows
from maclaurin.programs.triton import dense
from maclaurin.forms.inputs import Inputs, working_dtype
from maclaurin.spec import AttentionSpec, RowSum, VisibleKeys
from maclaurin.spec.sign import Sign

#: feature maps that the program computes; others are applied before it
_INSIDE = ("identity", "elu1", "relu", "cosine")
#: tensors and other arguments of `first_order`
_TENSORS, _OPTIONS = 7, 12


def linear_rows(
    spec: AttentionSpec,
    inputs: Inputs,
    *,
    scale: float,
    causal: bool = True,
    initial: Tensor | None = None,
    before: Tensor | None = None,
    return_state: bool = False,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, e] in the dtype of q for a kernel with a feature map; the moments after the text, or empty.

    `initial` are the moments of the text so far, `before` [B] the number of its keys. The denominator is a
    row sum without floor and detach, the number of visible keys, or none. `chunk` is a power of two from 16
    to 64, or 0.
    """
    feature_map = spec.kernel.feature_map
    assert feature_map is not None
    name, q, k = feature_map.notation, inputs.q, inputs.k
    if name not in _INSIDE:
        q, k = (feature_map(u.to(working_dtype(u.dtype))).to(u.dtype) for u in (q, k))
        name = "identity"
    length = _length_inside(spec, inputs.v.shape[3])
    sums_cancel = isinstance(spec.denominator, RowSum) and feature_map.sign is Sign.INDEFINITE
    final = length > 0 or (spec.norm is None and not spec.output_gate)
    y, _, _, state, *_ = first_order(
        dense(q),
        dense(k),
        dense(inputs.v),
        inputs.input_gate,
        inputs.log_forget,
        before,
        initial,
        name,
        scale,
        _divisor(spec, length),
        (spec.denominator.eps or 0.0) if isinstance(spec.denominator, RowSum) else 0.0,
        length,
        length > 0 and spec.norm is not None and spec.norm.centred,
        causal,
        final,
        final and q.dtype != torch.float32 and (length > 0 or sums_cancel),
        chunk,
        0,
        return_state,
    )
    if length > 0:
        return y, state
    return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype), state


def _length_inside(spec: AttentionSpec, e: int) -> float:
    """The length a norm gives to rows where the program can do it: no output gate, no row sum; else 0."""
    if spec.norm is None or spec.output_gate or spec.gate_after_norm or isinstance(spec.denominator, RowSum):
        return 0.0
    return spec.norm.length(e) or 0.0


def _divisor(spec: AttentionSpec, length: float) -> str:
    """ "sum", "count" or "one"; under a norm the number of keys does nothing."""
    if isinstance(spec.denominator, RowSum):
        return "sum"
    return "count" if isinstance(spec.denominator, VisibleKeys) and not length else "one"


@operator("maclaurin::first_order")
def first_order(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_gate: Tensor | None,
    log_forget: Tensor | None,
    before: Tensor | None,
    initial: Tensor | None,
    feature_map: str,
    scale: float,
    divisor: str,
    eps: float,
    length: float,
    centred: bool,
    causal: bool,
    final: bool,
    rests: bool,
    chunk: int,
    segments: int,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, H, e] (fp32 unless `final`), a number per row, what rounding took from y; the last state.

    q [B, T, H, d], k [B, T, K, d] and v [B, T, K, e] have a dense last axis. Gates [B, T, K] may have any
    strides and any floating dtype. `before` [B] counts earlier keys where the divisor is "count". States are
    fp32 [B, K, d, e], with Σ φ(k) as one more column under "sum". The other arguments are those of Call in
    triton/first_order.py. The last five tensors are for the backward pass.
    """
    from maclaurin.programs.triton import first_order as program

    call = program.Call(
        feature_map, scale, divisor, eps, length, centred, causal, final, rests, chunk, segments
    )
    *found, states = program.forward(
        q, k, v, input_gate, log_forget, before, call, initial=initial, return_state=return_state
    )
    return (*found, *states)  # type: ignore[return-value]


@operator("maclaurin::first_order_backward")
def first_order_backward(
    dy: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_gate: Tensor | None,
    log_forget: Tensor | None,
    before: Tensor | None,
    y: Tensor,
    stat: Tensor,
    rest: Tensor,
    states: list[Tensor],
    started: bool,
    feature_map: str,
    scale: float,
    divisor: str,
    eps: float,
    length: float,
    centred: bool,
    causal: bool,
    final: bool,
    rests: bool,
    chunk: int,
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and the gradients of both gates and of the initial state, or empty."""
    from maclaurin.programs.triton import first_order as program

    call = program.Call(
        feature_map, scale, divisor, eps, length, centred, causal, final, rests, chunk, segments
    )
    given = q, k, v, input_gate, log_forget, before, y, stat, rest, program.States(*states), call
    found = program.backward(dy, *given, d_state=d_state, started=started)
    return tuple(q.new_empty(0) if u is None else u for u in found)  # type: ignore[return-value]


@first_order.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    from maclaurin.programs.triton import first_order as program

    call, return_state = program.Call(*rest[4:-1]), rest[-1]
    return program.shapes(q, k, v, rest[1], call, return_state)


@first_order_backward.register_fake
def _(dy: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    gates, started, divisor = rest[:2], rest[7], rest[10]
    of_gates = (q.new_empty(0) if u is None else u.new_empty(u.shape) for u in gates)
    shape = (k.shape[0], k.shape[2], q.shape[3], v.shape[3] + int(divisor == "sum")) if started else (0,)
    d_initial = q.new_empty(shape, dtype=torch.float32 if started else q.dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *of_gates, d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, input_gate, log_forget, before, initial, *ctx.call, ctx.return_state = inputs
    ctx.started = initial is not None
    y, stat, rest, _, *states = output
    ctx.save_for_backward(q, k, v, input_gate, log_forget, before, y, stat, rest, *states)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dy: Tensor | None, _: Any, __: Any, d_state: Tensor | None, *___: Any
) -> tuple[Any, ...]:
    d_state = d_state if ctx.return_state else None  # traced, an empty one has a gradient too
    if dy is None and d_state is None:
        return (None,) * (_TENSORS + _OPTIONS)
    q, k, v, input_gate, log_forget, before, y, stat, rest, *states = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dense(dy)
    d_state = None if d_state is None else d_state.contiguous()
    gates = input_gate, log_forget
    *found, d_gate, d_log, d_initial = first_order_backward(
        dy, d_state, q, k, v, *gates, before, y, stat, rest, states, ctx.started, *ctx.call
    )
    of_gates = (None if gate is None else d for gate, d in zip(gates, (d_gate, d_log), strict=True))
    return *found, *of_gates, None, d_initial if ctx.started else None, *(None,) * _OPTIONS


first_order.register_autograd(_backward, setup_context=_save)
