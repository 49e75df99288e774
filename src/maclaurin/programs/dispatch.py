"""`attention`, the one entry point: check the call, find its program, run it.

    attention(…) → Call → Plan → Program.run(call) → y, state

Padding, and packed sequences that no program reads in place, are first converted to the layout that programs
take (forms/packing.py); outputs are converted back.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Literal, ParamSpec, TypeVar, overload

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
from maclaurin.programs.plan import Plan, find_plan, remember_plan, remembered_plan
from maclaurin.programs.program import Call
from maclaurin.programs.series import as_series, planned_series, require_recurrent
from maclaurin.programs.validate import (
    check_gates,
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
    spec: AttentionSpec | str,
    *,
    state: State | None = None,
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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    state: State | None = None,
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
) -> Tensor | tuple[Tensor, State]:
    """y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s ),  y [B, T, H, e].

    Args:
        q: queries [B, T, H, d]. With fewer queries than keys (parallel form, causal) they are the
            last tokens of the text.
        k: keys [B, S, Hkv, d]; H must be a multiple of Hkv.
        v: values [B, S, Hkv, e].
        spec: an AttentionSpec, its notation ("exp/l2"), or a name in the catalogue ("based").
        state: the state that a previous call with return_state=True returned; the text continues from there.
        return_state: return (y, state) instead of y.
        scale: the factor on q·k; by default the kernel's own, 1/√d for most.
        causal: whether a query sees only keys up to its own.
        cu_seqlens: [n+1] cuts of n sequences packed into one row (B = 1). On a GPU their values are not
            read where a program takes packed sequences in place (`plan` shows it), so nothing waits.
        max_seqlen: the length of the longest, if known; saves reading cu_seqlens.
        key_padding_mask: bool [B, S], True for real tokens; the others have no weight anywhere and
            their outputs are 0.
        form: "auto" (the cheapest), "parallel", "blocked" (parallel, a block of queries at a time),
            "chunked" or "recurrent".
        chunk_size: tokens per chunk; any size gives the same answer.
        tolerance: how far exp as a series may be from exp, relative to max|v|.
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
    resolved = spec if isinstance(spec, AttentionSpec) else _resolved(spec)
    given = gates or {}
    if named_gates:
        given = {**given, **{name: gate for name, gate in named_gates.items() if gate is not None}}
    heads_first = layout is not None and is_heads_first(layout)
    if heads_first:
        q, k, v, given = tokens_first(q, k, v, given)
    inputs = Inputs(q, k, v, given)
    if state is not None:
        state = _with_known_fill(state, k)
    key = known = None
    if key_padding_mask is None and not is_tracing():
        unnamed = layout is None  # only then are shapes checked for swapped axes
        key = _key(resolved, inputs, state, return_state, causal, form, chunk_size, state_budget, unnamed)
        if cu_seqlens is not None and key is not None:
            key = _key_of_packed(key, cu_seqlens, max_seqlen)
        known = None if key is None else remembered_plan(key)
        if known is not None and not known.copies:
            factor = resolved.kernel.default_scale(q.shape[3]) if scale is None else float(scale)
            packing = None
            if cu_seqlens is not None:
                if not cu_seqlens.is_cuda:  # there the program itself asserts it
                    check_cuts(cu_seqlens, q.shape[1], max_seqlen)
                packing = _packing(cu_seqlens, max_seqlen, q)
            given = causal, state, return_state, None, chunk_size, packing
            y, after = known.run(Call(resolved, inputs, factor, q.device, *given))
            y = y.transpose(1, 2) if heads_first else y
            return (y, _kept(after, k.shape[1])) if return_state else y
    request = _Request(
        resolved,
        inputs,
        state,
        return_state,
        causal,
        form,
        chunk_size,
        state_budget,
        cu_seqlens,
        max_seqlen,
        key_padding_mask,
    )
    if layout is None:
        check_not_swapped(q, k, causal=causal)
    request.check()
    if request.needs_series:
        answer = _outside_of_graphs(_answer_by_series)(request, scale, tolerance, score_bound)
        if not heads_first:
            return answer
        return (answer[0].transpose(1, 2), answer[1]) if isinstance(answer, tuple) else answer.transpose(1, 2)
    request.check_state()
    y, after = _run_checked(request, scale, key, known)
    y = y.transpose(1, 2) if heads_first else y
    return (y, _kept(after, k.shape[1])) if return_state else y


def _packing(cu_seqlens: Tensor, max_seqlen: int | None, q: Tensor) -> Packing:
    return Packing(cu_seqlens.to(q.device, non_blocking=True).contiguous(), max_seqlen)


