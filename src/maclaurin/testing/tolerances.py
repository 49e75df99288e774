"""One table of tolerances by dtype, never loosened by environment, and how errors are measured."""

from __future__ import annotations

import torch
from torch import Tensor

#: largest relative error ‖a − b‖/‖b‖ between two ways to compute the same thing
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
#: the same for programs in benchmarks: on random inputs of unit size, only rounding may differ
TOLERANCE_BEFORE_TIMING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
#: truncation error allowed where exp runs by its series, far below TOLERANCE: when forms are compared, and in
#: the laws, which allow less
SERIES_TOLERANCE_OF_FORMS = 1e-10
SERIES_TOLERANCE_OF_LAWS = 2e-11
#: a quantity smaller than this is compared absolutely: the gradient of a gate that cancels is 0
FLOOR = 1e-3


def relative_error(value: Tensor, reference: Tensor, floor: float = FLOOR) -> float:
    """‖value − reference‖ / max(‖reference‖, floor); NaN counts as infinite."""
    value, reference = value.detach().double(), reference.detach().double()
    error = float((value - reference).norm() / reference.norm().clamp(min=floor))
    return error if error == error else float("inf")


def assert_same(
    value: Tensor,
    reference: Tensor,
    what: str,
    tolerance: float | None = None,
    floor: float = FLOOR,
) -> None:
    """Raise an AssertionError that names `what` if two tensors differ by more than the tolerance."""
    assert value.shape == reference.shape, f"{what}: shape {list(value.shape)} is not {list(reference.shape)}"
    allowed = TOLERANCE[reference.dtype] if tolerance is None else tolerance
    error = relative_error(value, reference, floor)
    assert error <= allowed, f"{what}: relative error {error:.2e} is over {allowed:.0e}"


def assert_same_gradients(values: dict[str, Tensor], references: dict[str, Tensor], what: str) -> None:
    """assert_same for each; for a tiny gradient, errors are relative to a hundredth of the largest.

    Where a gradient is zero by an identity (a gate that cancels, a query whose size cancels),
    only the rounding of terms as large as the other gradients is left.
    """
    largest = max(float(g.norm()) for g in references.values())
    for name, gradient in values.items():
        assert_same(gradient, references[name], f"{what}gradient of {name}", floor=max(FLOOR, largest / 100))
