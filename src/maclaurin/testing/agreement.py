"""How well the forms of a spec agree, our softmax with torch's, and the series with softmax."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from maclaurin.errors import InputError, StateBudgetError
from maclaurin.forms.certificate import output_error
from maclaurin.programs.series import SeriesNotice
from maclaurin.spec.catalogue import resolve
from maclaurin.testing.cases import Shape, TensorCase, random_tensors
from maclaurin.testing.tolerances import SERIES_TOLERANCE_OF_FORMS, TOLERANCE, relative_error

#: the forms compared with the parallel one
OTHER_FORMS = ("chunked", "recurrent")


@dataclass(frozen=True)
class Agreement:
    """One form of one spec against its parallel form: relative errors, or why it does not run."""

    spec: str
    form: str
    value_error: float | None
    gradient_error: float | None
    tolerance: float
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether both errors are within the tolerance; None if the form does not exist."""
        if self.value_error is None or self.gradient_error is None:
            return None
        return max(self.value_error, self.gradient_error) <= self.tolerance


def require_finite(case: TensorCase) -> None:
    """Raise an error that names the first tensor with a NaN or an infinity, and its position."""
    for name, tensor in case.tensors.items():
        bad = ~tensor.isfinite()
        if bool(bad.any()):
            place = [int(i) for i in bad.nonzero()[0]]
            raise InputError(
                f"{name} holds {float(tensor[tuple(place)])} at {place} ({int(bad.sum())} such values): "
                "forms cannot agree on non-finite inputs. Check where the tensor was made."
            )


def agreement(case: TensorCase, *, chunk_size: int | None = None) -> list[Agreement]:
    """Chunked and recurrent against parallel, in values and in the gradient of every input."""
    require_finite(case)
    spec, dtype = case.spec, case.tensors["q"].dtype
    case = case.with_gradients()
    reference = case.output(form="parallel")
    weights = torch.randn(reference.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = weights.to(reference)
    expected = case.gradients((reference * weights).sum())
    results = []
    for form in OTHER_FORMS:
        if form == "recurrent" and not (spec.has_finite_state or spec.has_series):
            note = "none: no finite state"
            results.append(Agreement(str(spec), form, None, None, TOLERANCE[dtype], note))
            continue
        results.append(_compare(case, form, chunk_size, reference, weights, expected))
    return results


def _compare(
    case: TensorCase,
    form: str,
    chunk_size: int | None,
    reference: Tensor,
    weights: Tensor,
    expected: dict[str, Tensor],
) -> Agreement:
    tolerance = TOLERANCE[reference.dtype]
    series = form == "recurrent" and case.spec.has_series
    options = {"tolerance": SERIES_TOLERANCE_OF_FORMS} if series else {}
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always", SeriesNotice)
        try:
            y = case.output(form=form, chunk_size=chunk_size, **options)
        except StateBudgetError as problem:
            return Agreement(str(case.spec), form, None, None, tolerance, problem.reason)
    largest = max(float(g.norm()) for g in expected.values())
    gradient_error = max(
        relative_error(gradient, expected[name], floor=max(largest / 100, 1e-30))
        for name, gradient in case.gradients((y * weights).sum()).items()
    )
    value_error = relative_error(y, reference, floor=1e-30)
    certificates = [n.message.certificate for n in notices if isinstance(n.message, SeriesNotice)]
    note = certificates[0].summary if certificates and certificates[0] is not None else ""
    return Agreement(str(case.spec), form, value_error, gradient_error, tolerance, note)


def softmax_against_torch(shape: Shape, seed: int, dtype: torch.dtype, size: float) -> dict[str, float]:
    """Relative errors of exp/sum in plain torch and by dispatch, against torch's softmax in float64."""
    case = random_tensors(resolve("exp/sum"), shape, seed, dtype, size=size)
    q, k, v = (case.tensors[n].double().transpose(1, 2) for n in "qkv")
    own = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return {form: relative_error(case.output(form=form), own) for form in ("parallel", "chunked")}


@dataclass(frozen=True)
class ConvergencePoint:
    """taylor(order)/sum against softmax: output errors relative to max|v|."""

    order: int
    about_zero: float
    about_mean: float
    certificate: float


def convergence(shape: Shape, orders: list[int], seed: int, size: float) -> list[ConvergencePoint]:
    """How the truncated series approaches softmax at even orders, in float64, and the certified bound."""
    exact = resolve("exp/sum")
    case = random_tensors(exact, shape, seed, size=size)
    reference = case.output()
    largest = float(case.tensors["v"].abs().amax())
    q, k = (case.tensors[n].transpose(1, 2) for n in "qk")
    scores = q @ k.repeat_interleave(shape.group, dim=1).mT * exact.kernel.default_scale(shape.d)
    bound = float(scores.abs().amax())

    def error(notation: str) -> float:
        y = TensorCase(resolve(notation), case.tensors).output(form="parallel")
        return float((y - reference).abs().amax()) / largest

    return [
        ConvergencePoint(
            n,
            error(f"taylor({n})/sum"),
            error(f"taylor({n},about=mean)/sum"),
            output_error(n, bound),
        )
        for n in orders
    ]
