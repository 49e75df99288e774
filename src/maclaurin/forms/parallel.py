"""The parallel form: every weight is computed and stored.

    y_t = p_t N( o_t G_t Σ_{s≤t} D_ts κ(q_t, k_s) i_s v_s ),     D_ts = Π_{s<r≤t} f_r

O(T·S) time and memory; the definition the other forms are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maclaurin.forms.ranking import kept_by_rank
from maclaurin.forms.stream import Rows, Stream, causal_mask, running_totals
from maclaurin.forms.tracing import is_tracing
from maclaurin.spec import AttentionSpec, Kernel, Window
from maclaurin.spec.kernel import RowStatistics
from maclaurin.spec.polynomials import needs_double


def parallel_rows(spec: AttentionSpec, stream: Stream, *, causal: bool = True) -> Rows:
    """All rows at once. With fewer queries than keys, the queries are the last tokens."""
    x = stream.q @ stream.k[:, :, None].mT  # [B, K, G, T, S]
    visible = _visible(stream, causal)
    log_decay = _log_decay(stream)
    logits = spec.kernel.log_weight(x)
    if logits is not None:
        return _log_domain_rows(logits, visible, log_decay, stream.v)
    exact = None
    if spec.window is not None:
        exact = _exact(spec.window, visible, *_numbers(stream))
        if spec.window.kept:
            scores = x if log_decay is None else x + log_decay
            left = _all_axes(visible & ~exact)
            kept = kept_by_rank(scores, _all_axes(exact), left, stream.present, spec.window.kept)
            exact = exact | kept
    tail = visible if exact is None else visible & ~exact
    measure = _measure(tail, log_decay, x.dtype)
    in_tail = torch.where(tail, x, 0.0)  # keys outside it may be infinite, and ∞·0 is not 0
    statistics = None
    if spec.kernel.depends_on_row:
        statistics = spec.kernel.statistics(_moments(in_tail, measure, spec.highest_order))
    weights = weights_of(spec.kernel, in_tail, statistics) * measure
    rows = Rows(weights @ stream.v[:, :, None], weights.sum(-1))
    if spec.window is None or exact is None:
        return rows
    logits = _biased(spec.window, x, *_numbers(stream)) - spec.kernel.reference(statistics)
    return rows_with_exact_keys(rows, logits if log_decay is None else logits + log_decay, exact, stream.v)


def _biased(window: Window, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """The scores [..., T, S] of queries number t and keys number s with the window's bias by age t − s."""
    bias = window.log_bias((t - s).to(x.dtype))
    return x if bias is None else x + bias


def rows_with_exact_keys(tail: Rows, logits: Tensor, exact: Tensor, v: Tensor) -> Rows:
    """Add keys of weight e^logits, where `exact`, to rows that hold the tail.

    Both are divided by e^m, m the largest exact logit or 0, so that neither overflows.
    """
    logits = torch.where(exact, logits, -torch.inf)
    largest = logits.detach().amax(-1).clamp(min=0)
    weights = (logits - largest[..., None]).exp()
    shrink = (-largest).exp()
    numerator = tail.numerator * shrink[..., None] + weights @ v[:, :, None]
    row_sum = None if tail.row_sum is None else tail.row_sum * shrink + weights.sum(-1)
    return Rows(numerator, row_sum, largest)


def _log_domain_rows(logits: Tensor, visible: Tensor, log_decay: Tensor | None, v: Tensor) -> Rows:
    """Weights e^logits, divided by the largest of their row."""
    logits = logits if log_decay is None else logits + log_decay
    logits = torch.where(visible, logits, -torch.inf)
    largest = logits.detach().amax(-1)
    largest = torch.where(largest.isfinite(), largest, 0.0)  # a row that sees no key
    weights = (logits - largest[..., None]).exp()
    return Rows(weights @ v[:, :, None], weights.sum(-1), largest)