def _kept(after: State | None, tokens: int) -> State:
    """The state to return; views of larger tensors are copied, so that those can be freed."""
    assert after is not None
    return after if tokens == 1 or is_tracing() else after.compact()


def _key(
    spec: AttentionSpec,
    inputs: Inputs,
    state: State | None,
    return_state: bool,
    causal: bool,
    form: str,
    chunk_size: int | None,
    state_budget: int,
    unnamed: bool,
) -> Hashable | None:
    """Everything that validity and choice of a program depend on; None: do not cache.

    It is computed at every call, so it must be cheap. Options of another type than usual may equal the usual
    ones (2.0 and 2), or have no hash: they are checked every time.
    """
    q, k, v, gates, _ = inputs
    if type(form) is not str or (chunk_size is not None and type(chunk_size) is not int):
        return None
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return None
    if not isinstance(state, State | None) or not all(isinstance(g, Tensor) for g in gates.values()):
        return None
    grad = torch.is_grad_enabled()
    key = (
        spec, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, grad and (q.requires_grad or k.requires_grad or v.requires_grad),
        return_state, causal, form, chunk_size, state_budget, unnamed,
    )  # fmt: skip
    if gates:
        key += tuple((n, g.shape, g.dtype, g.device, grad and g.requires_grad) for n, g in gates.items())
    return key if state is None else (*key, state.signature())


def _key_of_packed(key: Hashable, cu_seqlens: Tensor, max_seqlen: int | None) -> Hashable | None:
    """The key of a call on packed sequences."""
    if not isinstance(cu_seqlens, Tensor) or not (max_seqlen is None or type(max_seqlen) is int):
        return None
    return key, cu_seqlens.shape, cu_seqlens.dtype, cu_seqlens.device, max_seqlen


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    state: State | bool | None = None,
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
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> Plan:
    """What `attention` would do for such a call, and why; calls that it refuses are refused here.

    Tensors may be on the meta device. state=True plans a call that continues from a state (with one token: a
    decoding step). `device` is where the call would run, by default the device of q, or for meta tensors the
    GPU if there is one. Gates may be left out; those given are checked. For packed sequences it says which
    programs read them in place; only the size of `cu_seqlens` matters.

    exp with a state runs as its series. Its order, and so the size of the state, follows from the scores,
    or on the meta device from `score_bound`.
    """
    resolved = _resolved(spec)
    given = {n: g for n, g in {**(gates or {}), **named_gates}.items() if g is not None}
    check_tensors(q, k, v)
    request = _Request(
        resolved,
        Inputs(q, k, v, given),
        state if isinstance(state, State) else None,
        return_state or state is True,
        causal,
        form,
        chunk_size,
        state_budget,
        cu_seqlens,
        max_seqlen,
        key_padding_mask,
    )
    request.check(for_plan=True)
    note = ""
    if request.needs_series:
        series, certificate = planned_series(
            resolved,
            request.inputs if q.is_meta else _masked_inputs(request),
            scale=request.call(scale).scale,
            tolerance=tolerance,
            score_bound=score_bound,
            causal=causal,
            state=request.state,
            sequences=request.sequences,
            state_budget=state_budget,
        )
        note = f"{resolved} with a state runs as its series {series}: {certificate}"
        request = dataclasses.replace(request, spec=series, inputs=request.inputs.map(torch.Tensor.double))
    request.check_state()
    call = request.call(scale)._replace(device=_planned_device(q, device), return_state=return_state)
    if state is True:
        call = call._replace(state=State.on_meta(request.spec, request.inputs))
    if key_padding_mask is not None:
        call = call._replace(inputs=call.inputs._replace(present=key_padding_mask))
    found = find_plan(call)
    return dataclasses.replace(found, note=note) if note else found


