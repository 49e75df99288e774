"""Exact keys alone (window, sinks, keys kept after they leave it) on a fused program (triton/kept_keys.py).

    y_t = Σ_s p_ts v_s,     p the softmax over the keys with s ≤ t < until_s

Which keys are kept is decided first, by the attention each received in the window, without a gradient. Then
one number per key, until_s, says which queries see it, and the rest is softmax attention.

Heads of a layer may have different windows (spec/head_groups.py). Groups of heads that differ only in their
window run together, in the launches of one (`KeptKeys.run_groups`).
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maclaurin.forms.attend import Form
from maclaurin.forms.exact_keys import ExactKeys
from maclaurin.forms.state import State
from maclaurin.forms.tracing import are_traced, without_autocast
from maclaurin.programs import triton as gpu
from maclaurin.programs.custom_operator import operator
from maclaurin.programs.decode_step import refuse_step
from maclaurin.programs.fused_rows import finish_rows, operands, refuse_head_size, refuse_tensors
from maclaurin.programs.program import Call, Cost, Program, first_reason
from maclaurin.spec import AttentionSpec, Window
from maclaurin.spec.head_groups import HeadGroup

if TYPE_CHECKING:
    from maclaurin.programs.triton.kept_keys import ExactOfHeads

#: slots and sinks the step compares at once, and the head size it supports (triton/kept_keys_step.py)
_MOST_SLOTS, _MOST_SINKS = 8192, 64


class KeptKeys(Program):
    """A text from its start under a window without a tail; optionally with kept keys and a state after it."""

    name = "kept keys"
    backend = "triton"
    form = Form.CHUNKED
    takes_groups = True

    def cannot(self, call: Call) -> str | None:
        return first_reason(
            *(_refuse_spec(each) for each, _ in call.specs_of_heads),
            "it does not continue from a state" if call.state is not None else None,
            _refuse_returned_state(call) if call.return_state else None,
            lambda: refuse_tensors(call),
        )

    def cost(self, call: Call) -> Cost:
        """A pass over the exact keys; with kept keys, two over the window and a comparison of all scores."""
        batch, tokens, _, d = call.inputs.q.shape
        e, total = call.inputs.v.shape[3], Cost(0.0, 0.0, 12, 0.0)
        for spec, kv_heads in call.specs_of_heads:
            window = spec.window
            assert window is not None
            rows = float(batch * tokens * kv_heads * call.group)
            near, seen = min(window.size + 64, tokens), min(window.slots + 64, tokens)
            flops = 2 * rows * seen * (d + e)
            lists = 4.0 * batch * kv_heads * (tokens / 64) * seen
            if window.kept:  # a comparison takes as long as about 30 matrix operations
                flops += 4 * rows * near * d + 30.0 * batch * kv_heads * tokens * tokens
            total = Cost(
                total.flops + flops, total.bytes + 2 * lists, 12, total.peak_bytes + lists + 8 * rows
            )
        return total

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        y, k, v, until, score = _rows(call, _numbers_of(call.spec, call.inputs.k.shape[2]))
        if not call.return_state:
            return y, None
        return y, _state_after(call.spec, _count(k), k, v, until, score)

    def run_groups(self, call: Call) -> tuple[Tensor, tuple[State, ...]]:
        y, k, v, until, score = _rows(call, _numbers_of_groups(call.groups))
        if not call.return_state:
            return y, ()
        states, first, count = [], 0, _count(k)
        for group in call.groups:
            number = len(group.heads)
            own = (u.narrow(1, first, number) for u in (k, v, until, score))
            states.append(_state_after(group.spec, count, *own))
            first += number
        return y, tuple(states)


def _rows(call: Call, exact: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, H, e], keys and values [B, K, T, ·], and until and scores [B, K, T].

    `exact`: window, sinks and slots of each key-value head, one after the other.
    """
    with without_autocast(call.device):
        q, k, v = operands(call.spec, call.inputs)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        until, score = key_lifetimes(q.detach(), k.detach(), call.scale, exact)
        o, _ = attention_while_seen(q, k, v, until, call.scale, exact)
        y = finish_rows(call.spec, o.transpose(1, 2), call.inputs.gates, call.inputs.q.dtype)
    return y, k, v, until, score


@lru_cache(maxsize=1024)
def _numbers_of(spec: AttentionSpec, kv_heads: int) -> list[int]:
    """Window, sinks and slots for kept keys, the same for each key-value head."""
    window = spec.window
    assert window is not None
    return [window.size, window.sinks, window.kept] * kv_heads


@lru_cache(maxsize=1024)
def _numbers_of_groups(groups: tuple[HeadGroup, ...]) -> list[int]:
    return [number for group in groups for number in _numbers_of(group.spec, len(group.heads))]


class KeptStep(Program):
    """One more token with kept keys and no tail, over the row sum or under a norm."""

    name = "kept step"
    backend = "triton"
    form = Form.RECURRENT
    has_fixed_work = True

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        return first_reason(
            refuse_step(call),
            _refuse_spec(spec),
            lambda: _refuse_slots(spec.window),
            "it does not support value gates" if spec.value_gates else None,
            lambda: refuse_head_size(call),
        )

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


def _refuse_returned_state(call: Call) -> str | None:
    """Why it cannot return the state after such a text; None if it can."""
    if call.inputs.present is not None:
        return "it returns no state with padding"
    if are_traced((call.inputs.q,)):
        return "it cannot be traced with a state"
    if call.spec.value_gates:
        return "it returns no state with a value gate"
    return "it has no backward pass with a state" if call.needs_gradient else None


def _refuse_slots(window: Window | None) -> str | None:
    """Why a step does not take such a window; None if it does."""
    if window is None or not window.kept:
        return "it supports only windows with kept keys"
    if window.kept > _MOST_SLOTS or window.sinks > _MOST_SINKS:
        return f"it supports up to {_MOST_SLOTS} slots and {_MOST_SINKS} sinks"
    return None


def _count(k: Tensor) -> Tensor:
    """The number of tokens of each text [B], for keys [B, K, T, d]; states of several groups share it."""
    return torch.full((k.shape[0],), k.shape[2], device=k.device)


def _state_after(
    spec: AttentionSpec, count: Tensor, k: Tensor, v: Tensor, until: Tensor, score: Tensor
) -> State:
    """The state after the last token: window, sinks, and the kept keys; k and v are [B, K, T, ·]."""
    from maclaurin.programs.triton import kept_keys as program

    batch, kv_heads, tokens, d = k.shape
    exact = _each_head(tuple(_numbers_of(spec, 1)))[0]
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
    return _each_head(tuple(exact))


@lru_cache(maxsize=1024)
def _each_head(numbers: tuple[int, ...]) -> ExactOfHeads:
    from maclaurin.programs.triton.kept_keys import Exact

    return tuple(Exact(*numbers[n : n + 3]) for n in range(0, len(numbers), 3))


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
