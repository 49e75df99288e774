"""One call for every spec: check, plan, bring to one layout, run, put back."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from maclaurin.backends.changed_score import changed_score_attend, changed_score_serves
from maclaurin.backends.flash import flash_attend
from maclaurin.backends.linear_time import linear_attend, linear_attend_from_state, linear_carries_state
from maclaurin.backends.operators import is_recording
from maclaurin.backends.plan import Plan, make_plan
from maclaurin.backends.polynomial import fused_attend
from maclaurin.backends.series import as_series, require_recurrent
from maclaurin.backends.step import is_step, step
from maclaurin.backends.validate import check_gates, check_layout, check_state, check_tensors
from maclaurin.backends.window_tail import (
    window_tail_attend,
    window_tail_carries_state,
    window_tail_from_state,
)
from maclaurin.errors import InputError, StateBudgetError
from maclaurin.forms.attend import Form, attend
from maclaurin.forms.compiling import untraced
from maclaurin.forms.inputs import Inputs, working_dtype
from maclaurin.forms.packing import Batch, from_cu_seqlens, from_padding_mask, put_back
from maclaurin.forms.state import State
from maclaurin.spec import AttentionSpec
from maclaurin.spec.catalogue import resolve
from maclaurin.spec.part import after_registration

#: bytes a state may take unless the caller allows more
STATE_BUDGET = 1 << 30


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    state: State | None = None,
    return_state: bool = False,
    input_gate: Tensor | None = None,
    log_forget: Tensor | None = None,
    output_gate: Tensor | None = None,
    denominator_gate: Tensor | None = None,
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
) -> Tensor | tuple[Tensor, State]:
    """y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s ),  y [B, T, H, e].

    Args:
        q: queries [B, T, H, d]. With fewer queries than keys (parallel form, causal) they are the
            last tokens of the text.
        k: keys [B, T, Hkv, d]; H must be a multiple of Hkv.
        v: values [B, T, Hkv, e].
        spec: an AttentionSpec, its notation ("exp/l2"), or a name of the catalogue ("based").
        state: what a previous call with return_state=True returned; the text goes on from there.
        return_state: return (y, state) instead of y.
        input_gate: i, [B, T, Hkv], for specs with *in.
        log_forget: ln f, [B, T, Hkv], for specs with *forget.
        output_gate: o, [B, T, H], for specs with *out.
        denominator_gate: g, [B, T, H], for specs with /running.
        scale: the factor on q·k; by default the kernel's own, 1/√d for most.
        causal: whether a query sees only keys up to its own.
        cu_seqlens: [n+1] cuts of n sequences packed into one row (B = 1).
        max_seqlen: the longest of them, if known; spares looking at cu_seqlens.
        key_padding_mask: bool [B, T], True for real tokens; the others weigh nothing anywhere and
            their outputs are 0.
        form: "auto" (the cheapest), "parallel", "blocked" (parallel, a block of queries at a time),
            "chunked" or "recurrent".
        chunk_size: tokens per chunk; any size gives the same answer.
        tolerance: how far exp as a series may be from exp, relative to max|v|.
        score_bound: for exp as a series, a bound on |scale·q·k| for this and all later tokens of
            the text; by default that of the tokens so far, which later ones may exceed.
        state_budget: bytes a state may take.
    """
    spec = _resolved(spec)
    inputs = Inputs(q, k, v, input_gate, log_forget, output_gate, denominator_gate)
    call = _Call(spec, inputs, state, return_state, causal, cu_seqlens, max_seqlen, key_padding_mask, form)
    call.check()
    scale = spec.kernel.default_scale(q.shape[3]) if scale is None else float(scale)
    certificate, longest_key = None, 0.0
    if call.needs_series:
        spec, certificate, longest_key = as_series(
            spec,
            call.masked_inputs(),
            scale=scale,
            tolerance=tolerance,
            score_bound=score_bound,
            causal=causal,
            state=state,
            state_budget=state_budget,
        )
        call = dataclasses.replace(call, spec=spec, inputs=inputs.map(torch.Tensor.double))
    _check_state_budget(call, state_budget)
    if state is not None:
        check_state(spec, state, call.inputs, call.sequences)
    y, after = call.run(scale, chunk_size)
    y = y.to(q.dtype)
    if not return_state:
        return y
    assert after is not None
    after = after if is_recording() else after.compact()
    return y, dataclasses.replace(after, certificate=certificate, key_bound=longest_key)


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    state: State | None = None,
    return_state: bool = False,
    causal: bool = True,
    form: str = "auto",
    chunk_size: int | None = None,
) -> Plan:
    """What `attention` would do for such a call, and why. Tensors may be on the meta device.

    A call that runs exp as its series is planned for one step of it: the order, and with it the state,
    follows from the scores.
    """
    call = _Call(_resolved(spec), Inputs(q, k, v), state, return_state, causal, None, None, None, form)
    check_tensors(q, k, v)
    call.check_form()
    return call.plan(call.inputs, chunk_size)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments that decide how a call runs."""

    spec: AttentionSpec
    inputs: Inputs
    state: State | None
    return_state: bool
    causal: bool
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    key_padding_mask: Tensor | None
    form: str

    @property
    def carries_state(self) -> bool:
        return self.state is not None or self.return_state

    @property
    def asked_form(self) -> Form | None:
        if self.form == "auto":
            return None
        try:
            return Form(self.form)
        except ValueError:
            known = ", ".join(["auto", *(f.value for f in Form)])
            raise InputError(f"there is no form {self.form!r}; known are {known}.") from None

    @property
    def needs_series(self) -> bool:
        """exp in recurrent form, or with a state, runs as its truncated series."""
        recurrent = self.asked_form is Form.RECURRENT or self.carries_state
        return self.spec.has_series and recurrent

    @property
    def sequences(self) -> int:
        return self.inputs.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def check(self) -> None:
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
        """The form must exist for the spec and for what else is asked."""
        if self.asked_form is Form.RECURRENT or self.carries_state:
            require_recurrent(self.spec)
        form, q, k = self.asked_form, self.inputs.q, self.inputs.k
        if form in (Form.PARALLEL, Form.BLOCKED) and self.carries_state:
            raise InputError(
                f"the {self.form} form carries no state: use form='chunked', 'recurrent' or 'auto'."
            )
        one_to_one = form is Form.RECURRENT or (self.spec.has_finite_state and form is Form.CHUNKED)
        if q.shape[1] != k.shape[1] and (one_to_one or self.carries_state) and self.causal:
            raise InputError(
                f"the {self.form} form takes a query with every key, got {q.shape[1]} queries and "
                f"{k.shape[1]} keys: use form='parallel', or hand over a state instead of old keys."
            )
        if self.causal:
            return
        if form is Form.RECURRENT:
            raise InputError(
                "the recurrent form reads from left to right, so it is causal: use form='chunked' "
                "(linear in T for polynomial kernels) or 'parallel' for causal=False."
            )
        if self.spec.forget_gate or self.spec.window:
            part = "forget gate" if self.spec.forget_gate else "window"
            raise InputError(f"{self.spec} has a {part}, which has no meaning with causal=False.")

    def plan(self, inputs: Inputs, chunk_size: int | None) -> Plan:
        """How inputs of this shape are computed."""
        _check_chunk_size(chunk_size)
        return make_plan(
            self.spec,
            inputs,
            form=self.asked_form,
            causal=self.causal,
            chunk_size=chunk_size,
            carries_state=self.carries_state,
            fused_state=self.carries_state and self._state_is_fused(inputs),
        )

    def _state_is_fused(self, inputs: Inputs) -> bool:
        """Whether the programs in linear time go on from the state."""
        carries = linear_carries_state if self.spec.window is None else window_tail_carries_state
        return carries(self.spec, inputs, self.state)

    def run(self, scale: float, chunk_size: int | None) -> tuple[Tensor, State | None]:
        """Output and state, by way of right-padded batches where there is padding or packing."""
        batches = self.batches()
        if batches is None:
            return self._run_rows(self.inputs, self.state, scale, chunk_size)
        outputs, states = [], []
        for batch in batches:
            rows = dataclasses.replace(self.inputs.map(batch.take), present=batch.present)
            before = self.state
            if before is not None and batch.sequences is not None:
                before = before[batch.sequences]
            y, after = self._run_rows(rows, before, scale, chunk_size)
            outputs.append(y)
            states.append(after)
        y = put_back(batches, outputs, (self.inputs.q.shape[0], self.inputs.q.shape[1]))
        return y, _in_order(batches, states) if self.return_state else None

    def _run_rows(
        self, inputs: Inputs, state: State | None, scale: float, chunk_size: int | None
    ) -> tuple[Tensor, State | None]:
        _check_chunk_size(chunk_size)
        free = self.asked_form in (None, Form.RECURRENT) and self.causal
        if free and state is not None and is_step(self.spec, inputs.q, state, inputs.present):
            return step(self.spec, inputs, state, scale)
        plan_ = self.plan(inputs, chunk_size)
        if plan_.backend == "sdpa":
            return flash_attend(self.spec, inputs, scale=scale, causal=self.causal), None
        with torch.autocast(inputs.q.device.type, enabled=False):  # sums are kept in fp32 or fp64
            if plan_.backend == "triton" and self.carries_state:
                chunk = plan_.chunk_size
                go_on = linear_attend_from_state if self.spec.window is None else window_tail_from_state
                return go_on(self.spec, inputs, state, scale=scale, chunk=chunk)
            if plan_.backend == "triton":
                return self._run_fused(inputs, plan_, scale), None
            return attend(
                self.spec,
                inputs,
                plan_.form,
                scale=scale,
                causal=self.causal,
                chunk=plan_.chunk_size,
                state=state,
                return_state=self.return_state,
            )

    def _run_fused(self, inputs: Inputs, plan_: Plan, scale: float) -> Tensor:
        """By the fused program that serves this form of the spec."""
        if plan_.form is Form.CHUNKED:
            in_linear_time = linear_attend if self.spec.window is None else window_tail_attend
            return in_linear_time(self.spec, inputs, scale=scale, chunk=plan_.chunk_size)
        changed = changed_score_serves(self.spec, inputs, self.causal)
        attend_ = changed_score_attend if changed else fused_attend
        return attend_(self.spec, inputs, scale=scale, causal=self.causal)

    def masked_inputs(self) -> Inputs:
        """The inputs with zeros where padding stands, whatever was there."""
        if self.key_padding_mask is None:
            return self.inputs
        batch = from_padding_mask(self.key_padding_mask)
        return dataclasses.replace(self.inputs, q=batch.take(self.inputs.q), k=batch.take(self.inputs.k))

    def batches(self) -> list[Batch] | None:
        """How to bring padded or packed tokens to the layout of the forms; None if they have it."""
        if self.cu_seqlens is not None:
            return from_cu_seqlens(self.cu_seqlens, self.inputs.q.shape[1], self.max_seqlen)
        return None if self.key_padding_mask is None else [from_padding_mask(self.key_padding_mask)]


