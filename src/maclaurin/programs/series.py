"""Softmax in recurrent form: exp as its series, truncated at an order certified from the scores."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from types import FrameType
from typing import Any

from torch import Tensor

from maclaurin.errors import InputError, NoFiniteStateError, SpecError, StateBudgetError
from maclaurin.forms.certificate import Certificate, certified_order, output_error
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.programs.validate import check_state_budget
from maclaurin.spec import AttentionSpec, SlidingWindow, Taylor


class SeriesNotice(UserWarning):
    """exp runs as a truncated series; `certificate`, and the message, give its order and its error."""

    def __init__(self, message: str, certificate: Certificate | None = None) -> None:
        self.certificate = certificate
        super().__init__(message)


def require_recurrent(spec: AttentionSpec) -> None:
    """Raise unless the spec has a finite state, or is exp, whose series has one."""
    if spec.has_finite_state or spec.has_series:
        return
    without = spec.kernel.unclamped
    if without is not None:
        raise NoFiniteStateError(
            f"{spec} clamps its score, which no finite state can do, so it has no recurrent form and "
            f"carries no state.\nDrop the clamp ({spec.with_kernel(without)}), or use form='parallel' or "
            "'chunked' without a state."
        )
    raise NoFiniteStateError(
        f"{spec} has no finite recurrent form: {spec.kernel} is not a polynomial of the score.\n"
        "Use form='parallel' or 'chunked' without a state, or a polynomial kernel such as taylor(2)."
    )


def as_series(
    spec: AttentionSpec,
    inputs: Inputs,
    *,
    scale: float,
    tolerance: float,
    score_bound: float | None,
    causal: bool,
    state: State | None,
    sequences: int,
    state_budget: int,
) -> tuple[AttentionSpec, Certificate, float]:
    """(the spec with taylor(N) for exp, the certificate for N, the norm of the longest key so far).

    The bound is the largest |x|, or |scale|·max‖q‖·max‖k‖ if a state holds keys that are no longer
    available, or a larger one that the caller promises for the tokens to come.
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance must lie between 0 and 1, got {tolerance}.")
    q, k = inputs.q.detach().double(), inputs.k.detach().double()
    longest_key = max(float(k.norm(dim=-1).amax()), state.key_bound if state else 0.0)
    if state is None:
        bound = _largest_score(q, k, causal) * abs(scale)
    else:
        bound = float(q.norm(dim=-1).amax()) * longest_key * abs(scale)
    if not math.isfinite(bound):
        raise InputError("q or k holds NaN or infinity, so no order of the series can be certified.")
    if score_bound is not None:
        if score_bound < bound and state is None:
            raise InputError(
                f"score_bound is {score_bound:.3g}, but these tokens have |x| up to {bound:.3g}: pass a "
                "larger one or leave it out."
            )
        bound = score_bound
    certificate = _certificate(spec, state, bound, tolerance)
    series = _truncated(spec, certificate, inputs, sequences, state_budget)
    if state is None:
        notice = SeriesNotice(f"{spec}: {certificate}", certificate)
        warnings.warn(notice, stacklevel=_frames_of_the_library())
    return series, certificate, longest_key


def _truncated(
    spec: AttentionSpec, certificate: Certificate, inputs: Inputs, sequences: int, state_budget: int
) -> AttentionSpec:
    """The spec with the series of the certified order; raises if its state is larger than the budget."""
    kernel = spec.kernel.truncated(certificate.order)
    assert kernel is not None
    series = spec.with_kernel(kernel)
    context = (
        f"{spec} in recurrent form needs its series up to order {certificate.order} for "
        f"|x| ≤ {certificate.score_bound:.3g} at tolerance {certificate.tolerance:.0e}: "
    )
    check_state_budget(
        series, inputs.map(Tensor.double), sequences, state_budget, context, _alternatives(spec)
    )
    return series


