"""A call of a layer whose heads differ: one call for each group of heads, or for groups that run together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from maclaurin.forms.packing import from_padding_mask, put_back
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.programs.by_heads import HeadsOfPart, HeadSplit, split_heads
from maclaurin.programs.plan import LayerPlan, Plan, find_together
from maclaurin.programs.plan_cache import LAYERS, layer_key, remember
from maclaurin.programs.program import Call, Program
from maclaurin.programs.request import Options, Request
from maclaurin.programs.spec_call import attend_spec, plan_spec, planned_call
from maclaurin.programs.validate import check_layer
from maclaurin.spec.head_groups import LayerAttention

#: plans of groups that run together, by their numbers
TogetherPlans = dict[tuple[int, ...], Plan]


def attend_layer(
    layer: LayerAttention, inputs: Inputs, states: Sequence[State] | None, options: Options
) -> tuple[Tensor, tuple[State, ...]]:
    """`attention` of heads that differ: one call for each group of heads, or for groups that run together."""
    together, split = _together(layer, inputs, states, options)
    outputs: list[Tensor] = []
    after: dict[int, State] = {}
    for part in split.parts:
        own = _inputs_of(part, inputs)
        number, *others = part.numbers
        if others:
            y, of_groups = _run_together(together[part.numbers].program, part, own, states, options)
            after |= zip(part.numbers, of_groups, strict=options.return_state)
        else:
            state = None if states is None else states[number]
            y, found = attend_spec(part.groups[0].spec, own, state, options)
            if found is not None:
                after[number] = found
        outputs.append(y)
    y = split.joined(outputs)
    return y, tuple(after[number] for number in range(len(layer.groups))) if options.return_state else ()


def _run_together(
    program: Program, part: HeadsOfPart, inputs: Inputs, states: Sequence[State] | None, options: Options
) -> tuple[Tensor, tuple[State, ...]]:
    """Output and states of groups that run together; padding is moved to the right first."""
    mask, shape = options.key_padding_mask, (inputs.q.shape[0], inputs.q.shape[1])
    batch = None if mask is None else from_padding_mask(mask)
    if batch is not None:
        inputs = inputs.map(batch.take)._replace(present=batch.present)
    before = _of_part(part.numbers, states)
    call = planned_call(
        part.groups[0].spec,
        inputs,
        before[0] if before else None,
        options,
        groups=part.groups,
        group_states=before,
    )
    y, after = program.run_groups(call)
    return y if batch is None else put_back([batch], [y], shape), after


def _of_part(numbers: Sequence[int], states: Sequence[Any] | None) -> tuple[State, ...]:
    """The states of some groups; none at the start of a text."""
    return () if states is None else tuple(states[number] for number in numbers)


def _together(
    layer: LayerAttention, inputs: Inputs, states: Sequence[State] | None, options: Options
) -> tuple[TogetherPlans, HeadSplit]:
    """The groups of a layer that run together, by number, with their plans; and the heads of each call.

    Both are found once per kind of call.
    """
    key = layer_key(layer, inputs, states, options)
    known = None if key is None else LAYERS.get(key)
    if known is not None:
        return known
    check_layer(layer, inputs, states)
    if key is None or options.cu_seqlens is not None:
        return {}, _split(layer, inputs, ())
    plans = _find_together(layer, inputs, states, options, inputs.q.device)
    found = plans, _split(layer, inputs, plans)
    remember(LAYERS, key, found)
    return found


def _find_together(
    layer: LayerAttention,
    inputs: Inputs,
    states: Sequence[Any] | None,
    options: Options,
    device: torch.device,
    *,
    for_plan: bool = False,
) -> TogetherPlans:
    """The groups that run together, with their plans; raises unless every group can run.

    Plans may have states on the meta device, which are not checked.
    """

    def request_of(part: HeadsOfPart) -> Request:
        before = None if states is None else states[part.numbers[0]]
        return Request(part.groups[0].spec, _inputs_of(part, inputs), before, options)

    def call_of(request: Request) -> Call:
        padded = request.inputs._replace(present=options.key_padding_mask)
        return request.call()._replace(device=device, inputs=padded)

    def joint(numbers: tuple[int, ...]) -> Call:
        part = _split(layer, inputs, [numbers]).parts[0]
        before = _of_part(numbers, states)
        return call_of(request_of(part))._replace(groups=part.groups, group_states=before)

    alone = []
    for part in _split(layer, inputs, ()).parts:
        request = request_of(part)
        made_up = request.state is not None and request.state.moments.is_meta
        checked = request._replace(state=None) if made_up else request
        checked.check(for_plan=for_plan)
        if not checked.needs_series:
            checked.check_state()
        alone.append(call_of(request))
    return find_together(alone, joint)


def _split(layer: LayerAttention, inputs: Inputs, together: Collection[tuple[int, ...]]) -> HeadSplit:
    """The heads of each call: groups that run together, then every other group."""
    taken = {number for numbers in together for number in numbers}
    alone = [(number,) for number in range(len(layer.groups)) if number not in taken]
    return split_heads(layer.groups, (*together, *alone), inputs.q.shape[2] // inputs.k.shape[2])


def _inputs_of(part: HeadsOfPart, inputs: Inputs) -> Inputs:
    """The tensors of some groups of heads."""
    q, k, v, gates, _ = inputs
    return Inputs(part.queries.of(q), part.keys.of(k), part.keys.of(v), part.gates(gates))


def plan_layer(
    layer: LayerAttention,
    inputs: Inputs,
    states: Any,
    options: Options,
    return_state: bool,
    device: torch.device,
) -> LayerPlan:
    """The plans of a layer whose heads differ."""
    given = states if isinstance(states, list | tuple) else [states] * len(layer.groups)
    check_layer(layer, inputs, given if isinstance(states, list | tuple) else None)
    together: TogetherPlans = {}
    if options.cu_seqlens is None:
        before = _meta_states(layer, inputs) if states is True else states or None
        together = _find_together(layer, inputs, before, options, device, for_plan=True)
    parts = []
    for part in _split(layer, inputs, together).parts:
        found = together.get(part.numbers)
        if found is None:
            number = part.numbers[0]
            own = _inputs_of(part, inputs)
            found = plan_spec(part.groups[0].spec, own, given[number], options, return_state, device)
        parts.append((part.groups, found))
    return LayerPlan(tuple(parts))


def _meta_states(layer: LayerAttention, inputs: Inputs) -> list[State | None]:
    """A state without data for each group of heads; None for those without a finite state."""
    return [
        State.on_meta(part.groups[0].spec, _inputs_of(part, inputs))
        if part.groups[0].spec.has_finite_state
        else None
        for part in _split(layer, inputs, ()).parts
    ]
