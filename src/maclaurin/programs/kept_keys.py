"""Exact keys alone (window, sinks, keys kept after they leave it) on a fused program (triton/kept_keys.py).

    y_t = Σ_s p_ts v_s,     p the softmax over the keys with s ≤ t < until_s

Which keys are kept is decided first, by the attention each received in the window, without a gradient. Then
one number per key, until_s, says which queries see it, and the rest is softmax attention.

A text that continues from a state is one text with the exact keys of the state before its tokens: it sees no
other old keys.

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
    from maclaurin.programs.triton.exact_step import Held
    from maclaurin.programs.triton.kept_keys import ExactOfHeads, GroupOfHeads

#: slots and sinks the step compares at once, and the head size it supports (triton/exact_step.py)
_MOST_SLOTS, _MOST_SINKS = 8192, 64


class KeptKeys(Program):
    """A text, or more of one, under a window without a tail; optionally with kept keys and a state."""

    name = "kept keys"
    backend = "triton"
    form = Form.CHUNKED
    takes_groups = True

    def cannot(self, call: Call) -> str | None:
        return first_reason(
            lambda: _refuse_specs(call),
            lambda: "one more token is a step" if call.is_step else None,
            lambda: _refuse_carried_state(call) if call.carries_state else None,
            lambda: _refuse_dtypes_of_states(call),
            lambda: refuse_tensors(call),
        )

    def cost(self, call: Call) -> Cost:
        """A pass over the exact keys; with kept keys, two over the window and a comparison of all scores.

        After a state, its keys are copied to those of the text.
        """
        batch, tokens, _, d = call.inputs.q.shape
        e, total = call.inputs.v.shape[3], Cost(0.0, 0.0, 12, 0.0)
        size = call.inputs.k.dtype.itemsize
        for spec, kv_heads in call.specs_of_heads:
            window = spec.window
            assert window is not None
            rows = float(batch * tokens * kv_heads * call.group)
            before = 0 if call.state is None else window.slots
            keys = before + tokens
            near, seen = min(window.size + 64, keys), min(window.slots + 64, keys)
            flops = 2 * rows * seen * (d + e)
            lists = 4.0 * batch * kv_heads * (tokens / 64) * seen
            copied = float(batch * kv_heads * keys * (d + e) * size) if before else 0.0
            if window.kept:  # a comparison takes as long as about 30 matrix operations
                flops += 4 * rows * near * d + 30.0 * batch * kv_heads * keys * keys
            total = Cost(
                total.flops + flops,
                total.bytes + 2 * (lists + copied),
                12,
                total.peak_bytes + lists + copied + 8 * rows,
            )
        return total

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        kv_heads = call.inputs.k.shape[2]
        y, states = _read(call, _numbers_of(call.spec, kv_heads), ((kv_heads, call.spec),))
        return y, states[0] if states else None

    def run_groups(self, call: Call) -> tuple[Tensor, tuple[State, ...]]:
        return _read(call, _numbers_of_groups(call.groups), _specs_of_groups(call.groups))


#: number of heads and spec of each group
_Groups = tuple[tuple[int, AttentionSpec], ...]


def _read(call: Call, exact: list[int], groups: _Groups) -> tuple[Tensor, tuple[State, ...]]:
    """y [B, T, H, e] and, if asked for, the state of each group.

    `exact`: window, sinks and slots of each key-value head, one after the other.
    """
    spec, inputs = call.spec, call.inputs
    with without_autocast(call.device):
        q, k, v = operands(spec, inputs)
        if call.needs_gradient or are_traced((q,)):
            assert not call.carries_state
            y, states = _rows(q, k, v, call.scale, exact), ()
        else:
            y, states = _rows_and_states(q, k, v, call, exact, groups)
        return finish_rows(spec, y, inputs.gates, inputs.q.dtype), states


def _rows(q: Tensor, k: Tensor, v: Tensor, scale: float, exact: list[int]) -> Tensor:
    """y [B, T, H, e], with gradients."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    until, _ = key_lifetimes(q.detach(), k.detach(), scale, exact)
    o, _ = attention_while_seen(q, k, v, until, scale, exact)
    return o.transpose(1, 2)


def _rows_and_states(
    q: Tensor, k: Tensor, v: Tensor, call: Call, exact: list[int], groups: _Groups
) -> tuple[Tensor, tuple[State, ...]]:
    """y [B, T, H, e] and the states after the last real token: windows, sinks, and kept keys."""
    from maclaurin.programs.triton import kept_keys as program

    of_heads = _groups_of_heads(groups) if call.return_state else ()
    before, present = call.states, call.inputs.present
    lengths = None if present is None or not call.return_state else present.sum(1)
    earlier = tuple(program.Before(state.count.contiguous(), _held(state)) for state in before)
    y, found = program.read(q, k, v, call.scale, _by_head(exact), of_heads, lengths, earlier)
    if not found:
        return y, ()
    batch, tokens, _, d = q.shape
    count = _count(batch, tokens, q.device) if lengths is None else lengths
    least = tokens if present is None else 0
    states = []
    for number, ((heads, spec), group, keys) in enumerate(zip(groups, of_heads, found, strict=True)):
        after = State(
            spec,
            _no_moments(batch, heads, _moments_size(spec, d, v.shape[3]), q.device),
            before[number].count + count if before else count,
            exact=ExactKeys(**keys),
            is_full=least >= group.exact.most or (bool(before) and before[number].is_full),
        )
        states.append(after)
    return y, tuple(states)