def _measure(seen: Tensor, log_decay: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D_ts where the key is seen, else 0."""
    if log_decay is None:
        return seen.to(dtype)
    return torch.where(seen, log_decay, -torch.inf).exp()


def _moments(x: Tensor, measure: Tensor, highest: int) -> list[Tensor]:
    """zₙ = Σ_s D_ts x_tsⁿ as [..., T, 1]."""
    result, powers = [measure.sum(-1, keepdim=True)], measure
    for _ in range(highest):
        powers = powers * x
        result.append(powers.sum(-1, keepdim=True))
    return result


def _visible(stream: Stream, causal: bool) -> Tensor:
    """Which keys each query sees, [T, S] or [B, 1, 1, T, S]."""
    queries, keys = stream.q.shape[-2], stream.k.shape[-2]
    if causal:
        mask = causal_mask(queries, keys, stream.q.device)
    else:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=stream.q.device)
    return mask if stream.present is None else mask & stream.present[:, None, None, None, :]


def _exact(window: Window, visible: Tensor, t: Tensor, s: Tensor) -> Tensor:
    """The visible keys s among the last `size` up to query t and the first `sinks`."""
    return visible & ((s < window.sinks) | (s > t - window.size))


def _all_axes(mask: Tensor) -> Tensor:
    """[T, S] or [B, 1, 1, T, S] → [1 or B, 1, 1, T, S]."""
    return mask if mask.dim() == 5 else mask[None, None, None]


def _numbers(stream: Stream) -> tuple[Tensor, Tensor]:
    """The number of each query and of each key in the text, without padding: [..., T, 1] and [..., 1, S]."""
    queries, keys = stream.q.shape[-2], stream.k.shape[-2]
    if stream.present is None:
        number = torch.arange(keys, device=stream.q.device)[None]
    else:
        number = stream.present.cumsum(-1)[:, None, None, None] - 1
    return number[..., keys - queries :].mT, number


def _log_decay(stream: Stream) -> Tensor | None:
    """ln D_ts = L_t − L_s [B, K, 1, T, S] from the running totals L of the log forget gate.

    Totals grow with the text, so they are summed in float64 and split in two: the differences are
    then right to the working precision.
    """
    if stream.log_forget is None:
        return None
    total = running_totals(stream.log_forget)
    coarse = total.to(stream.q.dtype)
    fine = (total - coarse).to(stream.q.dtype)
    queries = stream.q.shape[-2]

    def difference(part: Tensor) -> Tensor:
        return part[..., -queries:, None] - part[..., None, :]

    return (difference(coarse) + difference(fine))[:, :, None]


# ---------------------------------------------------------------------------------------------- weights


def weights_of(kernel: Kernel, x: Tensor, statistics: RowStatistics | None) -> Tensor:
    """κ at the scores x [..., t, s]. A polynomial is evaluated in place and saves only x for its gradient:

        w = Σ aₙ xⁿ,        dx = dw · Σ n aₙ xⁿ⁻¹

    Order N by Horner's rule takes 2N passes over the scores, and autograd would store each of them.
    """
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
        return polynomial(coefficients, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The slope is a polynomial too, so it can be differentiated again."""
        (x,) = ctx.saved_tensors
        slope = tuple(n * a for n, a in enumerate(ctx.coefficients))[1:]
        return gradients[0] * _Polynomial.apply(x, slope), None


def polynomial(coefficients: tuple[float, ...], x: Tensor, out: Tensor | None = None) -> Tensor:
    """`horner` in place: in one new tensor, or in `out`. Autograd cannot follow it."""
    if needs_double(coefficients, x):
        result = polynomial(coefficients, x.double())
        return result.to(x.dtype) if out is None else out.copy_(result)
    *lower, highest = coefficients
    if not lower:
        return torch.full_like(x, highest)
    result = torch.mul(x, highest, out=out)
    for a in reversed(lower[1:]):
        result.add_(a).mul_(x)
    return result.add_(lower[0])
