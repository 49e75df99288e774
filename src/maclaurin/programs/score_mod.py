"""exp of a modified score (clamp, decay, a window with sinks), computed by triton/score_mod.py as
softmax rows and their log-sum-exp, both with gradients.

    Σ_s e^x v_s / D = e^{lse − ln D} o,          dx = P∘(do Vᵀ − δ),   δ = Σ do∘o − dlse

If D is constant, dx = e^{x − ln D}∘(dy Vᵀ): the backward pass uses ln D as the log-sum-exp and does not
need o.

Packed sequences are read in place, also for plain exp. torch's fused attention is faster on rows
(programs/stock_softmax.py), but packed sequences would first have to be copied to rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maclaurin.forms.attend import Form
from maclaurin.forms.output import SeenByRows, running_log_sum
from maclaurin.forms.stream import Rows, log_decay, running_totals
from maclaurin.forms.tracing import without_autocast
from maclaurin.programs import triton as gpu
from maclaurin.programs.custom_operator import operator
from maclaurin.programs.fused_rows import (
    are_operands,
    finish_rows,
    operands,
    per_head,
    refuse_tensors,
    row_products,
    scaled_rows,
    scaled_rows_backward,
)
from maclaurin.programs.program import Call, Cost, Program, Run, dense_flops, first_reason
from maclaurin.programs.stock_softmax import log_divisor, weights_fit
from maclaurin.spec import AttentionSpec

#: its time without a window relative to torch's fused attention: forward 1.2 to 1.4, both passes 1.3 to 1.5
#: (benchmarks/results/gpu_bench.json, exp(clamp=5)/len compared with exp/sum)
_SLOWER = 1.3


class ScoreMod(Program):
    """exp with a clamp or a decay gate, or a window alone, under any denominator and norm per head.

    For packed sequences also plain exp.
    """

    name = "score mod"
    backend = "triton"
    form = Form.PARALLEL
    reads_packed = True

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        over_heads = spec.norm is not None and not spec.norm.per_head
        return first_reason(
            lambda: _refuse_weights(spec),
            lambda: _refuse_rows(spec) if call.packing is None else _refuse_packed(spec),
            lambda: "it carries no state" if call.carries_state else None,
            lambda: "a norm over several heads needs gains that may overflow" if over_heads else None,
            lambda: refuse_tensors(call),
        )

    def cost(self, call: Call) -> Cost:
        window, flops = call.spec.window, dense_flops(call)
        if window is None:
            return Cost(_SLOWER * flops / 2, 0.0, 5, 0.0)
        return Cost(flops * min(0.5, (window.slots + 64) / call.keys), 0.0, 5, 0.0)

    def prepared(self, call: Call) -> Run:
        return _Softmax.of(call).run


def _refuse_weights(spec: AttentionSpec) -> str | None:
    """Why the spec's weights are not just e^(score), modified or not; None if they are."""
    weight, window = spec.kernel.fused, spec.window
    if window is not None:
        if not spec.kernel.is_zero:
            return "it supports no tail beside a window"
        return None if window.is_plain else f"it does not compute {window}"
    return None if weight is not None and weight.function == "exp" else "it supports only e^x"


def _refuse_rows(spec: AttentionSpec) -> str | None:
    """Why rows of this spec are left to torch's fused attention; None if they are not."""
    weight = spec.kernel.fused
    plain = weight is not None and weight.function == "exp" and weight.clamp is None
    is_modified = not plain or spec.window is not None or spec.decay_gates
    return None if is_modified else "the score is not modified: on rows torch's fused attention is faster"


def _refuse_packed(spec: AttentionSpec) -> str | None:
    """Why packed sequences of this spec are not supported; None if they are."""
    if spec.decay_gates:
        return "packed sequences with a decay gate are not supported"
    return None if spec.running_argument is None else f"{spec.denominator} adds up along a row"


class _Softmax(NamedTuple):
    """What a call needs from its spec and its tensors' layout."""

    clamp: float | None
    window: int | None
    sinks: int
    #: whether the program takes q, k and v unchanged
    as_given: bool
    #: whether only gates and a norm follow on softmax rows
    is_divided: bool
    uses_row_sum: bool

    @staticmethod
    def of(call: Call) -> _Softmax:
        spec, weight, window = call.spec, call.spec.kernel.fused, call.spec.window
        return _Softmax(
            None if weight is None else weight.clamp,
            None if window is None else window.size,
            0 if window is None else window.sinks,
            are_operands(spec, call.inputs),
            spec.rows_are_means,
            spec.denominator is not None and spec.denominator.uses_row_sum,
        )

    def run(self, call: Call) -> tuple[Tensor, None]:
        with without_autocast(call.device):
            rows = self.rows(call)
            return finish_rows(call.spec, rows, call.inputs.gates, call.inputs.q.dtype), None

    def rows(self, call: Call) -> Tensor:
        """The rows [B, T, H, e] over their denominator."""
        arguments = self.arguments(call)
        if self.is_divided:
            return modified_softmax(*arguments)[0]
        if self.uses_row_sum:
            o, lse = modified_softmax(*arguments)
            return _ScaledRows.apply(o, lse - _log_of_row_sum(_seen(call), lse))  # type: ignore[no-any-return]
        divisor = _log_divisor(call)
        if weights_fit(call.inputs.q) and (divisor is None or not divisor.requires_grad):
            return _DividedRows.apply(divisor, *arguments)  # type: ignore[no-any-return]
        o, lse = modified_softmax(*arguments)
        return _ScaledRows.apply(o, lse if divisor is None else lse - divisor)  # type: ignore[no-any-return]

    def arguments(self, call: Call) -> tuple[Any, ...]:
        """The arguments of `modified_softmax`."""
        spec, inputs = call.spec, call.inputs
        decay = log_decay(spec, inputs)
        return (
            *(inputs[:3] if self.as_given else operands(spec, inputs)),
            None if decay is None else running_totals(decay),
            None if call.packing is None else call.packing.cuts,
            call.scale,
            call.causal,
            self.clamp,
            self.window,
            self.sinks,
        )


