"""The formula itself, dense and in float64, from nothing but the methods of the parts.

    y_t = p_t N( o_t / D_t · Σ_{s≤t} (Π_{s<r≤t} f_r) w_ts i_s v_s )

No form, no state, no scaling of weights: every form and every program is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from maclaurin.spec import AttentionSpec


@dataclass(frozen=True)
class PlainSeen:
    """The sums that a denominator reads, in units of 1 unless another unit is given."""

    keys: Tensor
    total: Tensor
    given: Tensor | None = None
    unit: float = 1.0

    @property
    def row_sum(self) -> Tensor:
        """Σ_s w_ts, 1 where that is 0."""
        return self.total.masked_fill(self.total == 0, 1.0)

    @property
    def log_row_sum(self) -> Tensor:
        """Logarithm of the row sum."""
        return self.row_sum.log()

    @property
    def scaled_row_sum(self) -> Tensor:
        """The row sum times the unit."""
        return self.total * self.unit

    @property
    def argument(self) -> Tensor:
        """The tensor that the denominator declares."""
        assert self.given is not None
        return self.given


def dense_output(spec: AttentionSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    """y [B, T, H, e] for q, k, v and gates by name, causal; windows with kept keys are not supported."""
    q, k, v = (tensors[name].double() for name in "qkv")
    gates = {name: gate.double() for name, gate in tensors.items() if name not in ("q", "k", "v")}
    scale = spec.kernel.default_scale(q.shape[3])
    for gate in spec.value_gates:
        v = gate.on_values(v, _as_column(gates[gate.argument.name]))
    if spec.kernel.feature_map is not None:
        q, k = spec.kernel.feature_map(q), spec.kernel.feature_map(k)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, K, T, ·]
    q = q.transpose(1, 2).unflatten(1, (k.shape[1], -1))  # [B, K, G, T, d]
    weights = _weights(spec, scale * q @ k[:, :, None].mT, _decay(spec, gates, k))
    y = weights @ v[:, :, None]
    if spec.denominator is not None:
        divisor = spec.denominator.divisor(_seen(spec, weights, gates))[..., None]
        y = y / divisor.masked_fill(divisor == 0, 1.0)  # where both are zero, zero
    y = y.flatten(1, 2).transpose(1, 2)
    for part in spec.gates_before_norm:
        y = part.on_rows(y, _as_column(gates[part.argument.name]))
    y = y if spec.norm is None else spec.norm(y)
    for part in spec.gates_after_norm:
        y = part.on_rows(y, _as_column(gates[part.argument.name]))
    return y


def _weights(spec: AttentionSpec, x: Tensor, decay: Tensor) -> Tensor:
    """w_ts times its decay, 0 for later keys; x [B, K, G, T, T]."""
    t = torch.arange(x.shape[-1], device=x.device)
    age = t[:, None] - t
    tail = age >= 0
    exact = torch.zeros_like(tail)
    if spec.window is not None:
        exact = tail & ((t < spec.window.sinks) | (age < spec.window.size))
        tail = tail & ~exact
    measure = decay * tail
    statistics = None
    if spec.kernel.depends_on_row:
        powers = range(spec.highest_order + 1)
        statistics = spec.kernel.statistics([(measure * x**n).sum(-1, keepdim=True) for n in powers])
    weights = spec.kernel.weight(torch.where(tail, x, 0.0), statistics) * measure
    if spec.window is None:
        return weights
    bias = spec.window.log_bias(age.to(x.dtype))
    near = x - spec.kernel.reference(statistics) + (0.0 if bias is None else bias)
    return weights + torch.where(exact, near, -math.inf).exp() * decay


def _decay(spec: AttentionSpec, gates: Mapping[str, Tensor], k: Tensor) -> Tensor:
    """Π_{s<r≤t} f_r [B, K, 1, T, T] for s ≤ t; anything for later keys."""
    total = k.new_zeros(k.shape[:3])
    for gate in spec.decay_gates:
        total = total + gate.log_decay(gates[gate.argument.name]).transpose(1, 2).cumsum(-1)
    difference = (total[..., :, None] - total[..., None, :])[:, :, None]
    return torch.where(torch.ones_like(difference).tril().bool(), difference, 0.0).exp()


def _seen(spec: AttentionSpec, weights: Tensor, gates: Mapping[str, Tensor]) -> PlainSeen:
    tokens = weights.shape[-1]
    keys = torch.arange(1, tokens + 1, dtype=weights.dtype, device=weights.device).expand(1, 1, 1, -1)
    argument = spec.denominator.declared_argument() if spec.denominator is not None else None
    given = None
    if argument is not None:
        given = gates[argument.name]
        given = given.logcumsumexp(1) if argument.running else given
        given = given.transpose(1, 2).unflatten(1, (weights.shape[1], -1))
    return PlainSeen(keys, weights.sum(-1), given)


def _as_column(gate: Tensor) -> Tensor:
    return gate if gate.dim() == 4 else gate[..., None]
