"""What is remembered of a layer's heads while a text streams by: sums that add up over contexts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

#: scores are counted in bins of width 1 from here on
FIRST_BIN, BINS = -128.0, 256


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
        """Of the x [H, …] that are seen."""
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
        """Of both together (Chan, Golub and LeVeque)."""
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


@final
@dataclass
class Tally:
    """All sums of one layer. `+` is the tally of both texts."""

    scores: Moments
    row_means: Moments
    row_deviation: Tensor  # [H], summed over rows
    histogram: Tensor  # [H, BINS]
    row_histogram: Tensor  # [H, BINS]
    log_terms: Tensor  # [H, N+1], ln of the relative size of each term, summed over rows
    squared_error_zero: Tensor  # [H, N+1], ‖y_N − y‖² summed over rows
    squared_error_mean: Tensor  # [H, N+1]
    squared_output: Tensor  # [H], ‖y‖²
    rows: Tensor  # [H]
    sink_mass: Tensor  # [H], summed over the rows behind the sinks
    sink_rows: Tensor  # [H]

    def __add__(self, other: Self) -> Self:
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)}
        return type(self)(**{name: a + b for name, (a, b) in pairs.items()})

    @staticmethod
    def concatenated(parts: list[Tally]) -> Tally:
        """Tallies of different heads as one."""
        return _map(lambda *tensors: torch.cat(tensors), *parts)

    def cpu(self) -> Tally:
        """In main memory."""
        return _map(lambda tensor: tensor.cpu(), self)


def histogram(x: Tensor, seen: Tensor) -> Tensor:
    """How many of the x [H, …] that are seen lie in each bin, [H, BINS]."""
    heads = x.shape[0]
    place = (x - FIRST_BIN).floor().clamp(0, BINS - 1).long()
    place = place + BINS * torch.arange(heads, device=x.device).reshape(-1, *[1] * (x.dim() - 1))
    counts = torch.bincount(place[seen.expand_as(x)], minlength=heads * BINS)
    return counts.reshape(heads, BINS).to(torch.float64)


def to_plain(tally: Tally) -> dict[str, Any]:
    """As nested dicts of tensors, for a file."""
    return {
        f.name: dict(vars(value)) if isinstance(value := getattr(tally, f.name), Moments) else value
        for f in dataclasses.fields(tally)
    }


def from_plain(data: dict[str, Any]) -> Tally:
    """The inverse of to_plain."""
    read: dict[str, Any] = {
        name: Moments(**value) if isinstance(value, dict) else value for name, value in data.items()
    }
    return Tally(**read)


def _map(change: Any, *tallies: Tally) -> Tally:
    made: dict[str, Any] = {}
    for field in dataclasses.fields(Tally):
        values = [getattr(tally, field.name) for tally in tallies]
        if isinstance(values[0], Moments):
            names = [f.name for f in dataclasses.fields(Moments)]
            made[field.name] = Moments(**{n: change(*(getattr(v, n) for v in values)) for n in names})
        else:
            made[field.name] = change(*values)
    return Tally(**made)