def _held(state: State) -> Held:
    """The contents of a state as programs take them: contiguous tensors."""
    from maclaurin.programs.triton.exact_step import Held

    given = {name: getattr(state.exact, name) for name in Held._fields}
    contiguous: Any = {name: None if u is None else u.contiguous() for name, u in given.items()}
    return Held(**contiguous)


@lru_cache(maxsize=64)
def _count(batch: int, tokens: int, device: torch.device) -> Tensor:
    """The number of tokens of each text [B]; no state changes it, so all share it."""
    with torch.inference_mode(False):
        return torch.full((batch,), tokens, device=device)


@lru_cache(maxsize=1024)
def _specs_of_groups(groups: tuple[HeadGroup, ...]) -> _Groups:
    return tuple((len(group.heads), group.spec) for group in groups)


@lru_cache(maxsize=1024)
def _groups_of_heads(groups: _Groups) -> tuple[GroupOfHeads, ...]:
    from maclaurin.programs.triton.kept_keys import GroupOfHeads

    return tuple(GroupOfHeads(heads, *_each_head(tuple(_numbers_of(spec, 1)))) for heads, spec in groups)


@lru_cache(maxsize=1024)
def _moments_size(spec: AttentionSpec, d: int, e: int) -> tuple[int, int]:
    return spec.features(d), e + int(spec.needs_row_sum)


@lru_cache(maxsize=1024)
def _no_moments(batch: int, heads: int, size: tuple[int, int], device: torch.device) -> Tensor:
    """Moments of a kernel without orders: no numbers, so all states share them."""
    with torch.inference_mode(False):
        found = torch.zeros(batch, heads, *size, device=device)
    assert found.numel() == 0
    return found


@lru_cache(maxsize=1024)
def _numbers_of(spec: AttentionSpec, kv_heads: int) -> list[int]:
    """Window, sinks and slots for kept keys, the same for each key-value head."""
    window = spec.window
    assert window is not None
    return [window.size, window.sinks, window.kept] * kv_heads


@lru_cache(maxsize=1024)
def _numbers_of_groups(groups: tuple[HeadGroup, ...]) -> list[int]:
    return [number for group in groups for number in _numbers_of(group.spec, len(group.heads))]


class ExactStep(Program):
    """One more token with exact keys and no tail, over the row sum or under a norm.

    In two launches, with the keys of a head split over the GPU.
    """

    name = "exact step"
    backend = "triton"
    form = Form.RECURRENT
    has_fixed_work = True

    def cannot(self, call: Call) -> str | None:
        spec = call.spec
        return first_reason(
            lambda: refuse_step(call),
            lambda: _refuse_spec(spec),
            lambda: _refuse_slots(spec.window),
            lambda: "it does not support value gates" if spec.value_gates else None,
            lambda: refuse_head_size(call),
            lambda: _refuse_dtypes_of_states(call),
        )

    def cost(self, call: Call) -> Cost:
        """Exact keys are read and written once."""
        size = _exact_bytes(call)
        return Cost(0.0, 2 * size, 2, size)

    def run(self, call: Call) -> tuple[Tensor, State | None]:
        from maclaurin.programs.triton.exact_step import step

        spec, inputs, state = call.spec, call.inputs, call.state
        assert state is not None
        assert state.exact is not None
        q, k, v = (gpu.dense(u[:, 0]) for u in (inputs.q, inputs.k, inputs.v))
        y, count, after = step(q, k, v, state.count.contiguous(), _held(state), call.scale)
        exact = dataclasses.replace(state.exact, **after._asdict())
        y = finish_rows(spec, y, inputs.gates, inputs.q.dtype)
        return y, dataclasses.replace(state, count=count, exact=exact)


def _exact_bytes(call: Call) -> float:
    """Bytes of the exact keys and values of a state."""
    window, k, v = call.spec.window, call.inputs.k, call.inputs.v
    assert window is not None
    return float(k.shape[0] * k.shape[2] * window.slots * (k.shape[3] + v.shape[3]) * k.dtype.itemsize)


def _refuse_spec(spec: AttentionSpec) -> str | None:
    window = spec.window
    if window is None:
        return "it supports only windows"
    if not spec.kernel.is_zero:
        return "it supports no tail beside the exact keys"
    if window.has_bias:
        return f"it does not compute the bias of {window}"
    if spec.decay_gates or spec.running_argument is not None:
        return "it does not support decay gates or a running sum"
    if not spec.rows_are_means:
        return f"it does not divide by {spec.denominator}"
    return None


def _refuse_specs(call: Call) -> str | None:
    for each, _ in call.specs_of_heads:
        why = _refuse_spec(each)
        if why is not None:
            return why
    return None


def _refuse_carried_state(call: Call) -> str | None:
    """Why such a text cannot continue from a state or return one; None if it can."""
    if are_traced((call.inputs.q,)):
        return "it cannot be traced with a state"
    if call.spec.value_gates:
        return "it supports no state with a value gate"
    return "it has no backward pass with a state" if call.needs_gradient else None


def _refuse_slots(window: Window | None) -> str | None:
    """Why a step does not take such a window; None if it does."""
    if window is not None and (window.kept > _MOST_SLOTS or window.sinks > _MOST_SINKS):
        return f"it supports up to {_MOST_SLOTS} slots and {_MOST_SINKS} sinks"
    return None


def _refuse_dtypes_of_states(call: Call) -> str | None:
    """Why programs do not take such states; None if they do."""
    for state in call.states:
        exact = state.exact
        same = exact is not None and exact.recent_k.dtype == exact.recent_v.dtype == call.inputs.q.dtype
        if not same:
            return "it needs exact keys in the dtype of q"
    return None


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
