"""One call of `attention` as the caller made it: its options, and the checks that raise its errors."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.attend import Form
from maclaurin.forms.packing import Packing
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.programs.program import Call, why_it_must_be_causal
from maclaurin.programs.series import require_recurrent
from maclaurin.programs.validate import (
    as_number,
    as_whole_number,
    check_gates,
    check_layout,
    check_not_swapped,
    check_state,
    check_state_budget,
    check_tensors,
)
from maclaurin.spec import AttentionSpec

#: bytes a state may take unless the caller allows more
STATE_BUDGET = 1 << 30


class Options(NamedTuple):
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


class Request(NamedTuple):
    """One call of `attention`, not yet checked."""

    spec: AttentionSpec
    inputs: Inputs
    state: State | None
    options: Options

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
            None if cuts is None else packing_of(cuts, options.max_seqlen, q),
        )


def packing_of(cu_seqlens: Tensor, max_seqlen: int | None, q: Tensor) -> Packing:
    """The packing of a call, with its cuts on the device of the tensors."""
    return Packing(cu_seqlens.to(q.device, non_blocking=True).contiguous(), max_seqlen)
