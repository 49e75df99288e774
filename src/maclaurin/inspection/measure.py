"""One layer on one context, in float64: scores, terms, errors by order, sinks.

    y  = Σ_s eˣ v_s / Σ_s eˣ                        exact
    y_N = Σ_{n≤N} Σ_s (x−c)ⁿ v_s/n!  /  Σ_{n≤N} Σ_s (x−c)ⁿ/n!      c = 0, or the mean of the row's scores

Written down directly, not through the forms: orders share their powers, so all orders up to N cost one
pass of N products. A block of heads and a block of queries are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from maclaurin.inspection.tally import Moments, Tally, histogram
from maclaurin.spec import AttentionSpec

#: scores in memory at a time: 16 MiB of them stay near the processor
BLOCK = 1 << 21
_TINY = 1e-300


def measured(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, highest: int, sinks: int, chunk: int
) -> Tally:
    """The tally of q [T, H, d], k [T, Hkv, d], v [T, Hkv, e] under the visibility of `spec`."""
    scale = spec.kernel.default_scale(q.shape[-1])
    q, k, v = (u.double().transpose(0, 1) for u in (q, k, v))  # [H, T, d]
    group, tokens = q.shape[0] // k.shape[0], q.shape[1]
    heads = max(1, BLOCK // (min(chunk, tokens) * tokens))
    parts = []
    for first in range(0, q.shape[0], heads):
        of_keys = torch.arange(first, min(first + heads, q.shape[0]), device=q.device) // group
        block = q[first : first + heads] * scale, k[of_keys], v[of_keys]
        rows = (_rows(spec, *block, start, chunk, highest, sinks) for start in range(0, tokens, chunk))
        parts.append(_total(rows))
    return Tally.concatenated(parts)


def _total(tallies: Iterator[Tally]) -> Tally:
    total = next(tallies)
    for tally in tallies:
        total = total + tally
    return total


def _rows(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, start: int, chunk: int, highest: int, sinks: int
) -> Tally:
    """Queries start … start + chunk − 1 of some heads with the keys up to them."""
    q = q[:, start : start + chunk]
    stop = start + q.shape[1]
    k, v = k[:, :stop], v[:, :stop]
    seen = visible(spec, start, stop, q.device)
    x = q @ k.mT
    number = seen.sum(-1)
    row_mean = torch.where(seen, x, 0.0).sum(-1) / number
    centred = torch.where(seen, x - row_mean[..., None], 0.0)
    exact, log_norm, weights = _softmax(x, seen, v)
    terms, zero_errors = _series(torch.where(seen, x, 0.0), seen, v, exact, highest)
    _, mean_errors = _series(centred, seen, v, exact, highest)
    every = torch.ones_like(row_mean, dtype=torch.bool)
    behind = torch.arange(start, stop, device=q.device) >= sinks
    rows = torch.full_like(row_mean[:, 0], stop - start)
    return Tally(
        scores=Moments.of(x, seen),
        row_means=Moments.of(row_mean, every),
        row_deviation=(centred.square().sum(-1) / number).sqrt().sum(-1),
        histogram=histogram(x, seen),
        row_histogram=histogram(row_mean, every),
        log_terms=(terms - log_norm[..., None]).sum(1),
        squared_error_zero=zero_errors,
        squared_error_mean=mean_errors,
        squared_output=exact.square().sum((-2, -1)),
        rows=rows,
        sink_mass=(weights[..., :sinks].sum(-1) * behind).sum(-1),
        sink_rows=torch.full_like(rows, int(behind.sum())),
    )


def visible(spec: AttentionSpec, start: int, stop: int, device: torch.device) -> Tensor:
    """Which keys 0 … stop−1 the queries start … stop−1 see: all earlier, or those of a bare window."""
    t = torch.arange(start, stop, device=device)[:, None]
    s = torch.arange(stop, device=device)[None, :]
    seen = s <= t
    if spec.window is not None and not spec.orders:
        seen = seen & ((s > t - spec.window.size) | (s < spec.window.sinks))
    return seen


def _softmax(x: Tensor, seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, ln‖Σ eˣ v‖, and the weights."""
    x = torch.where(seen, x, -torch.inf)
    largest = x.amax(-1, keepdim=True)
    weights = (x - largest).exp()
    numerator, total = weights @ v, weights.sum(-1, keepdim=True)
    log_norm = numerator.norm(dim=-1).clamp(min=_TINY).log() + largest[..., 0]
    return numerator / total, log_norm, weights / total


def _series(x: Tensor, seen: Tensor, v: Tensor, exact: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """ln‖Σ xⁿ v/n!‖ [H, rows, N+1], and Σ over rows of ‖y_n − y‖² [H, N+1].

    Powers are those of x/r, r the largest |x|, so that none overflows; rⁿ/n! comes behind the sum.
    """
    largest = max(float(x.abs().amax()), _TINY)
    columns = torch.nn.functional.pad(v, (0, 1), value=1.0)  # [v, 1]: numerator and row sum at once
    unit, power = x / largest, seen.to(x.dtype).expand_as(x).clone()
    total = torch.zeros_like(exact[..., :1]) * columns[:, :1]
    sizes, errors = [], []
    for n in range(highest + 1):
        if n:
            power.mul_(unit)
        sums, log_factor = power @ columns, n * math.log(largest) - math.lgamma(n + 1)
        total = total + sums * (math.exp(log_factor) if log_factor < 700 else math.inf)
        sizes.append(sums[..., :-1].norm(dim=-1).clamp(min=_TINY).log() + log_factor)
        errors.append((total[..., :-1] / total[..., -1:] - exact).square().sum((-2, -1)))
    return torch.stack(sizes, dim=-1), torch.stack(errors, dim=-1)
