"""Measurements of the heads of one layer, in float64: scores, terms, errors by order, sinks, state ranks.

    y   = Σ_s eˣ v_s / Σ_s eˣ                                          softmax
    y_N = Σ_{n≤N} Σ_s (x−c)ⁿ v_s/n!  /  Σ_{n≤N} Σ_s (x−c)ⁿ/n!         c = 0, or the mean score of the row

The series is computed here and not by the library's forms: orders share their powers, so all orders up to N
cost one pass of N products. Only a block of heads and of queries is in memory at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from maclaurin.inspection.inspection_record import HeadRecord, Histogram, Spread
from maclaurin.spec import AttentionSpec

#: scores in memory at a time, 16 MiB of them: small enough for the processor's cache
BLOCK = 1 << 21
#: scores are counted in bins of width 1 from here on
FIRST_BIN, BINS = -128.0, 256
_TINY = 1e-300


# ------------------------------------------------------------------------------------- running sums


@final
@dataclass
class Moments:
    """Number, mean, Σ(x − mean)², least and largest of some numbers per head [H]."""

    count: Tensor
    mean: Tensor
    squares: Tensor
    least: Tensor
    largest: Tensor

    @staticmethod
    def of(x: Tensor, seen: Tensor) -> Moments:
        """Moments of x [H, …] where `seen` is true."""
        dims = tuple(range(1, x.dim()))
        count = seen.expand_as(x).sum(dims).to(x.dtype)
        mean = torch.where(seen, x, 0.0).sum(dims) / count.clamp(min=1)
        off = torch.where(seen, x - mean.reshape(-1, *[1] * len(dims)), 0.0)
        return Moments(
            count,
            mean,
            off.square().sum(dims),
            torch.where(seen, x, torch.inf).amin(dims),
            torch.where(seen, x, -torch.inf).amax(dims),
        )

    def __add__(self, other: Moments) -> Moments:
        """Moments of both sets together (Chan, Golub and LeVeque)."""
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart.square() * self.count * share,
            torch.minimum(self.least, other.least),
            torch.maximum(self.largest, other.largest),
        )

    @property
    def deviation(self) -> Tensor:
        """√(Σ(x − mean)² / number)."""
        return (self.squares / self.count.clamp(min=1)).sqrt()

    def spread(self, head: int) -> Spread:
        """The record of one head."""
        values = (self.mean, self.deviation, self.least, self.largest)
        return Spread(*(float(value[head]) for value in values))


@final
@dataclass
class Tally:
    """Sums over the rows of a text for every head of a layer; `+` adds the sums of two texts."""

    scores: Moments
    row_means: Moments
    row_deviation: Tensor  # [H]
    histogram: Tensor  # [H, BINS]
    row_histogram: Tensor  # [H, BINS]
    log_terms: Tensor  # [H, N+1], ln of the relative size of each term
    squared_error_zero: Tensor  # [H, N+1], ‖y_N − y‖²
    squared_error_mean: Tensor  # [H, N+1]
    squared_output: Tensor  # [H], ‖y‖²
    rows: Tensor  # [H]
    sink_mass: Tensor  # [H], over the rows after the sinks
    sink_rows: Tensor  # [H]

    def __add__(self, other: Tally) -> Tally:
        names = [field.name for field in dataclasses.fields(self)]
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @staticmethod
    def concatenated(parts: list[Tally]) -> Tally:
        """The tallies of different heads as one."""
        return _map(lambda *tensors: torch.cat(tensors), *parts)

    def cpu(self) -> Tally:
        """The same in main memory."""
        return _map(lambda tensor: tensor.cpu(), self)

    def to_tensors(self) -> dict[str, Any]:
        """Nested dicts of tensors, for torch.save."""
        return {
            field.name: dict(vars(value)) if isinstance(value, Moments) else value
            for field in dataclasses.fields(self)
            for value in (getattr(self, field.name),)
        }

    @staticmethod
    def from_tensors(data: dict[str, Any]) -> Tally:
        """The inverse of to_tensors."""
        read: dict[str, Any] = {
            name: Moments(**value) if isinstance(value, dict) else value for name, value in data.items()
        }
        return Tally(**read)

    def records(self, layer: int, ranks: Tensor) -> list[HeadRecord]:
        """The record of each head; `ranks` [2, Hkv] are the ranks of the states, averaged over contexts."""
        terms = (self.log_terms / self.rows[:, None]).exp()
        zero, mean = (
            (squares / self.squared_output[:, None]).sqrt()
            for squares in (self.squared_error_zero, self.squared_error_mean)
        )
        heads, kv_heads = self.rows.shape[0], ranks.shape[1]
        return [
            HeadRecord(
                layer=layer,
                head=head,
                kv_head=(kv_head := head * kv_heads // heads),
                scores=self.scores.spread(head),
                score_histogram=_histogram_record(self.histogram[head]),
                row_means=self.row_means.spread(head),
                row_mean_histogram=_histogram_record(self.row_histogram[head]),
                row_deviation=float(self.row_deviation[head] / self.rows[head]),
                terms=tuple(terms[head].tolist()),
                dominant_order=int(terms[head].argmax()),
                error_about_zero=_finite(zero[head]),
                error_about_mean=_finite(mean[head]),
                sink_mass=float(self.sink_mass[head] / self.sink_rows[head].clamp(min=1)),
                effective_rank_1=float(ranks[0, kv_head]),
                effective_rank_2=float(ranks[1, kv_head]),
            )
            for head in range(heads)
        ]


def _map(change: Callable[..., Tensor], *tallies: Tally) -> Tally:
    """`change` applied to the corresponding tensors of all tallies."""
    made: dict[str, Any] = {}
    for field in dataclasses.fields(Tally):
        values = [getattr(tally, field.name) for tally in tallies]
        if isinstance(values[0], Moments):
            names = [f.name for f in dataclasses.fields(Moments)]
            made[field.name] = Moments(**{n: change(*(getattr(v, n) for v in values)) for n in names})
        else:
            made[field.name] = change(*values)
    return Tally(**made)


def _histogram_record(counts: Tensor) -> Histogram:
    """The histogram without the empty bins at both ends."""
    filled = torch.nonzero(counts)[:, 0]
    first, last = int(filled[0]), int(filled[-1])
    return Histogram(FIRST_BIN + first, 1.0, tuple(int(n) for n in counts[first : last + 1].tolist()))


def _finite(errors: Tensor) -> tuple[float | None, ...]:
    return tuple(error if math.isfinite(error) else None for error in errors.tolist())


# -------------------------------------------------------------------------------------- one context


def tally_heads(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, highest: int, sinks: int, chunk: int
) -> Tally:
    """The tally of q [T, H, d], k [T, Hkv, d], v [T, Hkv, e] with the keys visible under `spec`."""
    scale = spec.kernel.default_scale(q.shape[-1])
    q, k, v = (u.double().transpose(0, 1) for u in (q, k, v))  # [H, T, d]
    group, tokens = q.shape[0] // k.shape[0], q.shape[1]
    heads = max(1, BLOCK // (min(chunk, tokens) * tokens))
    parts = []
    for first in range(0, q.shape[0], heads):
        of_keys = torch.arange(first, min(first + heads, q.shape[0]), device=q.device) // group
        block = q[first : first + heads] * scale, k[of_keys], v[of_keys]
        rows = (_tally_rows(spec, *block, start, chunk, highest, sinks) for start in range(0, tokens, chunk))
        parts.append(_total(rows))
    return Tally.concatenated(parts)


def _total(tallies: Iterator[Tally]) -> Tally:
    total = next(tallies)
    for tally in tallies:
        total = total + tally
    return total


def _tally_rows(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, start: int, chunk: int, highest: int, sinks: int
) -> Tally:
    """The tally of queries start … start + chunk − 1 of some heads."""
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
        histogram=_histogram(x, seen),
        row_histogram=_histogram(row_mean, every),
        log_terms=(terms - log_norm[..., None]).sum(1),
        squared_error_zero=zero_errors,
        squared_error_mean=mean_errors,
        squared_output=exact.square().sum((-2, -1)),
        rows=rows,
        sink_mass=(weights[..., :sinks].sum(-1) * behind).sum(-1),
        sink_rows=torch.full_like(rows, int(behind.sum())),
    )


def visible(spec: AttentionSpec, start: int, stop: int, device: torch.device) -> Tensor:
    """Which of the keys 0 … stop−1 the queries start … stop−1 see: all earlier ones, or those of a window."""
    t = torch.arange(start, stop, device=device)[:, None]
    s = torch.arange(stop, device=device)[None, :]
    seen = s <= t
    if spec.window is not None and not spec.orders:
        seen = seen & ((s > t - spec.window.size) | (s < spec.window.sinks))
    return seen


def _histogram(x: Tensor, seen: Tensor) -> Tensor:
    """Counts [H, BINS] of the x [H, …] that are seen."""
    heads = x.shape[0]
    place = (x - FIRST_BIN).floor().clamp(0, BINS - 1).long()
    place = place + BINS * torch.arange(heads, device=x.device).reshape(-1, *[1] * (x.dim() - 1))
    counts = torch.bincount(place[seen.expand_as(x)], minlength=heads * BINS)
    return counts.reshape(heads, BINS).to(torch.float64)


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

    Powers of x/r, r the largest |x|, do not overflow; their sums are then multiplied by rⁿ/n!.
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


# --------------------------------------------------------------------------------------- state ranks


def effective_rank(singular_values: Tensor) -> Tensor:
    """e^{−Σ p ln p}, p = σ/Σσ, over the last dimension."""
    share = singular_values / singular_values.sum(-1, keepdim=True).clamp(min=_TINY)
    return torch.special.entr(share).sum(-1).exp()


def state_ranks(k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """[2, Hkv]: ranks of Σ k vᵀ and Σ k^⊗2 vᵀ for k [T, Hkv, d], v [T, Hkv, e].

    The second has d² rows, but its singular values are the roots of the eigenvalues of
    Σ_st (k_s·k_t)² v_s v_tᵀ, an e × e matrix.
    """
    k, v = (u.double().transpose(0, 1) for u in (k, v))
    first = torch.linalg.svdvals(k.mT @ v)
    gram = v.new_zeros(v.shape[0], v.shape[2], v.shape[2])
    for start in range(0, k.shape[1], chunk):
        rows = slice(start, start + chunk)
        gram += v[:, rows].mT @ ((k[:, rows] @ k.mT).square() @ v)
    second = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return torch.stack([effective_rank(first), effective_rank(second)])
