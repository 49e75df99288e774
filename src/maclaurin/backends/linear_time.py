"""Polynomials of low order in linear time: what a spec is to the fused operator (linear_operator.py).

Kernels that expand about the row's mean score hand the program a polynomial per row:

    T_N(x − c_t) = Σ_n α_n(t) xⁿ,       c_t = scale · q_t·(mean of the keys up to t)

Keys, and the moments of those that came before, are first taken about a mean of all of them: low precision
keeps small numbers better.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from maclaurin.backends.fused_inputs import (
    denominator_is_served,
    loses_digits,
    operands,
    over_denominator,
    row_divisor,
    rows_are_final,
    tensors_are_served,
)
from maclaurin.backends.linear_operator import linear_polynomial
from maclaurin.backends.row_norm import finish_rows
from maclaurin.forms.inputs import Inputs, clamped_log_forget, mean_key
from maclaurin.forms.recentring import HIGHEST, moments_about
from maclaurin.forms.state import State
from maclaurin.spec import AttentionSpec, RowSum, Taylor

#: head sizes up to which an order is served: beyond, its blocks no longer fit the program's registers
LARGEST_HEAD = {0: 128, 1: 128, 2: 128, 3: 32}
#: tokens per chunk by order: the larger the state, the fewer of them should be written down
CHUNK = {0: 256, 1: 256, 2: 1024, 3: 1024}
#: in texts this long, moments of order 2 are most of the memory, so fewer of them are written down
LONG, CHUNK_OF_LONG = 1 << 15, 1280


def linear_serves(spec: AttentionSpec, inputs: Inputs, causal: bool) -> bool:
    """Whether the fused program computes this spec for such tensors, in a text that starts here."""
    if not causal or spec.window is not None or loses_digits(spec, inputs):
        return False
    known = _kernel_is_served(spec, inputs.q.shape[3]) and denominator_is_served(spec)
    return known and tensors_are_served(inputs, causal)


def linear_attend(spec: AttentionSpec, inputs: Inputs, *, scale: float, chunk: int | None) -> Tensor:
    """y [B, T, H, e] in the dtype of q."""
    y, _ = _attend(spec, inputs, scale, chunk, None, None)
    y = over_denominator(spec, inputs, y, True, None)
    return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype)


def linear_carries_state(spec: AttentionSpec, inputs: Inputs, state: State | None) -> bool:
    """Whether the program takes up such a state, and gives one back."""
    wide = state is None or state.moments.dtype == torch.float32
    return wide and inputs.present is None and (not spec.kernel.depends_on_row or moments_can_move(spec))


def moments_can_move(spec: AttentionSpec) -> bool:
    """Whether a state of this spec counts keys, and holds orders that `moments_about` knows."""
    return isinstance(spec.denominator, RowSum) and max(spec.orders or (0,)) <= HIGHEST


def linear_attend_from_state(
    spec: AttentionSpec, inputs: Inputs, state: State | None, *, scale: float, chunk: int | None
) -> tuple[Tensor, State]:
    """y [B, T, H, e] in the dtype of q, and the state after the last token."""
    batch, tokens = inputs.k.shape[:2]
    count = torch.zeros(batch, dtype=torch.int64, device=inputs.k.device) if state is None else state.count
    y, moments = _attend(spec, inputs, scale, chunk, None if state is None else state.moments, count)
    y = over_denominator(spec, inputs, y, True, count)
    log_forget, log_decay = clamped_log_forget(inputs), None
    if log_forget is not None:
        earlier = None if state is None else state.log_decay
        log_decay = log_forget.sum(-1) if earlier is None else earlier + log_forget.sum(-1)
    after = State(spec, moments, count + tokens, log_decay)
    return finish_rows(spec, y, inputs.output_gate, inputs.q.dtype), after


def _attend(
    spec: AttentionSpec,
    inputs: Inputs,
    scale: float,
    chunk: int | None,
    initial: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Rows as the program divides them; where `before` [B] keys are counted, also the moments after it."""
    log_forget = clamped_log_forget(inputs)
    sums = linear_sums(
        spec,
        operands(spec, inputs),
        inputs.present,
        None if log_forget is None else log_forget.float().contiguous(),
        initial,
        row_divisor(spec, before),
        scale=scale,
        chunk=chunk,
        keep=before is not None,
        final=rows_are_final(spec, inputs, before),
    )
    return sums.rows, sums.moments


class LinearSums(NamedTuple):
    """Rows [B, T, H, e] over their divisors [B, H, T]; the moments of all keys [B, K, F, E], to keep."""

    rows: Tensor
    divisors: Tensor
    moments: Tensor
    centred: CentredKeys | None


