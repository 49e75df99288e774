"""One token into a state and its queries out of it, on the fused program (triton/state_step.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.backends import triton as programs
from maclaurin.forms.features import feature_slices, symmetric_powers

#: a program makes one pass per query of a group
_LARGEST_GROUP = 16


def state_step_serves(moments: Tensor, k: Tensor, q: Tensor, columns: Tensor, forget: Tensor | None) -> bool:
    """Whether the fused program takes this state [B, K, F, E] and token; it has no gradient."""
    given = (moments, k, q, columns, *([] if forget is None else [forget]))
    graded = torch.is_grad_enabled() and any(u.requires_grad for u in given)
    sizes = moments.shape[3] <= 1024 and q.shape[2] <= _LARGEST_GROUP and moments.shape[2] > 0
    return programs.runs_on(moments.device) and moments.dtype == torch.float32 and sizes and not graded


def sums_by_order(
    moments: Tensor, k: Tensor, q: Tensor, columns: Tensor, forget: Tensor | None, orders: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """S' = f S + φ(k)[v, 1]ᵀ [B, K, F, E]; what q [B, K, G, d] reads of each order [orders, B, K, G, E]."""
    layout = step_layout(k.shape[-1], tuple(orders), moments.device)
    given = (u.contiguous() for u in (moments, k, q, columns))
    return state_step(*given, None if forget is None else forget.contiguous(), *layout)  # type: ignore[no-any-return]


class _Layout(NamedTuple):
    """How features are made, and the blocks they are read in (see the program)."""

    entries: Tensor
    roots: Tensor
    starts: Tensor
    stops: Tensor
    cuts: Tensor


@lru_cache(maxsize=64)
def step_layout(d: int, orders: tuple[int, ...], device: torch.device) -> _Layout:
    """For heads of size d."""
    from maclaurin.backends.triton.state_step import BLOCK

    degree = max(*orders, 1)
    entries = [
        (*multiset, *(d,) * (degree - n))
        for n in orders
        for multiset in itertools.combinations_with_replacement(range(d), n)
    ]
    slices = feature_slices(d, orders)
    blocks = [
        [(start, min(start + BLOCK, s.stop)) for start in range(s.start, s.stop, BLOCK)] for s in slices
    ]
    starts, stops = zip(*itertools.chain(*blocks), strict=True)
    cuts = itertools.accumulate(map(len, blocks), initial=0)
    with torch.inference_mode(False):
        roots = symmetric_powers(torch.ones(d), orders).to(device)
        whole = (torch.tensor(u, dtype=torch.int32, device=device) for u in (starts, stops, list(cuts)))
        return _Layout(torch.tensor(entries, dtype=torch.int32, device=device), roots, *whole)


@torch.library.custom_op("maclaurin::state_step", mutates_args=())
def state_step(
    moments: Tensor,
    k: Tensor,
    q: Tensor,
    columns: Tensor,
    forget: Tensor | None,
    entries: Tensor,
    roots: Tensor,
    starts: Tensor,
    stops: Tensor,
    cuts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The state after the token, and what queries read of each order [orders, B, K, G, E]."""
    from maclaurin.backends.triton import state_step as program

    return program.forward(moments, k, q, columns, forget, entries, roots, starts, stops, cuts)


@state_step.register_fake
def _(moments: Tensor, k: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    orders = rest[-1].numel() - 1
    return torch.empty_like(moments), moments.new_empty(orders, *q.shape[:3], moments.shape[3])
