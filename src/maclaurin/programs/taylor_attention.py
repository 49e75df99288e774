"""taylor(N, about=mean) and an exact window beside a Taylor tail, under a row sum, in one fused program
(programs/triton/truncated_exp.py): every pair of the tail, or chunks of it through moments.

Rows come divided by their sum; gates and norms follow on them. Operators (operators.py), so torch.compile
keeps them whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maclaurin.programs.fused_inputs import operands
from maclaurin.programs.operators import operator
from maclaurin.programs.row_norm import finish_rows
from maclaurin.programs.triton import dense
from maclaurin.forms.inputs import Inputs
from maclaurin.forms.recentring import moments_about
from maclaurin.spec import AttentionSpec
from maclaurin.spec.multisets import number_of_multisets

#: tensors and other arguments of `truncated_softmax`
_TENSORS, _OPTIONS = 5, 8


def taylor_rows(
    spec: AttentionSpec,
    inputs: Inputs,
    *,
    scale: float,
    chunk: int = 0,
    initial: Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, e] in the dtype of q; the moments of the tail after the text [B, K, F, e + 1], or empty.

    The kernel is taylor(N) with N = 1 or even, about the mean or beside a window; without a window the rows of
    a text that goes on from `initial` moments see their keys too. Rows are divided by their sum, under a norm
    as well, which does not see it. chunk 0 forms every pair; moments, and so states, need N ≤ 2.
    """
    q, k, v = operands(spec, inputs)
    order = spec.kernel.orders[-1]  # type: ignore[index]
    about_mean = spec.kernel.depends_on_row
    window, sinks = (0, 0) if spec.window is None else (spec.window.size, spec.window.sinks)
    final = spec.norm is None and not spec.output_gate and q.dtype == torch.bfloat16
    if q.shape[1] - window - sinks <= chunk and initial is None and not return_state:
        chunk = 0
    offset = None
    if initial is not None:
        offset = _mean_of(initial, k) if about_mean else torch.zeros_like(k[:, 0])
        initial = moments_about(initial, offset)
    y, _, state, origin, *_ = truncated_softmax(
        q, k, v, initial, offset, scale, order, about_mean, window, sinks, chunk, final, return_state
    )
    if return_state:
        state = moments_about(state, -origin)
    return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype), state


def _mean_of(moments: Tensor, k: Tensor) -> Tensor:
    """The mean [B, K, d] of the keys that moments hold, in the dtype of k and without a gradient."""
    held = moments.detach()[..., -1]
    return (held[:, :, 1 : 1 + k.shape[3]] / held[:, :, :1].clamp(min=1)).to(k.dtype)


@operator("maclaurin::truncated_softmax")
def truncated_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    offset: Tensor | None,
    scale: float,
    order: int,
    about_mean: bool,
    window: int,
    sinks: int,
    chunk: int,
    narrow: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, H, e] in fp32 (`narrow`: in bf16, with what rounding took from it); the state after the text, or empty.

    States are [B, K, F, e + 1], about the offset [B, K, d] that comes behind them: the given one, which belongs to
    `initial`, or the mean of the first chunk. The last five tensors are for the backward pass.
    """
    from maclaurin.programs.triton import state_layout
    from maclaurin.programs.triton import truncated_exp as program

    call = program.Call(scale, order, about_mean, window, sinks, chunk, narrow)
    start = _start(program, state_layout, initial, offset, order, v.shape[3])
    y, rest, rows, origin, after = program.forward(q, k, v, call, start, totals=return_state)
    state = q.new_empty(0, dtype=torch.float32)
    if after is not None:
        state = state_layout.packed(after, range(order + 1), q.shape[3], v.shape[3], sums=True)
        state = state.unflatten(0, k.shape[::2])
    origin = origin.view(k.shape[0], k.shape[2], -1) if origin.numel() else k.new_empty(0)
    origin = (
        origin.clone() if offset is not None else origin
    )  # an operator returns no view of what it is given
    return y, q.new_empty(0) if rest is None else rest, state, origin, *rows


@operator("maclaurin::truncated_softmax_backward")
def truncated_softmax_backward(
    dy: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    rest: Tensor,
    origin: Tensor,
    rows: list[Tensor],
    initial: Tensor | None,
    scale: float,
    order: int,
    about_mean: bool,
    window: int,
    sinks: int,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and the gradient of the initial state, or empty."""
    from maclaurin.programs.triton import state_layout
    from maclaurin.programs.triton import truncated_exp as program

    d, e, orders = q.shape[3], v.shape[3], range(order + 1)
    call = program.Call(scale, order, about_mean, window, sinks, chunk)
    start = _start(program, state_layout, initial, origin, order, e)
    d_totals = None
    if d_state is not None:
        d_totals = state_layout.unpacked(d_state.flatten(0, 1), orders, d, e, order)
    found = program.backward(
        dy, q, k, v, y, rest if rest.numel() else None, program.Rows(*rows), origin.flatten(0, 1) if origin.numel() else origin,
        call, start, d_totals=d_totals,
    )  # fmt: skip
    d_initial = q.new_empty(0)
    if found.before is not None:
        d_initial = state_layout.packed(found.before, orders, d, e, sums=True).unflatten(0, k.shape[::2])
    return found.q, found.k, found.v, d_initial


