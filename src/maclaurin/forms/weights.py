"""κ at the scores. A polynomial is evaluated in place, and only the scores are saved for its gradient:

    w = Σ aₙ xⁿ,        dx = dw · Σ n aₙ xⁿ⁻¹

Order N by Horner's rule takes 2N passes over the scores, and autograd would store each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maclaurin.forms.tracing import is_tracing
from maclaurin.spec import Kernel
from maclaurin.spec.kernel import RowStatistics


def weights_of(kernel: Kernel, x: Tensor, statistics: RowStatistics | None) -> Tensor:
    """κ at the scores x [..., t, s]."""
    fused = kernel.fused
    if fused is None or fused.function != "polynomial" or len(fused.coefficients) < 3 or is_tracing():
        return kernel.weight(x, statistics)
    if fused.about_mean:
        assert statistics is not None
        x = x - statistics.mean
    return _Polynomial.apply(x, fused.coefficients)  # type: ignore[no-any-return]


class _Polynomial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.coefficients = coefficients
        return _value(coefficients, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The slope is a polynomial too, so it can be differentiated again."""
        (x,) = ctx.saved_tensors
        slope = tuple(n * a for n, a in enumerate(ctx.coefficients))[1:]
        return gradients[0] * _Polynomial.apply(x, slope), None


def _value(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    *lower, highest = coefficients
    if not lower:
        return torch.full_like(x, highest)
    result = x * highest
    for a in reversed(lower[1:]):
        result.add_(a).mul_(x)
    return result.add_(lower[0])
