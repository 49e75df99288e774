"""Check the arguments of `attention` and raise clear errors: what came, why it cannot work, what would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maclaurin.errors import InputError, StateBudgetError
from maclaurin.forms.packing import check_cu_seqlens
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs, working_dtype
from maclaurin.spec import Argument, AttentionSpec, Part
from maclaurin.spec.head_groups import LayerAttention
from maclaurin.spec.part import KEYWORDS, registered
from maclaurin.wording import did_you_mean


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q is [B, T, H, d], k [B, S, Hkv, d], v [B, S, Hkv, e], of one dtype, on one device."""
    for name, u in (("q", q), ("k", k), ("v", v)):
        if not isinstance(u, Tensor):
            raise InputError(f"{name} must be a torch tensor, not {type(u).__name__}.")
        if u.dim() != 4:
            raise InputError(
                f"{name} must be [batch, tokens, heads, size], got {_shape(u)} with {u.dim()} axes."
            )
        if not u.is_floating_point():
            raise InputError(f"{name} must be floating point, got {u.dtype}.")
        if 0 in u.shape:
            raise InputError(f"{name} is empty: {_shape(u)}; every axis must be at least 1.")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise InputError(
            f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them to one."
        )
    if len({q.device, k.device, v.device}) > 1:
        raise InputError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}.")
    if k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"k and v must agree in batch, tokens and heads, got k {_shape(k)} and v {_shape(v)}."
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"q and k must agree in batch and size, got q {_shape(q)} and k {_shape(k)}.")
    if q.shape[2] % k.shape[2]:
        raise InputError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}: the query heads must be a multiple of "
            "the key-value heads."
        )


#: from this many heads, fewer than half as many tokens look like swapped axes
_MANY_HEADS = 96


def check_not_swapped(q: Tensor, k: Tensor, *, causal: bool) -> None:
    """Raise where the shapes look like [B, heads, tokens, size], the order of torch's own attention."""
    if not all(isinstance(u, Tensor) and u.dim() == 4 and u.numel() for u in (q, k)):
        return  # another error follows
    tokens, heads = q.shape[1], q.shape[2]
    more_queries = causal and heads == k.shape[2] and tokens > k.shape[1] and tokens % k.shape[1] == 0
    many_heads = heads >= _MANY_HEADS and tokens == k.shape[1] and 2 < 2 * tokens < heads
    if more_queries or many_heads:
        raise InputError(
            f"q {_shape(q)} and k {_shape(k)} would be {tokens} and {k.shape[1]} tokens in {heads} and "
            f"{k.shape[2]} heads. Is that [batch, heads, tokens, size], the order of torch's "
            'scaled_dot_product_attention? Then pass layout="bhtd"; if it is [batch, tokens, heads, size], '
            'pass layout="bthd".'
        )


def is_heads_first(layout: str) -> bool:
    """Whether heads come before tokens."""
    if layout not in ("bthd", "bhtd"):
        raise InputError(
            'layout is "bthd" for [batch, tokens, heads, size] or "bhtd" for [batch, heads, tokens, size], '
            f"not {layout!r}."
        )
    return layout == "bhtd"


def tokens_first(
    q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Tensor]]:
    """Tensors with heads before tokens, as views with tokens before heads."""
    for name, u in (("q", q), ("k", k), ("v", v)):
        if not isinstance(u, Tensor) or u.dim() != 4:
            shown = _shape(u) if isinstance(u, Tensor) else type(u).__name__
            raise InputError(f'{name} must be [batch, heads, tokens, size] with layout="bhtd", got {shown}.')
    try:
        flipped = {name: gate.transpose(1, 2) for name, gate in gates.items()}
    except (AttributeError, IndexError, TypeError, ValueError):
        wrong = {n: g for n, g in gates.items() if not isinstance(g, Tensor) or g.dim() < 3}
        name, gate = next(iter(wrong.items()))
        shown = _shape(gate) if isinstance(gate, Tensor) else type(gate).__name__
        raise InputError(
            f'{name} must be a tensor [batch, heads, tokens] with layout="bhtd", got {shown}.'
        ) from None
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), flipped