def linear_sums(
    spec: AttentionSpec,
    tensors: tuple[Tensor, Tensor, Tensor],
    present: Tensor | None,
    log_forget: Tensor | None,
    initial: Tensor | None,
    divisor: tuple[str, float],
    *,
    scale: float,
    chunk: int | None,
    keep: bool,
    final: bool,
) -> LinearSums:
    """The operator on q, k, v, about the mean of the keys where the kernel wants it; `final` rounds rows."""
    q, k, v = tensors
    alpha = centred = None
    if spec.kernel.depends_on_row:
        centred = centred_keys(q, k, present, initial, scale)
        k, initial = centred.k, centred.initial
        alpha = row_coefficients(spec, centred.mean, scale)
    rows, divisors, _, after, *_ = linear_polynomial(
        q,
        k,
        v,
        alpha,
        log_forget,
        initial,
        padded_series(spec, scale),
        *divisor,
        chunk_for(spec, chunk, q.shape[1]),
        list(spec.orders or ()),
        keep,
        final,
    )
    if centred is not None and keep:
        after = moments_about(after, -centred.offset[:, 0])
    return LinearSums(rows, divisors, after, centred)


def chunk_for(spec: AttentionSpec, asked: int | None, tokens: int) -> int:
    """Tokens per chunk: what was asked for, up to the text's length, in a size the program's tiles divide."""
    order = max(spec.orders or (0,))
    if asked is None and order == 2 and tokens >= LONG:
        return CHUNK_OF_LONG
    wanted = CHUNK[order] if asked is None else asked
    return max(64, _power_of_two(min(wanted, tokens)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def head_is_served(order: int, d: int) -> bool:
    """Whether the program takes moments of that order for heads of size d."""
    return d <= LARGEST_HEAD.get(order, 0)


def _kernel_is_served(spec: AttentionSpec, d: int) -> bool:
    if not spec.orders or not head_is_served(max(spec.orders), d):
        return False
    if not spec.kernel.depends_on_row:
        return True
    return isinstance(spec.kernel, Taylor) and not spec.forget_gate  # the mean is that of all keys alike


def padded_series(spec: AttentionSpec, scale: float) -> list[float]:
    """c₀, c₁, … of the score without its scale; where rows have their own, only how many there are counts."""
    if spec.kernel.depends_on_row:
        return [1.0] * (max(*(spec.orders or ()), 1) + 1)
    known = spec.kernel.coefficients()[: max(spec.orders or (0,)) + 1]
    series = [float(c) * scale**n for n, c in enumerate(known)]
    return series + [0.0] * (2 - len(series))


class CentredKeys(NamedTuple):
    """Keys less an offset [B, 1, K, d], moments before them about it, and queries' mean scores [B, H, T]."""

    k: Tensor
    initial: Tensor | None
    offset: Tensor
    mean: Tensor


def centred_keys(
    q: Tensor, k: Tensor, present: Tensor | None, initial: Tensor | None, scale: float
) -> CentredKeys:
    """Keys [B, T, K, d] about the mean of them and of those whose moments [B, K, F, e + 1] came before."""
    count = torch.arange(1, k.shape[1] + 1, device=k.device)[:, None, None]
    if initial is None:
        offset = mean_key(k, present).to(k.dtype)
        k = k - offset
        return CentredKeys(k, None, offset, scores_of_own_key(q, k.float().cumsum(1) / count, scale))
    d = k.shape[-1]
    seen, total = initial[:, None, :, 0, -1:].detach(), initial[:, None, :, 1 : 1 + d, -1]
    offset = ((total.detach() + k.detach().float().sum(1, keepdim=True)) / (seen + k.shape[1])).to(k.dtype)
    k, initial = k - offset, moments_about(initial, offset[:, 0])
    before = initial[:, None, :, 1 : 1 + d, -1]
    return CentredKeys(
        k, initial, offset, scores_of_own_key(q, (before + k.float().cumsum(1)) / (seen + count), scale)
    )


def scores_of_own_key(q: Tensor, key: Tensor, scale: float) -> Tensor:
    """scale·q_t·key_t [B, H, T] for a key [B, T or 1, K, d] of its own for each query."""
    grouped = q.float().unflatten(2, (key.shape[2], -1))
    own = key.float().expand(-1, q.shape[1], -1, -1)
    return torch.einsum("btkgd,btkd->bkgt", grouped, own).flatten(1, 2) * scale


def row_coefficients(spec: AttentionSpec, mean: Tensor, scale: float) -> Tensor:
    """α [N+1, B, H, T]: the coefficients about the mean, in powers of the score without its scale."""
    alpha = spec.kernel.coefficients(mean)
    return torch.stack([(a + torch.zeros_like(mean)) * scale**n for n, a in enumerate(alpha)])