def _frames_of_the_library() -> int:
    """The `stacklevel` of a warning, for the function that calls this, that points outside of the library."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level


#: packages whose frames are no place of a user's: the library, and torch, which may wrap its calls
_INSIDE = ("maclaurin", "torch")


def planned_series(
    spec: AttentionSpec,
    inputs: Inputs,
    *,
    tolerance: float,
    score_bound: float | None,
    state: State | None,
    sequences: int,
    state_budget: int,
    **options: Any,
) -> tuple[AttentionSpec, Certificate]:
    """The series and its certificate without a notice; on the meta device from `score_bound` alone."""
    if inputs.q.is_meta:
        if score_bound is None and state is None:
            raise InputError(
                f"{spec} with a state runs as its series, whose order depends on the scores, and "
                "tensors on the meta device have none: pass score_bound, the largest |scale·q·k| to expect."
            )
        known = state.certificate if state is not None else None
        bound = score_bound if score_bound is not None else known.score_bound if known is not None else 0.0
        certificate = _certificate(spec, state, bound, tolerance)
        return _truncated(spec, certificate, inputs, sequences, state_budget), certificate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SeriesNotice)
        series, certificate, _ = as_series(
            spec,
            inputs,
            tolerance=tolerance,
            score_bound=score_bound,
            state=state,
            sequences=sequences,
            state_budget=state_budget,
            **options,
        )
    return series, certificate


def _largest_score(q: Tensor, k: Tensor, causal: bool, block: int = 512) -> float:
    """max |q·k| over the visible pairs, a block of queries at a time."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2).transpose(1, 2)
    q = q.transpose(1, 2)
    largest = 0.0
    for start in range(0, q.shape[2], block):
        scores = (q[:, :, start : start + block] @ k.mT).abs()
        if causal:
            scores = scores.tril(start + k.shape[2] - q.shape[2])
        here = float(scores.amax())
        if not math.isfinite(here):
            return math.inf
        largest = max(largest, here)
    return largest


def _certificate(spec: AttentionSpec, state: State | None, bound: float, tolerance: float) -> Certificate:
    if state is None:
        certificate = certified_order(bound, tolerance)
        if certificate is None:
            why = (
                f"no order of its series is within {tolerance:.0e} for |x| up to {bound:.3g}, since its "
                f"terms cancel by e^{2 * bound:.0f} in float64"
            )
            raise StateBudgetError(f"{spec} in recurrent form: {why}. {_alternatives(spec)}", why)
        return certificate
    known = state.certificate
    if known is None:
        raise InputError(f"this state belongs to {state.spec}, but the call is for {spec}.")
    if output_error(known.order, bound) <= tolerance:
        return Certificate(known.order, max(bound, known.score_bound), tolerance)
    raise StateBudgetError(
        f"this state holds the series of exp up to order {known.order}, certified for "
        f"|x| ≤ {known.score_bound:.3g}; these tokens may have |x| up to {bound:.3g} (scale·‖q‖·‖k‖), where "
        f"that order is not within {tolerance:.0e}.\nStart the text again with score_bound={bound:.3g} or "
        "more in its first call, pass a larger tolerance, or use the parallel form without a state."
    )


def _alternatives(spec: AttentionSpec) -> str:
    """What would work, as specs to type."""
    around = spec.parts[1:]
    wanted = [
        ("a lower order", (Taylor(2),)),
        ("an expansion about the row's mean", (Taylor(2, "mean"),)),
        ("an exact window beside it", (Taylor(2, "mean"), SlidingWindow(64, 1))),
        ("an exact window beside it", (Taylor(2), SlidingWindow(64, 1))),
    ]
    found: dict[str, str] = {}
    for what, parts in wanted:
        with contextlib.suppress(SpecError):
            found.setdefault(what, str(AttentionSpec.of(*parts, *around)))
    options = [f"{what} ({notation})" for what, notation in found.items()]
    return f"Use {', '.join(options)}, or form='parallel' without a state."
