"""`attention`, the one way in: check the call, find its program, run it.

    attention(…) → Call → plan → Program.run(call) → y, state

Padding and packed sequences are first brought to the layout that programs know (forms/packing.py), and put
back after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Literal, overload

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.attend import Form
from maclaurin.forms.inputs import Inputs
from maclaurin.forms.packing import Batch, from_cu_seqlens, from_padding_mask, put_back
from maclaurin.forms.state import State
from maclaurin.forms.tracing import is_tracing, untraced
from maclaurin.programs.plan import Plan, find_plan, remember_plan, remembered_plan
from maclaurin.programs.program import Call
from maclaurin.programs.series import as_series, require_recurrent
from maclaurin.programs.validate import (
    check_gates,
    check_layout,
    check_state,
    check_state_budget,
    check_tensors,
)
from maclaurin.spec import AttentionSpec
from maclaurin.spec.catalogue import resolve
from maclaurin.spec.part import after_registration

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
    **gates: Tensor | None,
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
    **gates: Tensor | None,
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
    **gates: Tensor | None,
) -> Tensor | tuple[Tensor, State]:
    """y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s ),  y [B, T, H, e].

    Args:
        q: queries [B, T, H, d]. With fewer queries than keys (parallel form, causal) they are the
            last tokens of the text.
        k: keys [B, S, Hkv, d]; H must be a multiple of Hkv.
        v: values [B, S, Hkv, e].
        spec: an AttentionSpec, its notation ("exp/l2"), or a name of the catalogue ("based").
        state: what a previous call with return_state=True returned; the text goes on from there.
        return_state: return (y, state) instead of y.
        scale: the factor on q·k; by default the kernel's own, 1/√d for most.
        causal: whether a query sees only keys up to its own.
        cu_seqlens: [n+1] cuts of n sequences packed into one row (B = 1).
        max_seqlen: the longest of them, if known; spares looking at cu_seqlens.
        key_padding_mask: bool [B, S], True for real tokens; the others weigh nothing anywhere and
            their outputs are 0.
        form: "auto" (the cheapest), "parallel", "blocked" (parallel, a block of queries at a time),
            "chunked" or "recurrent".
        chunk_size: tokens per chunk; any size gives the same answer.
        tolerance: how far exp as a series may be from exp, relative to max|v|.
        score_bound: for exp as a series, a bound on |scale·q·k| for this and all later tokens of
            the text; by default that of the tokens so far, which later ones may exceed.
        state_budget: bytes a state may take.
        **gates: the tensors that the spec's parts take (`spec.arguments`), by name:
            input_gate: i, [B, S, Hkv], for *in.
            log_forget: ln f, [B, S, Hkv], for *forget.
            output_gate: o, [B, T, H] or [B, T, H, e], for *out.
            denominator_gate: g, [B, S, H], for /running.
            Parts of one's own name theirs.
    """
    given = {name: gate for name, gate in gates.items() if gate is not None} if gates else {}
    request = _Request(
        _resolved(spec),
        Inputs(q, k, v, given),
        _with_known_fill(state, k),
        return_state,
        causal,
        form,
        chunk_size,
        state_budget,
        cu_seqlens,
        max_seqlen,
        key_padding_mask,
    )
    key = request.key()
    known = None if key is None else remembered_plan(key)
    if known is not None:
        return request.answer(*known.program.run(request.call(scale)))
    request.check()
    if request.needs_series:
        return _answer_by_series(request, scale, tolerance, score_bound)
    request.check_state()
    if request.is_in_layout:
        call = request.call(scale)
        found = find_plan(call)
        if key is not None:
            remember_plan(key, found)
        return request.answer(*found.program.run(call))
    return request.answer(*_run_in_batches(request, scale))


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
) -> Plan:
    """What `attention` would do for such a call, and why. Tensors may be on the meta device.

    state=True plans a call that goes on from a state (with one token: a decoding step). `device` is where the
    call would run, by default that of q, or for meta tensors the GPU if there is one. A call that runs exp as
    its series is planned for one step of it: the order, and with it the state, follows from the scores.
    """
    resolved, inputs = _resolved(spec), Inputs(q, k, v)
    check_tensors(q, k, v)
    if state is True:
        require_recurrent(resolved)
        state = State.on_meta(resolved, inputs) if resolved.has_finite_state else None
    known = state if isinstance(state, State) else None
    request = _Request(resolved, inputs, known, return_state, causal, form, chunk_size)
    request.check_form()
    return find_plan(dataclasses.replace(request.call(None), device=_planned_device(q, device)))


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
        """Whether the tensors are as the programs take them: padding on the right, or none."""
        return self.cu_seqlens is None and self.key_padding_mask is None

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

    def key(self) -> Hashable | None:
        """What the choice of a program depends on, once the call is known to be right; None: do not remember.

        It is read off the tensors at every call, so it holds what they are in the cheapest form.
        """
        q, k, v, gates, state = self.inputs.q, self.inputs.k, self.inputs.v, self.inputs.gates, self.state
        if not self.is_in_layout or is_tracing() or not isinstance(state, State | None):
            return None
        for u in (q, k, v, *gates.values()):
            if not isinstance(u, Tensor):
                return None
        grad = torch.is_grad_enabled()
        return (
            self.spec,
            *(q.shape, q.stride(), q.dtype, q.device, grad and q.requires_grad),
            *(k.shape, k.stride(), k.dtype, k.device, grad and k.requires_grad),
            *(v.shape, v.stride(), v.dtype, v.device, grad and v.requires_grad),
            *((name, g.shape, g.dtype, g.device, grad and g.requires_grad) for name, g in gates.items()),
            None if state is None else state.signature(),
            *(self.return_state, self.causal, self.form, self.chunk_size, self.state_budget),
        )

    def check(self) -> None:
        """Raise unless the tensors fit each other, the spec and the form."""
        check_tensors(self.inputs.q, self.inputs.k, self.inputs.v)
        check_gates(self.spec, self.inputs)
        check_layout(
            self.inputs,
            causal=self.causal,
            cu_seqlens=self.cu_seqlens,
            max_seqlen=self.max_seqlen,
            key_padding_mask=self.key_padding_mask,
        )
        self.check_form()

    def check_form(self) -> None:
        """Raise where a state or the recurrent form is asked of a spec that has none."""
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
        )

    def answer(self, y: Tensor, after: State | None) -> Tensor | tuple[Tensor, State]:
        """What `attention` returns."""
        if not self.return_state:
            return y
        assert after is not None
        return y, after if is_tracing() else after.compact()


def _with_known_fill(state: State | None, k: Tensor) -> State | None:
    """The state, marked as full if its window is: asked once, and only where a piece of text follows."""
    if not isinstance(state, State) or state.exact is None or state.is_full:
        return state
    if k.shape[1] == 1 or is_tracing():
        return state
    return dataclasses.replace(state, is_full=bool((state.count >= state.exact.number).all()))


def _answer_by_series(
    request: _Request, scale: float | None, tolerance: float, score_bound: float | None
) -> Tensor | tuple[Tensor, State]:
    """exp as its series, cut at an order that is certified for the scores at hand, in float64."""
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
    answer = attention(
        *(wide.inputs.q, wide.inputs.k, wide.inputs.v),
        spec,
        state=wide.state,
        return_state=True if request.return_state else False,  # noqa: SIM210 (a literal for the overloads)
        scale=call.scale,
        causal=request.causal,
        cu_seqlens=request.cu_seqlens,
        max_seqlen=request.max_seqlen,
        key_padding_mask=request.key_padding_mask,
        form=request.form,
        chunk_size=request.chunk_size,
        state_budget=request.state_budget,
        **wide.inputs.gates,
    )
    dtype = request.inputs.q.dtype
    if isinstance(answer, Tensor):
        return answer.to(dtype)
    y, after = answer
    return y.to(dtype), dataclasses.replace(after, certificate=certificate, key_bound=longest_key)


# ------------------------------------------------------------------------------- padding and packing


def _run_in_batches(request: _Request, scale: float | None) -> tuple[Tensor, State | None]:
    """Output and state, by way of right-padded batches."""
    inputs = request.inputs
    if inputs.q.shape[1] != inputs.k.shape[1]:
        return _run_last_tokens(request, scale)
    batches = _batches(request)
    outputs, states = [], []
    for batch in batches:
        rows = dataclasses.replace(inputs.map(batch.take), present=batch.present)
        before = request.state
        if before is not None and batch.sequences is not None:
            before = before[batch.sequences]
        y, after = _run(request, rows, before, scale)
        outputs.append(y)
        states.append(after)
    y = put_back(batches, outputs, (inputs.q.shape[0], inputs.q.shape[1]))
    return y, _in_order(batches, states) if request.return_state else None


def _run_last_tokens(request: _Request, scale: float | None) -> tuple[Tensor, State | None]:
    """Queries that are the last tokens of keys among which padding may stand anywhere."""
    inputs, mask = request.inputs, request.key_padding_mask
    assert mask is not None
    absent = ~mask[..., None, None]
    k, v = (u.masked_fill(absent, 0.0) for u in (inputs.k, inputs.v))
    padded = dataclasses.replace(inputs.with_tensors(inputs.q, k, v), present=mask)
    y, after = _run(request, padded, request.state, scale)
    return y.masked_fill(absent[:, -y.shape[1] :], 0.0), after


def _run(
    request: _Request, inputs: Inputs, state: State | None, scale: float | None
) -> tuple[Tensor, State | None]:
    call = dataclasses.replace(request.call(scale), inputs=inputs, state=state)
    return find_plan(call).program.run(call)


def _masked_inputs(request: _Request) -> Inputs:
    """The inputs with zeros where padding stands, whatever was there."""
    if request.key_padding_mask is None:
        return request.inputs
    batch = from_padding_mask(request.key_padding_mask)
    q, k, v = request.inputs.q, request.inputs.k, request.inputs.v
    return request.inputs.with_tensors(batch.take(q), batch.take(k), v)


def _batches(request: _Request) -> list[Batch]:
    """How to bring padded or packed tokens to the layout of the programs."""
    if request.cu_seqlens is not None:
        return from_cu_seqlens(request.cu_seqlens, request.inputs.q.shape[1], request.max_seqlen)
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
    """Specs by what they were called, as attributes.

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
    """Tracing takes no attribute with a full stop in its name."""
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
