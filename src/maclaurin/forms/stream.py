"""The inputs and outputs of every form, in one layout.

B batch, K key-value heads, G query heads per key-value head, T queries, S keys,
d size of queries and keys, e size of values
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.tracing import is_tracing
from maclaurin.spec import AttentionSpec, Kernel
from maclaurin.spec.feature_map import FeatureMap


@dataclass(frozen=True)
class Stream:
    """Queries, keys and values after every step that acts on single tokens.

    The score is q·k: φ has been applied to both and the scale to q. Values carry their input gate.
    """

    q: Tensor  # [B, K, G, T, d], d the size after φ
    k: Tensor  # [B, K, S, d]
    v: Tensor  # [B, K, S, e]
    log_forget: Tensor | None = None  # [B, K, S], 0 where a token is absent
    present: Tensor | None = None  # [B, S], False for tokens without weight
    mass: Tensor | None = None  # [B, K, S], a factor on each key's weight in every sum

    @property
    def key_size(self) -> int:
        return self.k.shape[-1]

    @property
    def value_size(self) -> int:
        return self.v.shape[-1]

    @property
    def lengths(self) -> Tensor:
        """How many real tokens each row has, [B]."""
        if self.present is not None:
            return self.present.sum(-1)
        return torch.full((self.k.shape[0],), self.k.shape[-2], device=self.k.device)

    def tokens(self, start: int, stop: int) -> Stream:
        """Queries and keys start … stop−1 (a stream with as many queries as keys)."""
        return dataclasses.replace(self.keys_until(stop, start), q=self.q[..., start:stop, :])

    def keys_until(self, stop: int, start: int = 0) -> Stream:
        """The same queries with keys start … stop−1."""
        return dataclasses.replace(
            self,
            k=self.k[..., start:stop, :],
            v=self.v[..., start:stop, :],
            log_forget=None if self.log_forget is None else self.log_forget[..., start:stop],
            present=None if self.present is None else self.present[..., start:stop],
            mass=None if self.mass is None else self.mass[..., start:stop],
        )


@dataclass(frozen=True)
class Rows:
    """Σ_s w_s v_s and Σ_s w_s of every query, both times e^(−log_scale)."""

    numerator: Tensor  # [B, K, G, T, e]
    row_sum: Tensor | None  # [B, K, G, T]
    log_scale: Tensor | None = None  # [B, K, G, T]; None means 0

    @staticmethod
    def concatenate(parts: list[Rows]) -> Rows:
        """Rows of consecutive queries as one."""
        if len(parts) == 1:
            return parts[0]
        sums = [p.row_sum for p in parts if p.row_sum is not None]
        scales = [p.log_scale for p in parts if p.log_scale is not None]
        return Rows(
            torch.cat([p.numerator for p in parts], dim=-2),
            torch.cat(sums, dim=-1) if sums else None,
            torch.cat(scales, dim=-1) if scales else None,
        )


def values_with_count(spec: AttentionSpec, stream: Stream) -> Tensor:
    """[v, 1] per key, or v where no row sum is needed; 0 for absent tokens.

    Every state and every sum is made of these columns, so padding enters neither.
    """
    columns = stream.v
    if spec.needs_row_sum:
        columns = torch.nn.functional.pad(columns, (0, 1), value=1.0)
    if stream.present is not None:
        columns = torch.where(stream.present[:, None, :, None], columns, 0.0)
    if stream.mass is not None:
        columns = columns * stream.mass[..., None]
    return columns


def split_count(spec: AttentionSpec, sums: Tensor) -> tuple[Tensor, Tensor | None]:
    """The inverse of values_with_count on sums over keys: (numerator, row sum)."""
    return (sums[..., :-1], sums[..., -1]) if spec.needs_row_sum else (sums, None)


def running_totals(log_forget: Tensor) -> Tensor:
    """L_t = Σ_{r≤t} ln f_r in float64: totals grow with the text, and only differences are used."""
    return log_forget.double().cumsum(-1)


def decay_matrix(totals: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(L_t − L_s) for s ≤ t, else 0, from running totals L [..., S]."""
    size = totals.shape[-1]
    visible = causal_mask(size, size, totals.device)
    difference = (totals[..., :, None] - totals[..., None, :]).to(dtype)
    return torch.where(visible, difference, -torch.inf).exp()


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where the key is visible; the queries are the last of the tokens."""
    t = torch.arange(keys - queries, keys, device=device)[:, None]
    return torch.arange(keys, device=device)[None, :] <= t


#: a log forget gate below this forgets everything; with −inf, differences would be NaN
_LOWEST_LOG_FORGET = -200.0


_NO_GATES: Mapping[str, Tensor] = MappingProxyType({})


class Inputs(NamedTuple):
    """q, k, v [B, T, heads, size] and the arguments of the spec's parts by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor] = _NO_GATES
    present: Tensor | None = None  # [B, S], False for padding

    def between(self, start: int, stop: int) -> Inputs:
        """Tokens start … stop−1 of a text with as many queries as keys."""
        part = self.map(lambda u: u[:, start:stop])
        return part if self.present is None else part._replace(present=self.present[:, start:stop])

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply `change` to every tensor but the mask."""
        gates = {name: change(gate) for name, gate in self.gates.items()}
        return Inputs(change(self.q), change(self.k), change(self.v), gates, self.present)

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        """The same call on other queries, keys and values."""
        return self._replace(q=q, k=k, v=v)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays, everything else is computed and kept in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gated_values(
    spec: AttentionSpec, v: Tensor, gates: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """v [B, S, K, e] after the value gates, computed in its own dtype and rounded to `dtype`, if given.

    Products beyond the range of the dtype become large numbers: rows that do not see the key would get 0·∞.
    """
    for gate in spec.value_gates:
        given = gates[gate.argument.name].to(v.dtype)
        v = _without_infinities(gate.on_values(v, given if given.dim() == 4 else given[..., None]))
    return v if dtype is None or dtype == v.dtype else _without_infinities(v.to(dtype))


#: what an overflow becomes; its products with gradients, and sums over keys, do not overflow
_LARGE = 2.0**100


def _without_infinities(u: Tensor) -> Tensor:
    large = min(_LARGE, torch.finfo(u.dtype).max)
    return u.nan_to_num(nan=torch.nan, posinf=large, neginf=-large)


def log_decay(spec: AttentionSpec, inputs: Inputs) -> Tensor | None:
    """ln f [B, K, T] of all decay gates in the working dtype, 0 where a token is absent."""
    total = unlimited_log_decay(spec, inputs)
    return None if total is None else total.to(working_dtype(inputs.q.dtype)).clamp(min=_LOWEST_LOG_FORGET)


def unlimited_log_decay(spec: AttentionSpec, inputs: Inputs) -> Tensor | None:
    """The same for programs that convert it and limit it from below themselves.

    The tensor of a single gate that takes ln f is left in its own dtype.
    """
    gates, dtype = spec.decay_gates, working_dtype(inputs.q.dtype)
    if not gates:
        return None
    if len(gates) == 1 and gates[0].takes_log:
        total = inputs.gates[gates[0].argument.name]
    else:
        logs = [gate.log_decay(inputs.gates[gate.argument.name].to(dtype)) for gate in gates]
        total = logs[0] if len(logs) == 1 else torch.stack(logs).sum(0)
    total = total.transpose(1, 2)
    return total if inputs.present is None else torch.where(inputs.present[:, None], total, 0.0)


def make_stream(spec: AttentionSpec, inputs: Inputs, scale: float) -> Stream:
    """φ, the scale and the value gates applied; heads before tokens; fp32 or fp64."""
    dtype = working_dtype(inputs.q.dtype)
    q, k = (u.to(dtype).transpose(1, 2) for u in (inputs.q, inputs.k))
    v = gated_values(spec, inputs.v.to(dtype), inputs.gates).transpose(1, 2)
    q, k = mapped(spec.kernel, q), mapped(spec.kernel, k)
    q = (q * scale).unflatten(1, (k.shape[1], -1))
    return Stream(q, k, v, log_decay(spec, inputs), inputs.present)


def mapped(kernel: Kernel, u: Tensor) -> Tensor:
    """φ(u); where its slope follows from φ(u), autograd keeps that alone and not every step of φ."""
    feature_map = kernel.feature_map
    if is_tracing() or feature_map is None or type(feature_map).slope is FeatureMap.slope:
        return kernel.mapped(u)
    return _Mapped.apply(u, kernel)  # type: ignore[no-any-return]


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, kernel: Kernel) -> Tensor:
        y = kernel.mapped(u)
        ctx.save_for_backward(y)
        ctx.feature_map = kernel.feature_map
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradients[0] * ctx.feature_map.slope(y), None