def check_gates(spec: AttentionSpec, inputs: Inputs, *, may_miss: bool = False) -> None:
    """Raise unless gates are those that the spec's parts declare; with `may_miss`, some may be absent."""
    for name in inputs.gates:
        if name not in spec.gates:
            raise InputError(_unknown_argument(spec, name))
    for part in spec.parts:
        for argument in part.arguments:
            if may_miss and argument.name not in inputs.gates:
                continue
            _check_gate(spec, part, argument, inputs)


def _check_gate(spec: AttentionSpec, part: Part, argument: Argument, inputs: Inputs) -> None:
    name, gate = argument.name, inputs.gates.get(argument.name)
    tokens = (inputs.q if argument.tokens == "query" else inputs.k).shape[1]
    heads = (inputs.q if argument.heads == "query" else inputs.k).shape[2]
    shape = [inputs.q.shape[0], tokens, heads]
    if gate is None:
        raise InputError(f"{spec} has {part.mark}{part}, so it needs {name} {shape}; none was given.")
    if not isinstance(gate, Tensor):
        raise InputError(f"{name} must be a torch tensor, not {type(gate).__name__}.")
    per_channel = [*shape, inputs.v.shape[3]] if spec.may_be_per_channel(argument) else None
    if list(gate.shape) != shape and (per_channel is None or list(gate.shape) != per_channel):
        either = "" if per_channel is None else f" or {per_channel}"
        raise InputError(f"{name} must be {shape}{either} here, got {_shape(gate)}.")
    if gate.device != inputs.q.device:
        raise InputError(f"{name} is on {gate.device} and q on {inputs.q.device}: move one.")
    if not gate.is_floating_point():
        raise InputError(f"{name} must be floating point, got {gate.dtype}.")


def _unknown_argument(spec: AttentionSpec, name: str) -> str:
    """Why a keyword of `attention` is an error: no part of this spec takes it, or it is misspelt."""
    owner = next((part for argument, part in _known_arguments() if argument.name == name), None)
    if owner is not None:
        symbol = f"{owner.mark}{owner.notation}"
        return f"{name} was given, but {spec} has no {symbol}: leave it out or add {symbol} to the spec."
    takes = f"{spec} takes {', '.join(spec.gates)}" if spec.gates else f"{spec} takes no gates"
    return f"attention has no argument {name!r}, and {takes}." + did_you_mean(name, [*spec.gates, *KEYWORDS])


def _known_arguments() -> list[tuple[Argument, type[Part]]]:
    """The arguments that registered parts take."""
    classes = [c for family in ("gate", "denominator") for c in registered(family).values()]
    return [(a, c) for c in classes if (a := c.declared_argument()) is not None]


def check_layout(
    inputs: Inputs,
    *,
    causal: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    key_padding_mask: Tensor | None,
) -> None:
    """Check padding, packing, and calls with fewer or more queries than keys."""
    q, k = inputs.q, inputs.k
    if cu_seqlens is not None and key_padding_mask is not None:
        raise InputError("cu_seqlens and key_padding_mask both say where tokens are: give one of them.")
    if q.shape[1] != k.shape[1]:
        if cu_seqlens is not None:
            raise InputError(
                f"with packed sequences there must be as many queries as keys, got {q.shape[1]} and "
                f"{k.shape[1]}."
            )
        if causal and q.shape[1] > k.shape[1]:
            raise InputError(
                f"causal attention takes the queries as the last tokens of the keys, but there are "
                f"{q.shape[1]} queries and {k.shape[1]} keys. Use causal=False for cross attention."
            )
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1], max_seqlen)
    mask = key_padding_mask
    if mask is not None and not isinstance(mask, Tensor):
        raise InputError(f"key_padding_mask must be a bool tensor, not {type(mask).__name__}.")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        raise InputError(
            f"key_padding_mask must be bool {list(k.shape[:2])}, True for real tokens; got "
            f"{mask.dtype} {_shape(mask)}."
        )


