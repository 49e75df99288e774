"""One token into a state and its queries out of it, on the fused program (triton/state_step.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maclaurin.backends import triton as programs
from maclaurin.forms.features import feature_slices

#: a program makes one pass per query of a group
_LARGEST_GROUP = 16


def state_step_serves(moments: Tensor, features: Tensor, columns: Tensor, forget: Tensor | None) -> bool:
    """Whether the fused program takes this state; it has no gradient."""
    given = (moments, features, columns, *([] if forget is None else [forget]))
    graded = torch.is_grad_enabled() and any(u.requires_grad for u in given)
    sizes = moments.shape[3] <= 1024 and features.shape[2] - 1 <= _LARGEST_GROUP and moments.shape[2] > 0
    return programs.runs_on(moments.device) and moments.dtype == torch.float32 and sizes and not graded


def sums_by_order(
    moments: Tensor, features: Tensor, columns: Tensor, forget: Tensor | None, orders: Sequence[int], d: int
) -> tuple[Tensor, Tensor]:
    """S' = f S + φ(k)[v, 1]ᵀ [B, K, F, E], and what queries read of each order of it [orders, B, K, G, E]."""
    blocks = _blocks(d, tuple(orders), moments.device)
    after, partial = state_step(
        moments.contiguous(),
        features.contiguous(),
        columns.contiguous(),
        None if forget is None else forget.contiguous(),
        blocks.starts,
        blocks.stops,
    )
    pieces = partial.split(blocks.counts, dim=3)
    return after, torch.stack([piece.sum(3) for piece in pieces])


class _Blocks(NamedTuple):
    starts: Tensor
    stops: Tensor
    counts: list[int]


@lru_cache(maxsize=64)
def _blocks(d: int, orders: tuple[int, ...], device: torch.device) -> _Blocks:
    """Blocks of features, none across two orders, and how many each order has."""
    from maclaurin.backends.triton.state_step import BLOCK

    slices = feature_slices(d, orders)
    cuts = [[(start, min(start + BLOCK, s.stop)) for start in range(s.start, s.stop, BLOCK)] for s in slices]
    starts, stops = zip(*(block for order in cuts for block in order), strict=True)
    with torch.inference_mode(False):
        first, last = (torch.tensor(cut, dtype=torch.int32, device=device) for cut in (starts, stops))
        return _Blocks(first, last, [len(order) for order in cuts])


@torch.library.custom_op("maclaurin::state_step", mutates_args=())
def state_step(
    moments: Tensor, features: Tensor, columns: Tensor, forget: Tensor | None, starts: Tensor, stops: Tensor
) -> tuple[Tensor, Tensor]:
    """The state after the token, and partial sums [B, K, G, blocks, e+1]."""
    from maclaurin.backends.triton import state_step as program

    return program.forward(moments, features, columns, forget, starts, stops)


@state_step.register_fake
def _(moments: Tensor, features: Tensor, columns: Tensor, forget: Tensor | None, starts: Tensor, *_: Any):  # type: ignore[no-untyped-def]
    batch, heads, _size, e = moments.shape
    partial = moments.new_empty(batch, heads, features.shape[2] - 1, starts.numel(), e)
    return torch.empty_like(moments), partial
