"""Softmax in recurrent form: exp as its series, cut at an order certified from the scores at hand."""

from __future__ import annotations

import dataclasses
import math
import warnings

from maclaurin.errors import InputError, NoFiniteStateError, StateBudgetError
from maclaurin.forms.attend import Inputs, working_dtype
from maclaurin.forms.certificate import Certificate, certified_order, output_error
from maclaurin.forms.state import State
from maclaurin.spec import AttentionSpec, Taylor


class SeriesNotice(UserWarning):
    """Says that exp runs as a truncated series, up to which order and how good that is."""


def require_recurrent(spec: AttentionSpec) -> None:
    """Raise unless the spec has a finite state, or is exp, whose series has one."""
    if spec.has_finite_state or spec.has_series:
        return
    clamp = getattr(spec.kernel, "clamp", None)
    if clamp is not None:
        without = dataclasses.replace(spec, kernel=dataclasses.replace(spec.kernel, clamp=None))  # type: ignore[arg-type]
        raise NoFiniteStateError(
            f"{spec} clamps its score, which no finite state can do, so it has no recurrent form and "
            f"carries no state.\nDrop the clamp ({without}), or use form='parallel' or 'chunked' "
            "without a state."
        )
    raise NoFiniteStateError(
        f"{spec} has no finite recurrent form: {spec.kernel} is no polynomial of the score.\n"
        "Use form='parallel' or 'chunked' without a state, or a polynomial kernel such as taylor(2)."
    )


def as_series(
    spec: AttentionSpec,
    inputs: Inputs,
    *,
    scale: float,
    tolerance: float,
    score_bound: float | None,
    state: State | None,
    state_budget: int,
) -> tuple[AttentionSpec, Certificate, float]:
    """(the spec with taylor(N) for exp, why N is enough, the longest key so far).

    The bound is |scale|·max‖q‖·max‖k‖ of the tokens so far, or a larger one that the caller
    promises for the tokens to come.
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance must lie between 0 and 1, got {tolerance}.")
    longest_key = _longest(inputs.k)
    if state is not None:
        longest_key = max(longest_key, state.key_bound)
    bound = abs(scale) * _longest(inputs.q) * longest_key
    if not math.isfinite(bound):
        raise InputError("q or k holds NaN or infinity, so no order of the series can be certified.")
    if score_bound is not None:
        if score_bound < bound:
            raise InputError(
                f"score_bound is {score_bound:.3g}, but these tokens have |x| up to {bound:.3g} "
                "(scale·‖q‖·‖k‖): pass a larger one or leave it out."
            )
        bound = score_bound
    if state is not None:
        certificate = _still_certified(spec, state, bound, tolerance)
    else:
        try:
            certificate = certified_order(bound, tolerance)
        except OverflowError as problem:
            raise StateBudgetError(f"{spec} in recurrent form: {problem}. {_alternatives(spec)}") from None
    series = dataclasses.replace(spec, kernel=Taylor(certificate.order))
    _check_budget(spec, series, inputs, certificate, state_budget)
    if state is None:
        warnings.warn(SeriesNotice(f"{spec}: {certificate}"), stacklevel=3)
    return series, certificate, longest_key


def _still_certified(spec: AttentionSpec, state: State, bound: float, tolerance: float) -> Certificate:
    known = state.certificate
    if known is None:
        raise InputError(f"this state belongs to {state.spec}, and the call is for {spec}.")
    if output_error(known.order, bound) <= tolerance:
        return Certificate(known.order, max(bound, known.score_bound), tolerance)
    needed = certified_order(bound, tolerance).order
    raise StateBudgetError(
        f"this state holds the series of exp up to order {known.order}, certified for "
        f"|x| ≤ {known.score_bound:.3g}; these tokens have |x| up to {bound:.3g}, which needs order "
        f"{needed} for a tolerance of {tolerance:.0e}.\nStart the text again with score_bound={bound:.3g} or "
        "more in its first call, pass a larger tolerance, or use the parallel form."
    )


def _check_budget(
    spec: AttentionSpec,
    series: AttentionSpec,
    inputs: Inputs,
    certificate: Certificate,
    state_budget: int,
) -> None:
    d, e, heads = inputs.k.shape[3], inputs.v.shape[3], inputs.k.shape[2]
    itemsize = working_dtype(inputs.q.dtype).itemsize
    needed = inputs.q.shape[0] * heads * series.state_size(d, e) * itemsize
    if needed > state_budget:
        raise StateBudgetError(
            f"{spec} in recurrent form needs its series up to order {certificate.order} for "
            f"|x| ≤ {certificate.score_bound:.3g} at tolerance {certificate.tolerance:.0e}: a state of "
            f"{needed:.3g} bytes, over the budget of {state_budget:.3g}. {_alternatives(spec)}"
        )


def _alternatives(spec: AttentionSpec) -> str:
    def variant(kernel: str) -> str:
        return str(spec).replace("exp", kernel, 1)

    end = str(spec)[len("exp") :]
    return (
        f"Use a lower order ({variant('taylor(2)')}), expand about the row's mean "
        f"({variant('taylor(2,about=mean)')}), keep a window exact "
        f"(taylor(2,about=mean)+window(64,sinks=1){end}), or form='parallel'."
    )


def _longest(u: object) -> float:
    return float(u.detach().double().norm(dim=-1).amax())  # type: ignore[attr-defined]
