"""linear(φ) in linear time, on its own fused program triton/linear_attention.py.

The program computes feature map, gates, denominator and norm; the rest of a spec is applied to its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.state import State
from maclaurin.forms.stream import gated_values, log_decay, unlimited_log_decay, working_dtype
from maclaurin.forms.tracing import without_autocast
from maclaurin.programs.custom_operator import operator, present
from maclaurin.programs.fused_rows import (
    finish_rows,
    over_denominator,
    refuse_denominator,
    refuse_tensors,
    row_divisor,
    rows_are_divided,
)
from maclaurin.programs.program import Call, Cost, Program, Run, first_reason
from maclaurin.programs.triton import dense
from maclaurin.spec import AttentionSpec, Sign

#: tokens per chunk in bf16; half of it in fp32 and fp16
_CHUNK = 64
#: tensors and other arguments of `first_order`
_TENSORS, _OPTIONS = 7, 11
#: an optional tensor
_Given = Tensor | None


class LinearAttention(Program):
    """φ(q)·φ(k), causal or not, from and to a state."""

    name = "linear attention"
    backend = "triton"
    form = Form.CHUNKED

    def cannot(self, call: Call) -> str | None:
        spec, weight = call.spec, call.spec.kernel.fused
        if spec.kernel.feature_map is None or spec.orders != (1,):
            return "it supports only linear(φ)"
        if weight is None or weight.function != "polynomial" or weight.about_mean:
            return f"it does not support the coefficients of {spec.kernel}"
        return first_reason(
            lambda: "it does not support a window" if spec.window is not None else None,
            lambda: "single tokens have their own programs" if call.is_step else None,
            lambda: refuse_denominator(spec),
            lambda: _refuse_state(call) if call.carries_state else None,
            lambda: refuse_tensors(call),
        )

    def chunk(self, call: Call) -> int:
        asked = _CHUNK if call.chunk_size is None else call.chunk_size
        largest = _CHUNK if call.inputs.q.dtype == torch.bfloat16 else _CHUNK // 2
        return min(largest, max(16, 1 << (asked - 1).bit_length()))

    def cost(self, call: Call) -> Cost:
        batch, tokens, heads, d = call.inputs.q.shape
        kv_heads, e, chunk = call.inputs.k.shape[2], call.inputs.v.shape[3], self.chunk(call)
        rows, keys = float(batch * heads * tokens), float(batch * kv_heads * tokens)
        size = call.inputs.q.element_size()
        states = keys / chunk * d * e * size
        moved = size * (rows * (d + e) + 2 * keys * (d + e)) + 2 * states
        return Cost(2 * (rows + keys) * d * e + 2 * rows * chunk * (d + e), moved, 3, states)

    def prepared(self, call: Call) -> Run:
        return _Rows.of(call, self.chunk(call)).run


def _refuse_state(call: Call) -> str | None:
    if not call.causal:
        return "without a causal mask it carries no state"
    if call.state is not None and call.state.moments.dtype != torch.float32:
        return "it keeps states in fp32"
    if call.spec.running_argument is not None:
        return "it does not support a running sum"
    return None if call.inputs.present is None else "with a state it does not support padding"


def _state_after(call: Call, moments: Tensor | None) -> State:
    assert moments is not None
    state, k = call.state, call.inputs.k
    count = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device) if state is None else state.count
    decay = log_decay(call.spec, call.inputs)
    if decay is not None:
        decay = decay.sum(-1)
        decay = decay if state is None or state.log_decay is None else state.log_decay + decay
    return State(call.spec, moments, count + call.keys, decay)


class _Rows(NamedTuple):
    """What a call needs from its spec and shapes."""

    #: a in κ = a·x
    coefficient: float
    #: None: φ is computed in plain torch
    feature_map: str | None
    #: the argument of the gate that the program multiplies values by
    gate: str | None
    divisor: str
    eps: float
    #: the length to which the program's norm scales rows; 0 for none
    length: float
    centred: bool
    #: whether the norm also cancels a row sum, and with it the sign of the scale
    sign_cancels: bool
    #: whether the program's rows are the output
    is_final: bool
    rests: bool
    chunk: int
    #: whether the program takes q, k and v unchanged
    as_given: bool

    @staticmethod
    def of(call: Call, chunk: int) -> _Rows:
        spec, (q, _, v, *_) = call.spec, call.inputs
        feature_map, weight = spec.kernel.feature_map, spec.kernel.fused
        assert feature_map is not None
        assert weight is not None
        length = _length_inside(spec, v.shape[3])
        divisor, eps = ("one", 0.0) if length else row_divisor(spec)
        is_final = length > 0 or (spec.norm is None and not spec.gates_before_norm and rows_are_divided(spec))
        divides = spec.denominator is not None and spec.denominator.uses_row_sum
        cancels = divisor == "sum" and feature_map.sign is Sign.INDEFINITE
        return _Rows(
            weight.coefficients[1],
            feature_map.fused,
            _gate_inside(spec),
            divisor,
            eps,
            length,
            length > 0 and spec.norm is not None and spec.norm.centred,
            length > 0 and divides,
            is_final,
            is_final and q.dtype != torch.float32 and (length > 0 or cancels),
            chunk,
            _takes_as_given(call),
        )

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        with without_autocast(call.device):
            y, moments = self.rows(call)
        return y, _state_after(call, moments) if call.return_state else None

    def rows(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """y [B, T, H, e] in the dtype of q, and the moments after the last token if a state is requested."""
        spec, inputs, state = call.spec, call.inputs, call.state
        decay, scale = unlimited_log_decay(spec, inputs), self.coefficient * call.scale
        y, moments, *_ = first_order(
            *(inputs[:3] if self.as_given else self.operands(call)),
            None if self.gate is None else inputs.gates[self.gate],
            None if decay is None else decay.transpose(1, 2),
            state.count if state is not None and self.divisor == "count" else None,
            None if state is None else state.moments,
            self.feature_map or "identity",
            abs(scale) if self.sign_cancels else scale,
            self.divisor,
            self.eps,
            self.length,
            self.centred,
            call.causal,
            self.is_final,
            self.rests,
            self.chunk,
            call.return_state,
        )
        if self.is_final:
            return y, moments
        if not rows_are_divided(spec):
            y, _ = over_denominator(spec, inputs, y, call.causal, state)
        return finish_rows(spec, y, inputs.gates, inputs.q.dtype), moments

    def operands(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with the parts of the spec that the program does not compute itself."""
        spec, (q, k, v, gates, _) = call.spec, call.inputs
        if self.feature_map is None:
            q, k = (spec.kernel.mapped(u.to(working_dtype(u.dtype))).to(u.dtype) for u in (q, k))
        if self.gate is None and spec.value_gates:
            v = gated_values(spec, v.to(working_dtype(v.dtype)), gates, v.dtype)
        return dense(q), dense(k), dense(v)


