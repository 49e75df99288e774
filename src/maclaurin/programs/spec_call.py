"""A call of one spec: its cached plan runs at once; without one it is checked, planned and run.

Padding, and packed sequences that no program reads in place, are first converted to right-padded rows
(forms/packing.py); outputs and states are converted back.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.packing import Batch, Packing, check_cuts, from_cu_seqlens, from_padding_mask, put_back
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.forms.tracing import is_tracing
from maclaurin.programs.plan import Plan, find_plan
from maclaurin.programs.plan_cache import PLANS, plan_key, remember
from maclaurin.programs.program import Call
from maclaurin.programs.request import Options, Request, packing_of
from maclaurin.programs.series import as_series, planned_series
from maclaurin.programs.validate import as_number
from maclaurin.spec import AttentionSpec
from maclaurin.spec.head_groups import HeadGroup

P = ParamSpec("P")
R = TypeVar("R")


def attend_spec(
    spec: AttentionSpec, inputs: Inputs, state: State | None, options: Options
) -> tuple[Tensor, State | None]:
    """`attention` of one spec, with tokens before heads; a cached plan runs at once."""
    if state is not None:
        state = _with_known_fill(state, inputs.k)
    key = plan_key(spec, inputs, state, options)
    known = None if key is None else PLANS.get(key)
    if known is None or known.copies:
        return _after_checks(Request(spec, inputs, state, options), key, known)
    cuts = options.cu_seqlens
    if options.key_padding_mask is not None:
        y, after = _run_in_batches(Request(spec, inputs, state, options))
    else:
        packing = None if cuts is None else _checked_packing(cuts, options.max_seqlen, inputs.q)
        y, after = known.run(planned_call(spec, inputs, state, options, packing))
    return y, _kept(after, inputs.k.shape[1]) if options.return_state else None


def planned_call(
    spec: AttentionSpec,
    inputs: Inputs,
    state: State | None,
    options: Options,
    packing: Packing | None = None,
    groups: tuple[HeadGroup, ...] = (),
    group_states: tuple[State, ...] = (),
) -> Call:
    """A call whose program is known; no form is requested."""
    q, scale = inputs.q, options.scale
    factor = spec.kernel.default_scale(q.shape[3]) if scale is None else as_number("scale", scale)
    return Call(
        spec, inputs, factor, q.device, options.causal, state, options.return_state, None, options.chunk_size,
        packing, groups, group_states,
    )  # fmt: skip


def _after_checks(request: Request, key: Hashable | None, known: Plan | None) -> tuple[Tensor, State | None]:
    """The same after all checks; the plan is cached under the key."""
    request.check()
    if request.needs_series:
        return _outside_of_graphs(_answer_by_series)(request)
    request.check_state()
    y, after = _run_checked(request, key, known)
    return y, _kept(after, request.inputs.k.shape[1]) if request.options.return_state else None


def _checked_packing(cu_seqlens: Tensor, max_seqlen: int | None, q: Tensor) -> Packing:
    """The packing of a call whose shapes are right; on a GPU the program itself checks the cuts."""
    if not cu_seqlens.is_cuda:
        check_cuts(cu_seqlens, q.shape[1], max_seqlen)
    return packing_of(cu_seqlens, max_seqlen, q)


def _kept(after: State | None, tokens: int) -> State:
    """The state to return; views of larger tensors are copied, so that those can be freed."""
    assert after is not None
    return after if tokens == 1 or is_tracing() else after.compact()


def _with_known_fill(state: State, k: Tensor) -> State:
    """The state, marked as full if its window is: then keys are in its tail.

    This is read once, and only if several tokens follow; not for states without a tail.
    """
    if not isinstance(state, State) or state.exact is None or state.is_full:
        return state
    if k.shape[1] == 1 or is_tracing() or state.moments.shape[2] == 0:
        return state
    return dataclasses.replace(state, is_full=bool((state.count >= state.exact.number).all()))


def _outside_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with a graph break in torch.compile; with fullgraph=True, an error."""
    if torch.compiler.is_compiling():
        raise InputError(
            "exp with a state runs as its series, whose order is read from the scores, so one graph cannot "
            "hold it: compile without fullgraph=True, or use taylor(N), whose order is fixed."
        )
    compiler = sys.modules.get("torch._dynamo")  # importing it takes most of a second
    return function if compiler is None else compiler.disable(function)


def _answer_by_series(request: Request) -> tuple[Tensor, State | None]:
    """exp as its series, truncated at an order certified for these scores, in float64."""
    spec, certificate, longest_key = as_series(
        request.spec, _masked_inputs(request), **request.series_options
    )
    wide = request._replace(
        spec=spec,
        inputs=request.inputs.map(torch.Tensor.double),
        options=request.options._replace(scale=request.scale),
    )
    wide.check_state()
    y, after = _run_checked(wide)
    y = y.to(request.inputs.q.dtype)
    if not request.options.return_state:
        return y, None
    after = _kept(after, request.inputs.k.shape[1])
    return y, dataclasses.replace(after, certificate=certificate, key_bound=longest_key)