def check_state(spec: AttentionSpec, state: State, inputs: Inputs, sequences: int) -> None:
    """Raise unless the state belongs to this spec, these heads and this many sequences."""
    if not isinstance(state, State):
        raise InputError(f"state must be one that attention returned, not {type(state).__name__}.")
    if state.spec != spec:
        raise InputError(f"this state belongs to {state.spec}, but the call is for {spec}.")
    batch, kv_heads = state.moments.shape[:2]
    d, e = inputs.k.shape[3], inputs.v.shape[3]
    wanted = (sequences, inputs.k.shape[2], spec.features(d), e + int(spec.needs_row_sum))
    if tuple(state.moments.shape) != wanted:
        raise InputError(
            f"this state is for {batch} sequences and {kv_heads} key-value heads with moments "
            f"{_shape(state.moments)}; these inputs need {list(wanted)}."
        )
    if state.moments.dtype != working_dtype(inputs.q.dtype):
        raise InputError(
            f"this state is kept in {state.moments.dtype}, but inputs in {inputs.q.dtype} need one in "
            f"{working_dtype(inputs.q.dtype)}: cast the inputs or start with a new state."
        )
    if state.exact is not None and state.exact.recent_k.dtype.itemsize < inputs.k.dtype.itemsize:
        raise InputError(
            f"this state keeps keys in {state.exact.recent_k.dtype}, but inputs in {inputs.k.dtype} would "
            "lose precision there: cast the inputs or start with a new state."
        )
    running = spec.running_argument
    if state.running is not None and running is not None and running.heads == "query":
        held, given = state.running.shape[1], inputs.q.shape[2]
        if held != given:
            raise InputError(f"this state is for {held} query heads, but q has {given}.")
    if state.device != inputs.q.device:
        raise InputError(f"the state is on {state.device} and q on {inputs.q.device}: use state.to(…).")


def check_layer(layer: LayerAttention, inputs: Inputs, states: Sequence[State] | None) -> None:
    """Raise unless groups name each key-value head once, and gates and states belong to the groups."""
    check_tensors(inputs.q, inputs.k, inputs.v)
    named, kv_heads = sorted(head for group in layer.groups for head in group.heads), inputs.k.shape[2]
    if named != list(range(kv_heads)):
        raise InputError(
            f"'{layer}' is for the key-value heads {', '.join(map(str, named))}, but k has {kv_heads} heads: "
            f"name each of 0 to {kv_heads - 1} once."
        )
    for group in layer.groups:
        if group.spec.norm is not None and not group.spec.norm.per_head and len(layer.groups) > 1:
            raise InputError(
                f"{group.spec.norm} of '{layer}' is over all heads, which differ here: use a norm per head, "
                "or one attention for all heads."
            )
    known = {name for group in layer.groups for name in group.spec.gates}
    for name in inputs.gates:
        if name not in known:
            raise InputError(_unknown_argument(layer.specs[0], name))
    if states is not None and (not isinstance(states, list | tuple) or len(states) != len(layer.groups)):
        came = f"{len(states)} states" if isinstance(states, list | tuple) else type(states).__name__
        raise InputError(
            f"'{layer}' has {len(layer.groups)} groups of heads, so state must be as many states, one per "
            f"group, as attention returned them; got {came}."
        )


def check_state_budget(
    spec: AttentionSpec,
    inputs: Inputs,
    sequences: int,
    budget: int,
    context: str = "",
    hints: str = "Use a lower order, a smaller d, a window beside a lower order, the parallel form without a "
    "state, or pass a larger state_budget.",
) -> None:
    """Raise if the state would be larger than the budget, before it is allocated."""
    d, e, heads = inputs.k.shape[3], inputs.v.shape[3], inputs.k.shape[2]
    working = working_dtype(inputs.q.dtype).itemsize
    needed = sequences * heads * spec.state_bytes(d, e, own=inputs.k.dtype.itemsize, working=working)
    if needed > budget:
        why = (
            f"the state of {spec} at order {spec.highest_order}, d = {d}, e = {e} takes {needed:,} bytes for "
            f"{sequences} sequences of {heads} heads, over the budget of {budget:,}"
        )
        raise StateBudgetError(f"{context}{why}. {hints}", why)


def as_number(name: str, given: Any) -> float:
    """A number or a tensor with one number, as a float."""
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):
        shown = f"a tensor {_shape(given)}" if isinstance(given, Tensor) else repr(given)
        raise InputError(f"{name} must be a number, got {shown}.") from None


def as_whole_number(name: str, given: Any) -> int:
    """A whole number, as an int."""
    if isinstance(given, bool) or not isinstance(given, int):
        raise InputError(f"{name} must be a whole number, such as 1 << 30, got {given!r}.")
    return given


def _shape(u: Tensor) -> str:
    return str(list(u.shape))