def _takes_as_given(call: Call) -> bool:
    """Whether the program takes q, k and v unchanged."""
    spec = call.spec
    if spec.kernel.feature_map is None or spec.kernel.feature_map.fused is None:
        return False
    if spec.value_gates and _gate_inside(spec) is None:
        return False
    return all(u.stride(-1) == 1 for u in call.inputs[:3])


def _gate_inside(spec: AttentionSpec) -> str | None:
    """The argument that the program multiplies values by, if there is one such gate."""
    gates = spec.value_gates
    if len(gates) != 1 or not gates[0].multiplies or gates[0].argument.per_channel:
        return None
    return gates[0].argument.name


def _length_inside(spec: AttentionSpec, e: int) -> float:
    """The length that the norm gives each row, if nothing else is applied to rows; else 0."""
    if spec.norm is None or spec.gates_before_norm or spec.gates_after_norm:
        return 0.0
    divided_out = spec.denominator is None or spec.denominator in spec.cancelled_parts
    return spec.norm.length(e) or 0.0 if divided_out else 0.0


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::first_order", results=2)
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
    return_state: bool,
) -> tuple[Tensor, _Given, _Given, _Given, _Given, _Given, _Given, _Given, _Given]:
    """y [B, T, H, e] (fp32 unless `final`) and the last state.

    q [B, T, H, d], k [B, T, K, d] and v [B, T, K, e] have a dense last axis. Gates [B, T, K] may have any
    strides and any floating dtype. `before` [B] counts earlier keys where the divisor is "count". States are
    fp32 [B, K, d, e], with Σ φ(k) as one more column under "sum". The other arguments are those of Call in
    triton/linear_attention.py. The other outputs are for the backward pass: a number per row, the rounding
    error of y, and States.
    """
    from maclaurin.programs.triton import linear_attention as program

    call = program.Call(feature_map, scale, divisor, eps, length, centred, causal, final, rests, chunk)
    y, stat, rest, after, states = program.forward(
        q, k, v, input_gate, log_forget, before, call, initial=initial, return_state=return_state
    )
    return y, after, stat, rest, *states  # type: ignore[return-value]


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
    stat: Tensor | None,
    rest: Tensor | None,
    states: list[Tensor | None],
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
) -> tuple[Tensor, Tensor, Tensor, _Given, _Given, _Given]:
    """dq, dk, dv, and the gradients of both gates and of the initial state, if the call has them."""
    from maclaurin.programs.triton import linear_attention as program

    call = program.Call(feature_map, scale, divisor, eps, length, centred, causal, final, rests, chunk)
    kept = present(stat), present(rest), program.States(*map(present, states))
    return program.backward(
        dy, q, k, v, input_gate, log_forget, before, y, *kept, call, d_state=d_state, started=started
    )


@first_order.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    from maclaurin.programs.triton import linear_attention as program

    call, return_state = program.Call(*rest[4:-1]), rest[-1]
    made = program.results(q, k, v, rest[1] is not None, call, return_state)
    y, stat, rest_of_y, after, *states = (
        None if kind is None else q.new_empty(kind.shape, dtype=kind.dtype) for kind in made
    )
    return y, after, stat, rest_of_y, *states


@first_order_backward.register_fake
def _(
    dy: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    gates, started, divisor = rest[:2], rest[7], rest[10]
    of_gates = (None if u is None else u.new_empty(u.shape) for u in gates)
    shape = (k.shape[0], k.shape[2], q.shape[3], v.shape[3] + int(divisor == "sum"))
    d_initial = q.new_empty(shape, dtype=torch.float32) if started else None
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *of_gates, d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    q, k, v, input_gate, log_forget, before, initial, *ctx.call, ctx.return_state = inputs
    ctx.started = initial is not None
    y, _, stat, rest, *states = output
    ctx.save_for_backward(q, k, v, input_gate, log_forget, before, y, stat, rest, *states)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, d_state: Tensor | None, *_: Any) -> tuple[Any, ...]:
    d_state = d_state if ctx.return_state else None  # when traced, an empty state has a gradient too
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
