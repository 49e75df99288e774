"""Tensors as a caller hands them over, and as the forms take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from maclaurin.forms.stream import Stream
from maclaurin.spec import AttentionSpec

#: a log forget gate below this forgets everything; −inf would make NaN of differences
_LOWEST_LOG_FORGET = -200.0


_NO_GATES: Mapping[str, Tensor] = MappingProxyType({})


class Inputs(NamedTuple):
    """q, k, v [B, T, heads, size] and the arguments of the spec's parts by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor] = _NO_GATES
    present: Tensor | None = None  # [B, S], False for padding

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same change to every tensor but the mask."""
        gates = {name: change(gate) for name, gate in self.gates.items()}
        return Inputs(change(self.q), change(self.k), change(self.v), gates, self.present)

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        """The same call on other queries, keys and values."""
        return self._replace(q=q, k=k, v=v)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays, everything else is computed and kept in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gated_values(spec: AttentionSpec, v: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
    """v [B, S, K, e] after the value gates, in its own dtype."""
    for gate in spec.value_gates:
        given = gates[gate.argument.name].to(v.dtype)
        v = gate.on_values(v, given if given.dim() == 4 else given[..., None])
    return v


def log_decay(spec: AttentionSpec, inputs: Inputs) -> Tensor | None:
    """ln f [B, K, T] of all decay gates in the working dtype, 0 where a token is absent."""
    if not spec.decay_gates:
        return None
    dtype = working_dtype(inputs.q.dtype)
    logs = [gate.log_decay(inputs.gates[gate.argument.name].to(dtype)) for gate in spec.decay_gates]
    total = logs[0] if len(logs) == 1 else torch.stack(logs).sum(0)
    total = total.transpose(1, 2).clamp(min=_LOWEST_LOG_FORGET)
    return total if inputs.present is None else torch.where(inputs.present[:, None], total, 0.0)


def make_stream(spec: AttentionSpec, inputs: Inputs, scale: float) -> Stream:
    """φ, the scale and the value gates applied; heads before tokens; fp32 or fp64."""
    dtype = working_dtype(inputs.q.dtype)
    q, k = (u.to(dtype).transpose(1, 2) for u in (inputs.q, inputs.k))
    v = gated_values(spec, inputs.v.to(dtype), inputs.gates).transpose(1, 2)
    if spec.kernel.feature_map is not None:
        q, k = spec.kernel.feature_map(q), spec.kernel.feature_map(k)
    q = (q * scale).unflatten(1, (k.shape[1], -1))
    return Stream(q, k, v, log_decay(spec, inputs), inputs.present)