def _in_order(batches: list[Batch], states: list[State | None]) -> State:
    """The states of all batches as one, in the order of the packed sequences."""
    merged = State.stack([s for s in states if s is not None])
    if len(batches) == 1:
        return merged
    members = torch.cat([b.sequences for b in batches if b.sequences is not None])
    return merged[torch.argsort(members)]


def _check_state_budget(call: _Call, state_budget: int) -> None:
    """A state over the budget is refused before it is allocated."""
    spec, inputs = call.spec, call.inputs
    asked = call.asked_form in (Form.CHUNKED, Form.RECURRENT)
    if not spec.has_finite_state or not (call.carries_state or asked):
        return
    d, e = inputs.k.shape[3], inputs.v.shape[3]
    size = call.sequences * inputs.k.shape[2] * spec.state_size(d, e)
    needed = size * working_dtype(inputs.q.dtype).itemsize
    if needed > state_budget:
        order = max(spec.orders or (0,))
        raise StateBudgetError(
            f"the state of {spec} at order {order}, d = {d}, e = {e} takes {needed:,} bytes for "
            f"{call.sequences} sequences of {inputs.k.shape[2]} heads, over the budget of "
            f"{state_budget:,}. Use a lower order, a smaller d, a window beside a lower order, the "
            "parallel form, or pass a larger state_budget."
        )


class _KnownSpecs:
    """Specs by what they were called, as attributes.

    torch.compile traces and guards an attribute of a global object one by one; a dict would be
    guarded whole, and each new spec would compile every graph again.
    """


_known_specs = _KnownSpecs()


after_registration(lambda: vars(_known_specs).clear())


def _check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise InputError(f"chunk_size must be a whole number of at least 1, got {chunk_size}.")


@untraced
def _make_known(text: str) -> bool:
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
    _make_known(spec)
    return getattr(_known_specs, _as_attribute(spec))
