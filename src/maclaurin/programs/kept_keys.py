"""Exact keys alone (window, sinks, keys kept after they leave it) on a fused program (triton/kept_keys.py).

    y_t = Σ_s p_ts v_s,     p the softmax over the keys with s ≤ t < until_s

Which keys are kept is decided first, by the attention each received in the window, without a gradient. Then
one number per key, until_s, says which queries see it, and the rest is softmax attention.

Heads of a layer may have different memories (spec/head_groups.py). Groups of heads that differ only in their
window run together, in the launches of one (`attend_together`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.exact_keys import ExactKeys
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.forms.tracing import are_traced, without_autocast
from maclaurin.programs import triton as gpu
from maclaurin.programs.decode_step import refuse_step
from maclaurin.programs.operands import finish_rows, operands, refuse_head_size, refuse_tensors
from maclaurin.programs.operators import operator
from maclaurin.programs.program import Call, Cost, Program
from maclaurin.spec import AttentionSpec

if TYPE_CHECKING:
    from maclaurin.programs.triton.kept_keys import ExactOfHeads

#: slots and sinks the step compares at once, and the head size it supports (triton/kept_keys_step.py)
_MOST_SLOTS, _MOST_SINKS = 8192, 64


class KeptKeys(Program):
    """A text from its start under a window without a tail; optionally with kept keys and a state after it."""

    name = "kept keys"
    backend = "triton"
    form = Form.CHUNKED

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        why = _refuse_spec(spec)
        if why is not None:
            return why
        if call.state is not None:
            return "it does not continue from a state"
        if call.return_state and call.inputs.present is not None:
            return "it returns no state with padding"
        if call.return_state and are_traced((call.inputs.q,)):
            return "it cannot be traced with a state"
        if call.return_state and spec.value_gates:
            return "it returns no state with a value gate"
        if call.return_state and call.needs_gradient:
            return "it has no backward pass with a state"
        return refuse_tensors(call)

    def cost(self, call: Call) -> Cost:
        """A pass over the exact keys; with kept keys, two over the window and a comparison of all scores."""
        window = call.spec.window
        assert window is not None
        batch, tokens, heads, d = call.inputs.q.shape
        kv_heads, e = call.inputs.k.shape[2], call.inputs.v.shape[3]
        rows = float(batch * tokens * heads)
        near, seen = min(window.size + 64, tokens), min(window.slots + 64, tokens)
        flops = 2 * rows * seen * (d + e)
        lists = 4.0 * batch * kv_heads * (tokens / 64) * seen
        if window.kept:  # a comparison takes as long as about 30 matrix operations
            flops += 4 * rows * near * d + 30.0 * batch * kv_heads * tokens * tokens
        return Cost(flops, 2 * lists, 12, lists + 8 * rows)

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        q, k, v = operands(call.spec, call.inputs)
        y, until, score = _rows(call, q, k, v, [call.spec] * k.shape[2])
        return y, _state_after(call.spec, _count(k), k, v, until, score) if call.return_state else None


def _rows(
    call: Call, q: Tensor, k: Tensor, v: Tensor, specs: Sequence[AttentionSpec]
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, H, e], and until and scores [B, K, T]; specs of key-value heads differ only in windows."""
    exact = [number for spec in specs for number in _numbers(spec)]
    with without_autocast(call.device):
        q, k, v = (u.transpose(1, 2) for u in (q, k, v))
        until, score = key_lifetimes(q.detach(), k.detach(), call.scale, exact)
        o, _ = attention_while_seen(q, k, v, until, call.scale, exact)
        y = finish_rows(specs[0], o.transpose(1, 2), call.inputs.gates, call.inputs.q.dtype)
    return y, until, score


def _numbers(spec: AttentionSpec) -> tuple[int, int, int]:
    """Window, sinks and slots for kept keys."""
    window = spec.window
    assert window is not None
    return window.size, window.sinks, window.kept


# ------------------------------------------------------------------------------- groups of heads together


def attend_together(
    specs: Sequence[AttentionSpec],
    heads: Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_states: bool = False,
) -> tuple[Tensor, list[State]]:
    """y [B, T, H, e] of groups of key-value heads, and the state of each group after the text.

    Groups follow each other in q, k and v; group i has the spec specs[i] and heads[i] key-value heads.
    programs/by_heads.py finds the groups that can run together.
    """
    every = [spec for spec, number in zip(specs, heads, strict=True) for _ in range(number)]
    scale = specs[0].kernel.default_scale(q.shape[3])
    call = Call(specs[0], Inputs(q, k, v), scale, q.device, return_state=return_states)
    y, until, score = _rows(call, *operands(specs[0], call.inputs), every)
    if not return_states:
        return y, []
    of_groups = [u.split(list(heads), dim=n) for u, n in ((k, 2), (v, 2), (until, 1), (score, 1))]
    count = _count(k)
    return y, [_state_after(spec, count, *group) for spec, *group in zip(specs, *of_groups, strict=True)]


