"""Plans of earlier calls, by everything that the checks of a call and the choice of its program depend on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.forms.tracing import is_tracing
from maclaurin.programs.by_heads import HeadSplit
from maclaurin.programs.plan import Plan
from maclaurin.programs.request import Options
from maclaurin.spec.head_groups import LayerAttention
from maclaurin.spec.part import after_registration

Value = TypeVar("Value")

#: key of a call → its plan
PLANS: dict[Hashable, Plan] = {}
#: key of a call for heads that differ → plans of the groups that run together, and the heads of each call
LAYERS: dict[Hashable, tuple[dict[tuple[int, ...], Plan], HeadSplit]] = {}
_MOST_PLANS = 4096


def remember(known: dict[Hashable, Value], key: Hashable, found: Value) -> None:
    """Keep it for later calls with the same key."""
    if len(known) >= _MOST_PLANS:
        known.clear()
    known[key] = found


def forget_plans() -> None:
    """Clear both caches."""
    PLANS.clear()
    LAYERS.clear()


after_registration(forget_plans)


def plan_key(spec: Hashable, inputs: Inputs, state: State | None, options: Options) -> Hashable | None:
    """The cache key of a call: all that checks and the choice of a program depend on. None: do not cache.

    It is computed at every call, so it must be cheap. Options of another type than usual may equal the usual
    ones (2.0 and 2), or have no hash: they are checked every time.
    """
    return_state, _, causal, cuts, longest, mask, form, chunk_size, _, _, state_budget, unnamed = options
    if is_tracing():
        return None
    q, k, v, gates, present = inputs
    if type(form) is not str or (chunk_size is not None and type(chunk_size) is not int):
        return None
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return None
    if state is not None and not isinstance(state, State):
        return None
    grad = torch.is_grad_enabled()
    key = (
        spec, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, grad and (q.requires_grad or k.requires_grad or v.requires_grad),
        return_state, causal, form, chunk_size, state_budget, unnamed,
    )  # fmt: skip
    for name, gate in gates.items():
        if not isinstance(gate, Tensor):
            return None
        key += (name, gate.shape, gate.dtype, gate.device, grad and gate.requires_grad)
    if cuts is not None:
        if not isinstance(cuts, Tensor) or not (longest is None or type(longest) is int):
            return None
        key = (key, cuts.shape, cuts.dtype, cuts.device, longest)
    for absence, given in (("mask", mask), ("present", present)):
        if given is not None:
            if not isinstance(given, Tensor):
                return None
            key = (key, absence, given.shape, given.dtype, given.device)
    return key if state is None else (*key, state.signature())


def layer_key(
    layer: LayerAttention, inputs: Inputs, states: Sequence[State] | None, options: Options
) -> Hashable | None:
    """The cache key of a call for heads that differ; None: do not cache. Single steps never run together."""
    if states is not None and isinstance(inputs.k, Tensor) and inputs.k.shape[1:2] == (1,):
        return None
    key = plan_key(layer.groups, inputs, None, options)
    if key is not None and states is not None:
        if not isinstance(states, list | tuple) or not all(isinstance(state, State) for state in states):
            return None
        key = (key, tuple(state.signature() for state in states))
    return key