def _start(
    program: Any, state_layout: Any, initial: Tensor | None, offset: Tensor | None, order: int, e: int
) -> Any:
    if initial is None or offset is None:
        return None
    d = offset.shape[-1]
    held = state_layout.unpacked(initial.flatten(0, 1), range(order + 1), d, e, order)
    return program.Start(offset.flatten(0, 1), held)


@truncated_softmax.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    from maclaurin.programs.triton import block_layout, key_sums, moments, tiles

    _, _, _, order, about_mean, window, sinks, chunk, narrow, return_state = rest
    batch, tokens, heads, d = q.shape
    kv_heads, e, wide = k.shape[2], v.shape[3], torch.float32
    rows, tail = batch * kv_heads, tokens - window - sinks
    chunks = -(-tail // chunk) if chunk else 0
    features = sum(number_of_multisets(d, n) for n in range(order + 1))
    y = q.new_empty(batch, tokens, heads, e, dtype=torch.bfloat16 if narrow else wide)
    log = q.new_empty(batch, heads, tokens, dtype=wide)
    nothing = q.new_empty(0, dtype=wide)
    second = (rows, chunks, block_layout.blocks(int(d), 2), d, e)
    return (
        y,
        torch.empty_like(y) if narrow else q.new_empty(0),
        q.new_empty((batch, kv_heads, features, e + 1) if return_state else (0,), dtype=wide),
        k.new_empty((batch, kv_heads, d) if chunk else (0,)),
        torch.empty_like(log) if about_mean else nothing,
        log,
        q.new_empty(rows, -(-tail // key_sums.TILE) + 1, d, dtype=wide) if about_mean else nothing,
        q.new_empty(rows, chunks, moments.small_size(d, e), dtype=wide) if chunk else nothing,
        q.new_empty(second, dtype=tiles.operand(q)) if chunk and order > 1 else nothing,
    )


@truncated_softmax_backward.register_fake
def _(dy: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    initial = rest[4]
    d_initial = q.new_empty(0) if initial is None else torch.empty_like(initial)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, initial, _, *ctx.call, _, ctx.return_state = inputs
    y, rest, _, origin, *rows = output
    ctx.mark_non_differentiable(origin)
    ctx.save_for_backward(q, k, v, y, rest, origin, initial, *rows)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: Any, d_state: Tensor | None, *__: Any) -> tuple[Any, ...]:
    d_state = d_state if ctx.return_state else None  # traced, an empty one has a gradient too
    if dy is None and d_state is None:
        return (None,) * (_TENSORS + _OPTIONS)
    q, k, v, y, rest, origin, initial, *rows = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dense(dy)
    d_state = None if d_state is None else d_state.contiguous()
    *found, d_initial = truncated_softmax_backward(
        dy, d_state, q, k, v, y, rest, origin, rows, initial, *ctx.call
    )
    return *found, None if initial is None else d_initial, None, *(None,) * _OPTIONS


truncated_softmax.register_autograd(_backward, setup_context=_save)