def _planned_device(q: Tensor, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if q.device.type != "meta":
        return q.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of one call of `attention`."""

    spec: AttentionSpec
    inputs: Inputs
    state: State | None
    return_state: bool
    causal: bool
    form: str
    chunk_size: int | None
    state_budget: int = STATE_BUDGET
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    key_padding_mask: Tensor | None = None

    @property
    def carries_state(self) -> bool:
        return self.state is not None or self.return_state

    @property
    def is_in_layout(self) -> bool:
        """Whether programs can take the tensors unchanged: no padding mask, no states of packed sequences."""
        return self.key_padding_mask is None and (self.cu_seqlens is None or not self.carries_state)

    @property
    def asked_form(self) -> Form | None:
        """The form to compute; the chunked form of a kernel without a state is the blocked one."""
        if self.form == "auto":
            return None
        try:
            form = Form(self.form)
        except ValueError:
            known = ", ".join(["auto", *(f.value for f in Form)])
            raise InputError(f"there is no form {self.form!r}; known are {known}.") from None
        stateless = not self.spec.has_finite_state and not self.needs_series_for(form)
        return Form.BLOCKED if form is Form.CHUNKED and stateless else form

    def needs_series_for(self, form: Form | None) -> bool:
        """exp in recurrent form, or with a state, runs as its truncated series."""
        return (form is Form.RECURRENT or self.carries_state) and self.spec.has_series

    @property
    def needs_series(self) -> bool:
        return self.needs_series_for(self.asked_form)

    @property
    def sequences(self) -> int:
        return self.inputs.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def check(self, *, for_plan: bool = False) -> None:
        """Raise unless the tensors fit each other, the spec and the form; plans need no gates or cuts."""
        check_tensors(self.inputs.q, self.inputs.k, self.inputs.v)
        check_gates(self.spec, self.inputs, may_miss=for_plan)
        check_layout(
            self.inputs,
            causal=self.causal,
            cu_seqlens=None if for_plan else self.cu_seqlens,
            max_seqlen=self.max_seqlen,
            key_padding_mask=self.key_padding_mask,
        )
        self.check_form()

    def check_form(self) -> None:
        """Raise if the call needs a state or the recurrent form, and the spec has none."""
        if self.asked_form is Form.RECURRENT or self.carries_state:
            require_recurrent(self.spec)
        if self.chunk_size is not None and (not isinstance(self.chunk_size, int) or self.chunk_size < 1):
            raise InputError(f"chunk_size must be a whole number of at least 1, got {self.chunk_size}.")

    def check_state(self) -> None:
        """Raise unless the state fits the call and the budget."""
        asked = self.asked_form in (Form.CHUNKED, Form.RECURRENT)
        if self.spec.has_finite_state and (self.carries_state or asked):
            check_state_budget(self.spec, self.inputs, self.sequences, self.state_budget)
        if self.state is not None:
            check_state(self.spec, self.state, self.inputs, self.sequences)

    def call(self, scale: float | None) -> Call:
        """The call that a program runs."""
        q = self.inputs.q
        return Call(
            self.spec,
            self.inputs,
            self.spec.kernel.default_scale(q.shape[3]) if scale is None else float(scale),
            q.device,
            self.causal,
            self.state,
            self.return_state,
            self.asked_form,
            self.chunk_size,
            None if self.cu_seqlens is None else _packing(self.cu_seqlens, self.max_seqlen, q),
        )


def _with_known_fill(state: State, k: Tensor) -> State:
    """The state, marked as full if its window is: read once, and only if several tokens follow."""
    if not isinstance(state, State) or state.exact is None or state.is_full:
        return state
    if k.shape[1] == 1 or is_tracing():
        return state
    return dataclasses.replace(state, is_full=bool((state.count >= state.exact.number).all()))


def _outside_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which torch.compile runs between its graphs; where one graph must hold all, an error."""
    if torch.compiler.is_compiling():
        raise InputError(
            "exp with a state runs as its series, whose order is read from the scores, so one graph cannot "
            "hold it: compile without fullgraph=True, or use taylor(N), whose order is fixed."
        )
    compiler = sys.modules.get("torch._dynamo")  # importing it takes most of a second
    return function if compiler is None else compiler.disable(function)


def _answer_by_series(
    request: _Request, scale: float | None, tolerance: float, score_bound: float | None
) -> Tensor | tuple[Tensor, State]:
    """exp as its series, truncated at an order certified for these scores, in float64."""
    call = request.call(scale)
    spec, certificate, longest_key = as_series(
        request.spec,
        _masked_inputs(request),
        scale=call.scale,
        tolerance=tolerance,
        score_bound=score_bound,
        causal=request.causal,
        state=request.state,
        sequences=request.sequences,
        state_budget=request.state_budget,
    )
    wide = dataclasses.replace(request, spec=spec, inputs=request.inputs.map(torch.Tensor.double))
    wide.check_state()
    y, after = _run_checked(wide, call.scale)
    y = y.to(request.inputs.q.dtype)
    if not request.return_state:
        return y
    return y, dataclasses.replace(
        _kept(after, request.inputs.k.shape[1]), certificate=certificate, key_bound=longest_key
    )


def _run_checked(
    request: _Request, scale: float | None, key: Hashable | None = None, known: Plan | None = None
) -> tuple[Tensor, State | None]:
    """Output and state of a call that has been checked; its plan is cached under the key."""
    if not request.is_in_layout:
        return _run_in_batches(request, scale)
    call = request.call(scale)
    found = find_plan(call) if known is None else known
    if key is not None:
        remember_plan(key, found)
    return _run_in_batches(request, scale) if found.copies else found.run(call)


# ------------------------------------------------------------------------------- padding and packing


def _run_in_batches(request: _Request, scale: float | None) -> tuple[Tensor, State | None]:
    """Output and state, computed in right-padded batches."""
    inputs = request.inputs
    if inputs.q.shape[1] != inputs.k.shape[1]:
        return _run_last_tokens(request, scale)
    batches = _batches(request)
    outputs, states = [], []
    for batch in batches:
        rows = inputs.map(batch.take)._replace(present=batch.present)
        before = request.state
        if before is not None and batch.sequences is not None:
            before = before[batch.sequences]
        y, after = _run(request, rows, before, scale)
        outputs.append(y)
        states.append(after)
    y = put_back(batches, outputs, (inputs.q.shape[0], inputs.q.shape[1]))
    return y, _in_order(batches, states) if request.return_state else None


def _run_last_tokens(request: _Request, scale: float | None) -> tuple[Tensor, State | None]:
    """Queries that are the last tokens, with padding anywhere among the keys."""
    inputs, mask = request.inputs, request.key_padding_mask
    assert mask is not None
    absent = ~mask[..., None, None]
    call = request.call(scale)._replace(inputs=inputs._replace(present=mask), packing=None)
    found = find_plan(call)
    if not found.program.skips_absent_keys:
        k, v = (u.masked_fill(absent, 0.0) for u in (inputs.k, inputs.v))
        call = call._replace(inputs=call.inputs._replace(k=k, v=v))
    y, after = found.run(call)
    return y.masked_fill(absent[:, -y.shape[1] :], 0.0), after


def _run(
    request: _Request, inputs: Inputs, state: State | None, scale: float | None
) -> tuple[Tensor, State | None]:
    call = request.call(scale)._replace(inputs=inputs, state=state, packing=None)
    return find_plan(call).run(call)


def _masked_inputs(request: _Request) -> Inputs:
    """The inputs with zeros in place of padding, whatever was there."""
    if request.key_padding_mask is None:
        return request.inputs
    batch = from_padding_mask(request.key_padding_mask)
    q, k, v = request.inputs.q, request.inputs.k, request.inputs.v
    return request.inputs.with_tensors(batch.take(q), batch.take(k), v)


def _batches(request: _Request) -> list[Batch]:
    """How padded or packed tokens are converted to the layout of the programs."""
    if request.cu_seqlens is not None:
        cuts, tokens = request.cu_seqlens.to(request.inputs.q.device), request.inputs.q.shape[1]
        return from_cu_seqlens(cuts, tokens, request.max_seqlen)
    assert request.key_padding_mask is not None
    return [from_padding_mask(request.key_padding_mask)]


def _in_order(batches: list[Batch], states: list[State | None]) -> State:
    """The states of all batches as one, in the order of the packed sequences."""
    merged = State.stack([s for s in states if s is not None])
    if len(batches) == 1:
        return merged
    members = torch.cat([b.sequences for b in batches if b.sequences is not None])
    return merged[torch.argsort(members)]


# ---------------------------------------------------------------------------------- specs by name


class _KnownSpecs:
    """Specs by name, as attributes.

    torch.compile traces and guards an attribute of a global object one by one; a dict would be
    guarded as a whole, and each new spec would compile every graph again.
    """


_known_specs = _KnownSpecs()


after_registration(lambda: vars(_known_specs).clear())


@untraced
def _parse_once(text: str) -> bool:
    """Parse outside the traced graph."""
    if not hasattr(_known_specs, _as_attribute(text)):
        setattr(_known_specs, _as_attribute(text), resolve(text))
    return True


def _as_attribute(text: str) -> str:
    """The text without full stops, which tracing does not accept in the name of an attribute."""
    return text.replace(".", "\u2024")


def _resolved(spec: AttentionSpec | str) -> AttentionSpec:
    if isinstance(spec, AttentionSpec):
        return spec
    if not isinstance(spec, str):
        raise InputError(
            f"spec must be an AttentionSpec, a notation such as 'exp/sum' or a catalogue name, not {spec!r}."
        )
    _parse_once(spec)
    return getattr(_known_specs, _as_attribute(spec))
