"""`attention`, the one entry point: check the call, find its program, run it.

    attention(…) → Call → Plan → Program.run(call) → y, state

Padding, and packed sequences that no program reads in place, are first converted to the layout that programs
take (forms/packing.py); outputs are converted back.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.attend import Form
from maclaurin.forms.packing import (
    Batch,
    Packing,
    check_cuts,
    from_cu_seqlens,
    from_padding_mask,
    put_back,
)
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.forms.tracing import is_tracing, untraced
from maclaurin.programs.by_heads import HeadsOfPart, HeadSplit, split_heads
from maclaurin.programs.plan import (
    LayerPlan,
    Plan,
    find_plan,
    find_together,
    remember_plan,
    remember_together,
    remembered_plan,
    remembered_together,
)
from maclaurin.programs.program import Call, Program, why_it_must_be_causal
from maclaurin.programs.series import as_series, planned_series, require_recurrent
from maclaurin.programs.validate import (
    as_number,
    as_whole_number,
    check_gates,
    check_layer,
    check_layout,
    check_not_swapped,
    check_state,
    check_state_budget,
    check_tensors,
    is_heads_first,
    tokens_first,
)
from maclaurin.spec import AttentionSpec
from maclaurin.spec.catalogue import resolve
from maclaurin.spec.head_groups import HeadGroup, LayerAttention
from maclaurin.spec.part import after_registration

P = ParamSpec("P")
R = TypeVar("R")
#: bytes a state may take unless the caller allows more
STATE_BUDGET = 1 << 30


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | LayerAttention | str,
    *,
    state: State | Sequence[State] | None = None,
    return_state: Literal[False] = False,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    state: State | None = None,
    return_state: Literal[True],
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> tuple[Tensor, State]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: LayerAttention,
    *,
    state: Sequence[State] | None = None,
    return_state: Literal[True],
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> tuple[Tensor, tuple[State, ...]]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | LayerAttention | str,
    *,
    state: State | Sequence[State] | None = None,
    return_state: bool = False,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, tuple[State, ...]]:
    """y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s ),  y [B, T, H, e].

    Args:
        q: queries [B, T, H, d]. With fewer queries than keys (parallel form, causal) they are the
            last tokens of the text.
        k: keys [B, S, Hkv, d]; H must be a multiple of Hkv.
        v: values [B, S, Hkv, e].
        spec: an AttentionSpec, its notation ("exp/l2"), or a name in the catalogue ("based"). For heads that
            differ, a LayerAttention or its notation ("0,2: exp/sum; *: poly(0)+window(64)/sum").
        state: the state that a previous call with return_state=True returned; the text continues from there.
        return_state: return (y, state) instead of y; for heads that differ, (y, one state per group).
        scale: the factor on q·k; by default the kernel's own, 1/√d for most.
        causal: whether a query sees only keys up to its own.
        cu_seqlens: [n+1] cuts of n sequences packed into one row (B = 1). On a GPU their values are not
            read where a program takes packed sequences in place (`plan` shows it), so the CPU does not
            synchronise with the GPU.
        max_seqlen: the length of the longest, if known; saves reading cu_seqlens.
        key_padding_mask: bool [B, S], True for real tokens; the others have no weight anywhere and
            their outputs are 0.
        form: "auto" (the cheapest), "parallel", "blocked" (parallel, a block of queries at a time),
            "chunked" or "recurrent".
        chunk_size: tokens per chunk; any size gives the same result.
        tolerance: largest error of exp as a truncated series, relative to max|v|.
        score_bound: for exp as a series, a bound on |scale·q·k| for this and all later tokens of
            the text; by default the bound for the tokens so far, which later ones may exceed.
        state_budget: bytes a state may take.
        layout: "bthd", the default, or "bhtd" for tensors in the order of torch's
            scaled_dot_product_attention: q, k, v and y [B, heads, tokens, size], gates [B, heads, tokens].
            Without it, shapes with far more heads than tokens are an error; "bthd" accepts them.
        gates: the tensors that the spec's parts take (`spec.arguments`), by name.
        **named_gates: the same, as keywords:
            input_gate: i, [B, S, Hkv], for *in.
            log_forget: ln f, [B, S, Hkv], for *forget.
            output_gate: o, [B, T, H] or [B, T, H, e], for *out.
            denominator_gate: g, [B, S, H], for /running.
            Your own parts name their own.
    """
    resolved = spec if isinstance(spec, AttentionSpec) else _resolved(spec, k)
    given = gates if type(gates) is dict and not named_gates else _named(gates, named_gates)
    heads_first = layout is not None and is_heads_first(layout)
    if heads_first:
        q, k, v, given = tokens_first(q, k, v, given)
    options = _Options(
        return_state, scale, causal, cu_seqlens, max_seqlen, key_padding_mask, form, chunk_size, tolerance,
        score_bound, state_budget, layout is None,
    )  # fmt: skip
    attend: Any = _attend if isinstance(resolved, AttentionSpec) else _attend_by_heads
    y, after = attend(resolved, Inputs(q, k, v, given), state, options)
    y = y.transpose(1, 2) if heads_first else y
    return (y, after) if return_state else y


class _Options(NamedTuple):
    """The arguments of `attention` besides spec, tensors and state."""

    return_state: bool
    scale: float | None
    causal: bool
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    key_padding_mask: Tensor | None
    form: str
    chunk_size: int | None
    tolerance: float
    score_bound: float | None
    state_budget: int
    #: whether `layout` was left out, so that shapes are checked for swapped axes
    unnamed: bool


def _named(gates: Mapping[str, Tensor] | None, named: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
    """All gates by name; those that are None are left out."""
    if gates is None:
        gates = {}
    elif not isinstance(gates, Mapping):
        raise InputError(
            f"gates must be a dict of tensors by name, as in {{'input_gate': i}}, not {type(gates).__name__}."
        )
    if not named:
        return gates
    return {**gates, **{name: gate for name, gate in named.items() if gate is not None}}


def _attend(
    spec: AttentionSpec, inputs: Inputs, state: State | None, options: _Options
) -> tuple[Tensor, State | None]:
    """`attention` of one spec, with tokens before heads; a cached plan runs at once."""
    if state is not None:
        state = _with_known_fill(state, inputs.k)
    key = _key(spec, inputs, state, options)
    known = None if key is None else remembered_plan(key)
    if known is None or known.copies:
        return _attend_checked(_Request(spec, inputs, state, options), key, known)
    cuts = options.cu_seqlens
    if options.key_padding_mask is not None:
        y, after = _run_in_batches(_Request(spec, inputs, state, options))
    else:
        packing = None if cuts is None else _checked_packing(cuts, options.max_seqlen, inputs.q)
        y, after = known.run(_planned_call(spec, inputs, state, options, packing))
    return y, _kept(after, inputs.k.shape[1]) if options.return_state else None


def _planned_call(
    spec: AttentionSpec,
    inputs: Inputs,
    state: State | None,
    options: _Options,
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


def _attend_checked(
    request: _Request, key: Hashable | None, known: Plan | None
) -> tuple[Tensor, State | None]:
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
    return _packing(cu_seqlens, max_seqlen, q)


# ----------------------------------------------------------------------------------- heads that differ


def _attend_by_heads(
    layer: LayerAttention, inputs: Inputs, states: Sequence[State] | None, options: _Options
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
            y, found = _attend(part.groups[0].spec, own, state, options)
            if found is not None:
                after[number] = found
        outputs.append(y)
    y = split.joined(outputs)
    return y, tuple(after[number] for number in range(len(layer.groups))) if options.return_state else ()


def _run_together(
    program: Program, part: HeadsOfPart, inputs: Inputs, states: Sequence[State] | None, options: _Options
) -> tuple[Tensor, tuple[State, ...]]:
    """Output and states of groups that run together; padding is moved to the right first."""
    mask, shape = options.key_padding_mask, (inputs.q.shape[0], inputs.q.shape[1])
    batch = None if mask is None else from_padding_mask(mask)
    if batch is not None:
        inputs = inputs.map(batch.take)._replace(present=batch.present)
    before = _of_part(part.numbers, states)
    call = _planned_call(
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


_Together = dict[tuple[int, ...], Plan]


def _together(
    layer: LayerAttention, inputs: Inputs, states: Sequence[State] | None, options: _Options
) -> tuple[_Together, HeadSplit]:
    """The groups of a layer that run together, by number, with their plans; and the heads of each call.

    Both are found once per kind of call.
    """
    key = _key_of_layer(layer, inputs, states, options)
    known = None if key is None else remembered_together(key)
    if known is not None:
        return known
    check_layer(layer, inputs, states)
    if key is None or options.cu_seqlens is not None:
        return {}, _split(layer, inputs, ())
    plans = _find_together(layer, inputs, states, options, inputs.q.device)
    found = plans, _split(layer, inputs, plans)
    remember_together(key, found)
    return found


def _key_of_layer(
    layer: LayerAttention, inputs: Inputs, states: Sequence[State] | None, options: _Options
) -> Hashable | None:
    """The cache key of a call for heads that differ; None: do not cache. Single steps never run together."""
    if states is not None and isinstance(inputs.k, Tensor) and inputs.k.shape[1:2] == (1,):
        return None
    key = _key(layer.groups, inputs, None, options)
    if key is not None and states is not None:
        if not isinstance(states, list | tuple) or not all(isinstance(state, State) for state in states):
            return None
        key = (key, tuple(state.signature() for state in states))
    return key


def _find_together(
    layer: LayerAttention,
    inputs: Inputs,
    states: Sequence[Any] | None,
    options: _Options,
    device: torch.device,
    *,
    for_plan: bool = False,
) -> _Together:
    """The groups that run together, with their plans; raises unless every group can run.

    Plans may have states on the meta device, which are not checked.
    """

    def request_of(part: HeadsOfPart) -> _Request:
        before = None if states is None else states[part.numbers[0]]
        return _Request(part.groups[0].spec, _inputs_of(part, inputs), before, options)

    def call_of(request: _Request) -> Call:
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


def _packing(cu_seqlens: Tensor, max_seqlen: int | None, q: Tensor) -> Packing:
    return Packing(cu_seqlens.to(q.device, non_blocking=True).contiguous(), max_seqlen)


def _kept(after: State | None, tokens: int) -> State:
    """The state to return; views of larger tensors are copied, so that those can be freed."""
    assert after is not None
    return after if tokens == 1 or is_tracing() else after.compact()


def _key(spec: Hashable, inputs: Inputs, state: State | None, options: _Options) -> Hashable | None:
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


@overload
def plan(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | str, **options: Any) -> Plan: ...


@overload
def plan(q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, **options: Any) -> LayerPlan: ...


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | LayerAttention | str,
    *,
    state: State | Sequence[State] | bool | None = None,
    return_state: bool = False,
    causal: bool = True,
    form: str = "auto",
    chunk_size: int | None = None,
    device: torch.device | str | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> Plan | LayerPlan:
    """Which program `attention` would run for such a call, and why; it raises the errors of that call.

    Tensors may be on the meta device. state=True plans a call that continues from a state (with one token: a
    decoding step). `device` is where the call would run, by default the device of q, or for meta tensors the
    GPU if there is one. Gates may be left out; those given are checked. For packed sequences it says which
    programs read them in place; only the size of `cu_seqlens` matters.

    Where heads differ, it is a LayerPlan: one plan for each call, and which heads the call is for.

    exp with a state runs as its series. Its order, and so the size of the state, follows from the scores,
    or on the meta device from `score_bound`.
    """
    given = {name: gate for name, gate in _named(gates, named_gates).items() if gate is not None}
    if layout is not None and is_heads_first(layout):
        q, k, v, given = tokens_first(q, k, v, given)
    check_tensors(q, k, v)
    resolved = _resolved(spec, k)
    options = _Options(
        return_state or state is True, scale, causal, cu_seqlens, max_seqlen, key_padding_mask, form,
        chunk_size, tolerance, score_bound, state_budget, layout is None,
    )  # fmt: skip
    where = _planned_device(q, device)
    inputs = Inputs(q, k, v, given)
    if isinstance(resolved, LayerAttention):
        return _plan_by_heads(resolved, inputs, state, options, return_state, where)
    return _plan(resolved, inputs, state, options, return_state, where)


def _plan(
    spec: AttentionSpec,
    inputs: Inputs,
    state: Any,
    options: _Options,
    return_state: bool,
    device: torch.device,
) -> Plan:
    """The plan of a call of one spec. `state` may be True, for a state that does not exist yet."""
    request = _Request(spec, inputs, None if isinstance(state, bool) else state, options)
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


def _plan_by_heads(
    layer: LayerAttention,
    inputs: Inputs,
    states: Any,
    options: _Options,
    return_state: bool,
    device: torch.device,
) -> LayerPlan:
    """The plans of a layer whose heads differ."""
    given = states if isinstance(states, list | tuple) else [states] * len(layer.groups)
    check_layer(layer, inputs, given if isinstance(states, list | tuple) else None)
    together: _Together = {}
    if options.cu_seqlens is None:
        before = _meta_states(layer, inputs) if states is True else states or None
        together = _find_together(layer, inputs, before, options, device, for_plan=True)
    parts = []
    for part in _split(layer, inputs, together).parts:
        found = together.get(part.numbers)
        if found is None:
            number = part.numbers[0]
            own = _inputs_of(part, inputs)
            found = _plan(part.groups[0].spec, own, given[number], options, return_state, device)
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


def _planned_device(q: Tensor, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if q.device.type != "meta":
        return q.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Request(NamedTuple):
    """One call of `attention`, not yet checked."""

    spec: AttentionSpec
    inputs: Inputs
    state: State | None
    options: _Options

    @property
    def carries_state(self) -> bool:
        return self.state is not None or self.options.return_state

    @property
    def is_in_layout(self) -> bool:
        """Whether programs can take the tensors unchanged: no padding mask, no states of packed sequences."""
        options = self.options
        return options.key_padding_mask is None and (options.cu_seqlens is None or not self.carries_state)

    @property
    def asked_form(self) -> Form | None:
        """The form to compute; the chunked form of a kernel without a state is the blocked one."""
        if self.options.form == "auto":
            return None
        try:
            form = Form(self.options.form)
        except ValueError:
            known = ", ".join(["auto", *(f.value for f in Form)])
            raise InputError(f"there is no form {self.options.form!r}; forms are {known}.") from None
        stateless = not self.spec.has_finite_state and not self.needs_series_for(form)
        return Form.BLOCKED if form is Form.CHUNKED and stateless else form

    def needs_series_for(self, form: Form | None) -> bool:
        """Whether exp must run as its truncated series: in recurrent form, or with a state."""
        return (form is Form.RECURRENT or self.carries_state) and self.spec.has_series

    @property
    def needs_series(self) -> bool:
        return self.needs_series_for(self.asked_form)

    @property
    def sequences(self) -> int:
        cuts = self.options.cu_seqlens
        return self.inputs.q.shape[0] if cuts is None else cuts.numel() - 1

    @property
    def scale(self) -> float:
        """The factor on q·k."""
        given = self.options.scale
        default = self.spec.kernel.default_scale(self.inputs.q.shape[3])
        return default if given is None else as_number("scale", given)

    @property
    def series_options(self) -> dict[str, Any]:
        """What the order of a series depends on besides the inputs."""
        return {
            "scale": self.scale,
            "tolerance": self.options.tolerance,
            "score_bound": self.options.score_bound,
            "causal": self.options.causal,
            "state": self.state,
            "sequences": self.sequences,
            "state_budget": self.options.state_budget,
        }

    def check(self, *, for_plan: bool = False) -> None:
        """Raise unless the tensors fit each other, the spec and the form; plans need no gates or cuts."""
        options = self.options
        if options.unnamed and not for_plan:
            check_not_swapped(self.inputs.q, self.inputs.k, causal=options.causal)
        check_tensors(self.inputs.q, self.inputs.k, self.inputs.v)
        check_gates(self.spec, self.inputs, may_miss=for_plan)
        check_layout(
            self.inputs,
            causal=options.causal,
            cu_seqlens=None if for_plan else options.cu_seqlens,
            max_seqlen=options.max_seqlen,
            key_padding_mask=options.key_padding_mask,
        )
        as_whole_number("state_budget", options.state_budget)
        self.check_form()

    def check_form(self) -> None:
        """Raise if the call needs causal attention, a state or the recurrent form, and cannot have it."""
        why = None if self.options.causal else why_it_must_be_causal(self.spec)
        if why is not None:
            raise InputError(f"{why}.")
        if self.asked_form is Form.RECURRENT or self.carries_state:
            require_recurrent(self.spec)
        size = self.options.chunk_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise InputError(f"chunk_size must be a whole number of at least 1, got {size!r}.")

    def check_state(self) -> None:
        """Raise unless the state fits the call and the budget."""
        asked = self.asked_form in (Form.CHUNKED, Form.RECURRENT)
        if self.spec.has_finite_state and (self.carries_state or asked):
            check_state_budget(self.spec, self.inputs, self.sequences, self.options.state_budget)
        if self.state is not None:
            check_state(self.spec, self.state, self.inputs, self.sequences)

    def call(self) -> Call:
        """The call that a program runs."""
        q, options = self.inputs.q, self.options
        cuts = options.cu_seqlens
        return Call(
            self.spec,
            self.inputs,
            self.scale,
            q.device,
            options.causal,
            self.state,
            options.return_state,
            self.asked_form,
            options.chunk_size,
            None if cuts is None else _packing(cuts, options.max_seqlen, q),
        )


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


def _answer_by_series(request: _Request) -> tuple[Tensor, State | None]:
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
    request: _Request, key: Hashable | None = None, known: Plan | None = None
) -> tuple[Tensor, State | None]:
    """Output and state of a call that has been checked; its plan is cached under the key."""
    if not request.is_in_layout:
        return _run_in_batches(request, key)
    call = request.call()
    found = find_plan(call) if known is None else known
    if key is not None:
        remember_plan(key, found)
    return _run_in_batches(request) if found.copies else found.run(call)


# ------------------------------------------------------------------------------- padding and packing


def _run_in_batches(request: _Request, key: Hashable | None = None) -> tuple[Tensor, State | None]:
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


def _run_last_tokens(request: _Request, key: Hashable | None) -> tuple[Tensor, State | None]:
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


def _plan_of_rows(request: _Request, call: Call, key: Hashable | None) -> Plan:
    """The plan of a call on padded rows, cached by their shape; under `key` too if that has a mask."""
    options = request.options._replace(cu_seqlens=None, max_seqlen=None, key_padding_mask=None)
    of_rows = _key(call.spec, call.inputs, call.state, options)
    found = None if of_rows is None else remembered_plan(of_rows)
    if found is None:
        found = find_plan(call)
        if of_rows is not None:
            remember_plan(of_rows, found)
    if key is not None and request.options.key_padding_mask is not None:
        remember_plan(key, found)
    return found


def _masked_inputs(request: _Request) -> Inputs:
    """The inputs with padding of q and k replaced by zeros, to find the largest score."""
    mask = request.options.key_padding_mask
    if mask is None:
        return request.inputs
    batch = from_padding_mask(mask)
    q, k, v = request.inputs.q, request.inputs.k, request.inputs.v
    q = batch.take(q) if q.shape[1] == k.shape[1] else q  # the mask is of keys
    return request.inputs.with_tensors(q, batch.take(k), v)


def _batches(request: _Request) -> list[Batch]:
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


# ---------------------------------------------------------------------------------- specs by name


class _KnownSpecs:
    """Specs by name, and layers by name and number of heads, as attributes.

    torch.compile traces and guards an attribute of a global object one by one; a dict would be
    guarded as a whole, and each new spec would recompile every graph.
    """


_known_specs = _KnownSpecs()


after_registration(lambda: vars(_known_specs).clear())


@untraced
def _parse_once(text: str, kv_heads: int | None) -> bool:
    """Parse outside the traced graph: a spec, or with a number of heads a layer."""
    name = _as_attribute(text, kv_heads)
    if not hasattr(_known_specs, name):
        found = resolve(text) if kv_heads is None else LayerAttention.read(text, kv_heads)
        setattr(_known_specs, name, found)
    return True


def _as_attribute(text: str, kv_heads: int | None) -> str:
    """A name without full stops, which tracing does not accept in the name of an attribute."""
    named = text if kv_heads is None else f"{text} for {kv_heads} heads"
    return named.replace(".", "\u2024")


def _resolved(spec: AttentionSpec | LayerAttention | str, k: Tensor) -> AttentionSpec | LayerAttention:
    if isinstance(spec, AttentionSpec | LayerAttention):
        return spec
    if not isinstance(spec, str):
        raise InputError(
            f"spec must be an AttentionSpec, a notation such as 'exp/sum' or a catalogue name, not {spec!r}."
        )
    if ":" in spec:
        if not isinstance(k, Tensor) or k.dim() != 4:
            raise InputError(f"k must be a tensor [batch, tokens, heads, size], got {type(k).__name__}.")
        kv_heads = int(k.shape[2])
    else:
        kv_heads = None
    _parse_once(spec, kv_heads)
    return getattr(_known_specs, _as_attribute(spec, kv_heads))