def _run_checked(
    request: Request, key: Hashable | None = None, known: Plan | None = None
) -> tuple[Tensor, State | None]:
    """Output and state of a call that has been checked; its plan is cached under the key."""
    if not request.is_in_layout:
        return _run_in_batches(request, key)
    call = request.call()
    found = find_plan(call) if known is None else known
    if key is not None:
        remember(PLANS, key, found)
    return _run_in_batches(request) if found.copies else found.run(call)


# ------------------------------------------------------------------------------- padding and packing


def _run_in_batches(request: Request, key: Hashable | None = None) -> tuple[Tensor, State | None]:
    """Output and state, computed in right-padded batches.

    The plan of a call with a padding mask is cached under the key: such a call need not be checked again.
    """
    inputs = request.inputs
    if inputs.q.shape[1] != inputs.k.shape[1]:
        return _run_last_tokens(request, key)
    batches = _batches(request)
    outputs, states = [], []
    for batch in batches:
        rows = inputs.map(batch.take)._replace(present=batch.present)
        before = request.state
        if before is not None and batch.sequences is not None:
            before = before[batch.sequences]
        call = request.call()._replace(inputs=rows, state=before, packing=None)
        found = _plan_of_rows(request, call, key)
        y, after = found.run(call)
        outputs.append(y)
        states.append(after)
    y = put_back(batches, outputs, (inputs.q.shape[0], inputs.q.shape[1]))
    return y, _in_order(batches, states) if request.options.return_state else None


def _run_last_tokens(request: Request, key: Hashable | None) -> tuple[Tensor, State | None]:
    """Queries that are the last tokens, with padding anywhere among the keys."""
    inputs, mask = request.inputs, request.options.key_padding_mask
    assert mask is not None
    absent = ~mask[..., None, None]
    call = request.call()._replace(inputs=inputs._replace(present=mask), packing=None)
    found = _plan_of_rows(request, call, key)
    if not found.program.skips_absent_keys:
        k, v = (u.masked_fill(absent, 0.0) for u in (inputs.k, inputs.v))
        call = call._replace(inputs=call.inputs._replace(k=k, v=v))
    y, after = found.run(call)
    return y.masked_fill(absent[:, -y.shape[1] :], 0.0), after


def _plan_of_rows(request: Request, call: Call, key: Hashable | None) -> Plan:
    """The plan of a call on padded rows, cached by their shape; under `key` too if that has a mask."""
    options = request.options._replace(cu_seqlens=None, max_seqlen=None, key_padding_mask=None)
    of_rows = plan_key(call.spec, call.inputs, call.state, options)
    found = None if of_rows is None else PLANS.get(of_rows)
    if found is None:
        found = find_plan(call)
        if of_rows is not None:
            remember(PLANS, of_rows, found)
    if key is not None and request.options.key_padding_mask is not None:
        remember(PLANS, key, found)
    return found


def _masked_inputs(request: Request) -> Inputs:
    """The inputs with padding of q and k replaced by zeros, to find the largest score."""
    mask = request.options.key_padding_mask
    if mask is None:
        return request.inputs
    batch = from_padding_mask(mask)
    q, k, v = request.inputs.q, request.inputs.k, request.inputs.v
    q = batch.take(q) if q.shape[1] == k.shape[1] else q  # the mask is of keys
    return request.inputs.with_tensors(q, batch.take(k), v)


def _batches(request: Request) -> list[Batch]:
    """How padded or packed tokens are converted to the layout of the programs."""
    cuts, mask = request.options.cu_seqlens, request.options.key_padding_mask
    if cuts is not None:
        tokens = request.inputs.q.shape[1]
        return from_cu_seqlens(cuts.to(request.inputs.q.device), tokens, request.options.max_seqlen)
    assert mask is not None
    return [from_padding_mask(mask)]


def _in_order(batches: list[Batch], states: list[State | None]) -> State:
    """The states of all batches as one, in the order of the packed sequences."""
    merged = State.stack([s for s in states if s is not None])
    if len(batches) == 1:
        return merged
    members = torch.cat([b.sequences for b in batches if b.sequences is not None])
    return merged[torch.argsort(members)]


# ------------------------------------------------------------------------------------------ the plan


def plan_spec(
    spec: AttentionSpec,
    inputs: Inputs,
    state: Any,
    options: Options,
    return_state: bool,
    device: torch.device,
) -> Plan:
    """The plan of a call of one spec. `state` may be True, for a state that does not exist yet."""
    request = Request(spec, inputs, None if isinstance(state, bool) else state, options)
    request.check(for_plan=True)
    note = ""
    if request.needs_series:
        known = inputs if inputs.q.is_meta else _masked_inputs(request)
        series, certificate = planned_series(spec, known, **request.series_options)
        note = f"{spec} with a state runs as its series {series}: {certificate}"
        request = request._replace(spec=series, inputs=inputs.map(torch.Tensor.double))
    request.check_state()
    call = request.call()._replace(device=device, return_state=return_state)
    if state is True:
        call = call._replace(state=State.on_meta(request.spec, request.inputs))
    if options.key_padding_mask is not None:
        call = call._replace(inputs=call.inputs._replace(present=options.key_padding_mask))
    found = find_plan(call)
    return dataclasses.replace(found, note=note) if note else found