class KeptStep(Program):
    """One more token with kept keys and no tail, over the row sum or under a norm."""

    name = "kept step"
    backend = "triton"
    form = Form.RECURRENT

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        why = refuse_step(call)
        if why is None:
            why = _refuse_spec(spec)
        if why is not None:
            return why
        window = spec.window
        assert window is not None
        if not window.kept:
            return "it supports only windows with kept keys"
        if window.kept > _MOST_SLOTS or window.sinks > _MOST_SINKS:
            return f"it supports up to {_MOST_SLOTS} slots and {_MOST_SINKS} sinks"
        if spec.value_gates:
            return "it does not support value gates"
        return refuse_head_size(call)

    def cost(self, call: Call) -> Cost:
        """Exact keys are read and written once."""
        window, k, v = call.spec.window, call.inputs.k, call.inputs.v
        assert window is not None
        size = float(k.shape[0] * k.shape[2] * window.slots * (k.shape[3] + v.shape[3]))
        return Cost(2 * size * call.group, 2 * size * k.dtype.itemsize, 2, size * k.dtype.itemsize)

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        from maclaurin.programs.triton import kept_keys_step as program

        spec, inputs, state = call.spec, call.inputs, call.state
        assert state is not None
        assert state.exact is not None
        q, k, v = (gpu.dense(u[:, 0]) for u in (inputs.q, inputs.k, inputs.v))
        held = program.Held(*(getattr(state.exact, name).contiguous() for name in program.Held._fields))
        y, count, held = program.step(q, k, v, state.count.contiguous(), held, call.scale)
        exact = dataclasses.replace(state.exact, **held._asdict())
        y = finish_rows(spec, y, inputs.gates, inputs.q.dtype)
        return y, dataclasses.replace(state, count=count, exact=exact)


def _refuse_spec(spec: AttentionSpec) -> str | None:
    window = spec.window
    if window is None:
        return "it supports only windows"
    if spec.kernel.orders:
        return "it supports no tail beside the exact keys"
    if window.has_bias:
        return f"it does not compute the bias of {window}"
    if spec.decay_gates or spec.running_argument is not None:
        return "it does not support decay gates or a running sum"
    if not spec.ignores_row_scale:
        return f"it does not divide by {spec.denominator}"
    return None


def _count(k: Tensor) -> Tensor:
    """The number of tokens of each text [B]; states of several groups share it."""
    return torch.full((k.shape[0],), k.shape[1], device=k.device)


def _state_after(
    spec: AttentionSpec, count: Tensor, k: Tensor, v: Tensor, until: Tensor, score: Tensor
) -> State:
    """The state after the last token: window, sinks, and the kept keys; k and v are [B, T, K, ·]."""
    from maclaurin.programs.triton import kept_keys as program

    k, v = k.transpose(1, 2), v.transpose(1, 2)
    batch, kv_heads, tokens, d = k.shape
    exact = program.Exact(*_numbers(spec))
    found = program.exact_keys(k, v, until, score, exact)
    columns = v.shape[3] + int(spec.needs_row_sum)
    return State(
        spec,
        score.new_zeros(batch, kv_heads, spec.features(d), columns),
        count,
        exact=ExactKeys(**found),
        is_full=tokens >= exact.most,
    )


# -------------------------------------------------------------------------------- the operators


@operator("maclaurin::key_lifetimes")
def key_lifetimes(q: Tensor, k: Tensor, scale: float, exact: list[int]) -> tuple[Tensor, Tensor]:
    """The first query that no longer sees each key [B, K, T], and the attention it received in the window.

    `exact`: window, sinks and slots of each key-value head, one after the other.
    """
    from maclaurin.programs.triton import kept_keys as program

    return program.lifetimes(q, k, scale, _by_head(exact))


@operator("maclaurin::attention_while_seen")
def attention_while_seen(
    q: Tensor, k: Tensor, v: Tensor, until: Tensor, scale: float, exact: list[int]
) -> tuple[Tensor, Tensor]:
    """o [B, H, T, e] and lse [B, H, T] for q [B, H, T, d] and k, v [B, K, T, ·]."""
    from maclaurin.programs.triton import kept_keys as program

    return program.forward(q, k, v, until, scale, _by_head(exact))


@operator("maclaurin::attention_while_seen_backward")
def attention_while_seen_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    until: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    exact: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    from maclaurin.programs.triton import kept_keys as program
    from maclaurin.programs.triton.rows import delta

    return program.backward(do, q, k, v, until, lse, delta(do, o, None), scale, _by_head(exact))


def _by_head(exact: list[int]) -> ExactOfHeads:
    from maclaurin.programs.triton.kept_keys import Exact

    return tuple(Exact(*exact[n : n + 3]) for n in range(0, len(exact), 3))


@key_lifetimes.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (k.shape[0], k.shape[1], k.shape[2])
    return k.new_empty(shape, dtype=torch.int32), k.new_empty(shape, dtype=torch.float32)


@attention_while_seen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _size = q.shape
    o = v.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
    return o, q.new_empty(batch, heads, tokens, dtype=torch.float32)


@attention_while_seen_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, until, *ctx.call = inputs
    ctx.save_for_backward(q, k, v, until, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The log-sum-exp gets no gradient: no spec uses it."""
    if do is None:
        return (None,) * 6
    q, k, v, until, o, lse = ctx.saved_tensors
    found = attention_while_seen_backward(gpu.dense(do), q, k, v, until, o, lse, *ctx.call)
    return *found, *(None,) * 3


attention_while_seen.register_autograd(_backward, setup_context=_save)

KEPT_KEYS = KeptKeys()
