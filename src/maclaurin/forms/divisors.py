"""Denominators that are no sum over weights: how many keys a query sees, and the learned running sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from maclaurin.forms.inputs import Inputs, working_dtype
from maclaurin.spec import AttentionSpec, RunningSum, VisibleKeys


def visible_keys(inputs: Inputs, before: Tensor | None, causal: bool) -> Tensor:
    """The number of keys each query sees, [B, T] in the working dtype; `before` [B] came earlier."""
    batch, queries, keys = inputs.q.shape[0], inputs.q.shape[1], inputs.k.shape[1]
    real = None if inputs.present is None else inputs.present.sum(-1)[:, None]
    if causal:
        number = torch.arange(keys - queries + 1, keys + 1, device=inputs.q.device).expand(batch, -1)
        number = number if real is None else torch.minimum(number, real)
    elif real is None:
        number = torch.full((batch, queries), keys, device=inputs.q.device)
    else:
        number = real.expand(-1, queries)
    return (number if before is None else number + before[:, None]).to(working_dtype(inputs.q.dtype))


def log_running_sum(
    spec: AttentionSpec, inputs: Inputs, before: Tensor | None, causal: bool
) -> Tensor | None:
    """ln Σ_{r≤t} e^{g_r} for every query, [B, T, H]; `before` [B, H] came earlier."""
    if not isinstance(spec.denominator, RunningSum) or inputs.denominator_gate is None:
        return None
    logs = inputs.denominator_gate.to(working_dtype(inputs.q.dtype))
    if inputs.present is not None:
        logs = torch.where(inputs.present[..., None], logs, -torch.inf)
    if before is not None:
        logs = torch.cat([before[:, None], logs], dim=1)
    queries = inputs.q.shape[1]
    if not causal:
        return logs.logsumexp(1, keepdim=True).expand(-1, queries, -1)
    return logs.logcumsumexp(1)[:, -queries:]


def floored(denominator: RunningSum, log_sum: Tensor) -> Tensor:
    """ln of the running sum with its floor; 0 where no token has come yet."""
    if denominator.floor is not None:
        log_sum = log_sum.clamp(min=math.log(denominator.floor))
    return torch.where(log_sum > -torch.inf, log_sum, 0.0)


def log_divisor(spec: AttentionSpec, inputs: Inputs, causal: bool) -> Tensor | None:
    """ln D [B, T, H] or [B, T, 1] of a denominator that is not the row sum; None for 1."""
    total = None
    if counts_keys(spec):
        total = visible_keys(inputs, None, causal).clamp(min=1).log()[..., None]
    running = log_running_sum(spec, inputs, None, causal)
    if running is not None and isinstance(spec.denominator, RunningSum):
        log_sum = floored(spec.denominator, running)
        total = log_sum if total is None else total + log_sum
    return total


def counts_keys(spec: AttentionSpec) -> bool:
    """Whether a row is divided by the number of keys it sees."""
    denominator = spec.denominator
    return isinstance(denominator, VisibleKeys) or (isinstance(denominator, RunningSum) and denominator.len)