def _seen(call: Call) -> SeenByRows:
    running = running_log_sum(call.spec, call.inputs, None, call.causal)
    return SeenByRows(call.spec, call.inputs, call.causal, running=running, packing=call.packing)


def _log_divisor(call: Call) -> Tensor | None:
    """ln D [B or 1, H or 1, T] of a denominator that does not depend on the row sum; None for 1."""
    if call.packing is None:
        return log_divisor(call, call.inputs)
    denominator = call.spec.denominator
    return None if denominator is None else per_head(denominator.log_divisor(_seen(call)), call.inputs)


def _log_of_row_sum(seen: SeenByRows, lse: Tensor) -> Tensor:
    """ln D [B, H, T] of a denominator that depends on the row sum e^lse; differentiable."""
    rows = lse.unflatten(1, (seen.inputs.k.shape[2], -1))
    scale = rows.detach()
    scaled = replace(seen, rows=Rows(rows, (rows - scale).exp(), scale))
    return scaled.log_divisor().to(lse.dtype).flatten(1, 2)


class _DividedRows(torch.autograd.Function):
    """Softmax rows [B, T, H, e] times e^lse over a constant denominator, ln D [B or 1, H or 1, T] or None."""

    @staticmethod
    def forward(ctx: Any, log_divisor: Tensor | None, *arguments: Any) -> Tensor:
        q, k, v, totals, cuts, *ctx.call = arguments
        ctx.save_for_backward(q, k, v, totals, cuts, log_divisor)
        o, lse = modified_softmax(*arguments)
        return scaled_rows(o.transpose(1, 2), lse, log_divisor).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, totals, cuts, log = ctx.saved_tensors
        log = q.new_zeros((), dtype=torch.float32) if log is None else log
        log = log.expand(q.shape[0], q.shape[2], q.shape[1]).contiguous()
        dq, dk, dv, d_totals = modified_softmax_backward(
            gpu.dense(dy), q, k, v, totals, cuts, log, None, None, *ctx.call
        )
        return None, dq, dk, dv, None if totals is None else d_totals, *(None,) * 6


class _ScaledRows(torch.autograd.Function):
    """e^g o for o [B, T, H, e] and g [B, H, T]."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, log_gain: Tensor) -> Tensor:
        log_gain = log_gain.contiguous()
        ctx.save_for_backward(o, log_gain)
        return scaled_rows(o.transpose(1, 2), log_gain).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """dg comes from the rounded do, so that δ = Σ do∘o − dlse is 0 if D does not depend on the row."""
        o, log_gain = ctx.saved_tensors
        rows = o.transpose(1, 2)
        do, _, _ = scaled_rows_backward(dy.transpose(1, 2), rows, log_gain)
        return do.transpose(1, 2), row_products(do, rows)


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::modified_softmax")
def modified_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    totals: Tensor | None,
    cuts: Tensor | None,
    scale: float,
    causal: bool,
    clamp: float | None,
    window: int | None,
    sinks: int,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, e] and lse [B, H, T] for q [B, T, H, d], k, v [B, T, K, ·] and totals [B, K, T] of ln f.

    `cuts` [n + 1]: n sequences are packed into one row; queries see only keys of their own sequence, and
    positions count within it.
    """
    from maclaurin.programs.triton import score_mod as program

    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    o, lse = program.forward(q, k, v, totals, program.Call(scale, causal, clamp, window, sinks), cuts)
    return o.transpose(1, 2), lse


@operator("maclaurin::modified_softmax_backward")
def modified_softmax_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    totals: Tensor | None,
    cuts: Tensor | None,
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
    from maclaurin.programs.triton import score_mod as program
    from maclaurin.programs.triton.rows import delta as delta_of_rows

    do = do.transpose(1, 2)
    delta = torch.zeros_like(lse) if o is None else delta_of_rows(do, o.transpose(1, 2), dlse)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    call = program.Call(scale, causal, clamp, window, sinks)
    *found, d_totals = program.backward(do, q, k, v, totals, lse, delta, call, cuts)
    dq, dk, dv = (u.transpose(1, 2) for u in found if u is not None)
    return dq, dk, dv, q.new_empty(0) if totals is None or d_totals is None else d_totals.to(totals.dtype)


@modified_softmax.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, totals: Tensor | None, cuts: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    o = _empty_rows(v, q.shape[2], cuts)
    return o, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@modified_softmax_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, totals: Tensor | None, cuts: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_rows(u, u.shape[2], cuts) for u in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if totals is None else torch.empty_like(totals)


def _empty_rows(like: Tensor, heads: int, cuts: Tensor | None) -> Tensor:
    rows = gpu.empty_rows_of_heads(like.transpose(1, 2), heads, packed=cuts is not None)
    return rows.transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, totals, cuts, *ctx.call = inputs
    ctx.save_for_backward(q, k, v, totals, cuts, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, totals, cuts, o, lse = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 10
    do = torch.zeros_like(o) if do is None else gpu.dense(do)
    dq, dk, dv, d_totals = modified_softmax_backward(do, q, k, v, totals, cuts, lse, o, dlse, *ctx.call)
    return dq, dk, dv, None if totals is None else d_totals, *(None,) * 6


modified_softmax.register_autograd(_backward, setup_context=_save)
