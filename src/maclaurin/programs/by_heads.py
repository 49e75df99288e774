"""The door for layers whose heads differ: one call for each group of heads, or one for several groups.

Groups whose memory is exact keys alone (a window, sinks, kept keys) and that differ only in their number run
in one call where a text is read from its start on a GPU (`attend_together` of programs/kept_keys.py).
Otherwise a prompt would be read at the speed of the CPU that launches the programs of every group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.forms.tracing import is_tracing
from maclaurin.programs import plan
from maclaurin.programs.decode_step import MOST_FEATURES
from maclaurin.programs.kept_keys import KEPT_KEYS, attend_together
from maclaurin.programs.one_query import refuse_spec
from maclaurin.programs.program import Call
from maclaurin.spec import AttentionSpec
from maclaurin.spec.head_groups import HeadGroup

#: (number of the group, q, k, v, gates) → y, only of the group's own heads
GroupCall = Callable[[int, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]
#: (numbers of the groups, q, k, v) → y, only of their heads, one group after the other
GroupsCall = Callable[[Sequence[int], Tensor, Tensor, Tensor], Tensor]


def attend_by_heads(
    groups: Sequence[HeadGroup],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    call: GroupCall,
    *,
    together: Sequence[int] = (),
    call_together: GroupsCall | None = None,
) -> Tensor:
    """y [B, T, H, e] for q [B, T, H, d], k and v [B, T, Hkv, …] and gates of all heads.

    The groups of `together` run in one call.
    """
    if len(groups) == 1:
        return call(0, q, k, v, dict(gates))
    size = q.shape[2] // k.shape[2]
    outputs, order = [], []
    for numbers in (together, *([n] for n in range(len(groups)) if n not in together)):
        heads = [head for number in numbers for head in groups[number].heads]
        if not heads:
            continue
        of_queries = [head * size + i for head in heads for i in range(size)]
        own = of_heads(q, of_queries), of_heads(k, heads), of_heads(v, heads)
        if numbers is together and call_together is not None:
            outputs.append(call_together(numbers, *own))
        else:
            (number,) = numbers
            of_group = {
                a.name: of_heads(gates[a.name], of_queries if a.heads == "query" else heads)
                for a in groups[number].spec.arguments
            }
            outputs.append(call(number, *own, of_group))
        order += of_queries
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    place = sorted(range(len(order)), key=order.__getitem__)
    return y if place == list(range(len(place))) else of_heads(y, place)


def of_heads(u: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of [B, T, heads, …]: a view if they are adjacent, else a copy."""
    first, last = heads[0], heads[-1]
    if list(heads) == list(range(first, last + 1)):
        return u[:, :, first : last + 1]
    return torch.cat([u[:, :, head : head + 1] for head in heads], dim=2)


def attention_of_groups(
    groups: Sequence[HeadGroup], q: Tensor, k: Tensor, v: Tensor, *, return_states: bool = False
) -> tuple[Tensor, list[State]]:
    """y [B, T, H, e] of groups that `groups_together` found, in one call, and the state of each after it.

    q, k and v hold only the heads of these groups, one group after the other.
    """
    specs, heads = [group.spec for group in groups], [len(group.heads) for group in groups]
    return attend_together(specs, heads, q, k, v, return_states=return_states)


def step_has_fixed_work(spec: AttentionSpec, key_size: int) -> bool:
    """Whether every decoding step launches the same kernels, so that it can be recorded as a graph.

    With a state, features must come from tables; without one, the step must be one query over all keys.
    """
    if spec.has_finite_state:
        return spec.features(key_size) <= MOST_FEATURES
    return refuse_spec(spec) is None


def groups_together(
    groups: Sequence[HeadGroup], q: Tensor, k: Tensor, v: Tensor, *, return_states: bool = False
) -> Sequence[int]:
    """The groups that can run in one call, or none; q, k and v of all heads begin with the text."""
    if len(groups) < 2 or is_tracing():
        return ()
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    specs = tuple(group.spec for group in groups)
    shapes = (q.shape, k.shape, v.shape, q.dtype, q.device)
    return _together(specs, shapes, gradient, return_states, plan.left_out())


@lru_cache(maxsize=1024)
def _together(
    specs: tuple[AttentionSpec, ...],
    shapes: tuple[Any, ...],
    gradient: bool,
    return_states: bool,
    left_out: frozenset[str],
) -> tuple[int, ...]:
    *sizes, dtype, device = shapes
    q, k, v = (torch.empty(n, dtype=dtype, device="meta", requires_grad=gradient) for n in sizes)
    inputs = Inputs(q, k, v)
    found: list[int] = []
    for number, spec in enumerate(specs):
        call = Call(spec, inputs, 1.0, device, return_state=return_states)
        alike = not found or _but_window(spec) == _but_window(specs[found[0]])
        if alike and not spec.arguments and KEPT_KEYS.cannot(call) is None:
            found.append(number)
    return tuple(found) if len(found) > 1 and KEPT_KEYS.name not in left_out else ()


def _but_window(spec: AttentionSpec) -> tuple[Any, ...]:
    """All parts but the window."""
    return tuple(part for part in spec.parts if part is not spec.window)
