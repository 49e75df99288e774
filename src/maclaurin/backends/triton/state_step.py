"""One token into a state and its queries out of it, in one pass over memory.

    S ← f S + φ(k) [v, 1]ᵀ,          P_g = Σ_{features of one block} φ(q_g) S

The state [F, e+1] of a head is cut into blocks of features, none of which holds features of two orders, so that batch 1
fills the chip and sums of each order can be told apart. Blocks write partial sums; adding them up is left to the caller.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.backends.triton import on_its_device
from maclaurin.backends.triton.tiles import width

#: features per block
BLOCK = 32


@triton.jit
def _step(
    S, FEATURES, COLUMNS, FORGET, STARTS, STOPS, OUT, PARTIAL,
    F, blocks,
    GROUP: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, FORGETS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    f = tl.load(STARTS + block) + tl.arange(0, BF)
    inside_f = f < tl.load(STOPS + block)
    e = tl.arange(0, BE)
    inside = inside_f[:, None] & (e < E)[None, :]
    at = row * F * E + f[:, None] * E + e[None, :]
    state = tl.load(S + at, mask=inside, other=0.0)
    if FORGETS:
        state *= tl.load(FORGET + row)
    features = FEATURES + row * (1 + GROUP) * F
    key = tl.load(features + f, mask=inside_f, other=0.0)
    column = tl.load(COLUMNS + row * E + e, mask=e < E, other=0.0)
    state += key[:, None] * column[None, :]
    tl.store(OUT + at, state, mask=inside)
    for g in tl.static_range(GROUP):
        query = tl.load(features + (1 + g) * F + f, mask=inside_f, other=0.0)
        total = tl.sum(query[:, None] * state, 0)
        tl.store(PARTIAL + ((row * GROUP + g) * blocks + block) * E + e, total, mask=e < E)


@on_its_device
def forward(
    state: Tensor, features: Tensor, columns: Tensor, forget: Tensor | None, starts: Tensor, stops: Tensor
) -> tuple[Tensor, Tensor]:
    """The state after the token, and partial sums [B, K, G, blocks, e+1].

    state [B, K, F, e+1], features [B, K, 1+G, F] of the key and its queries, columns [B, K, e+1], forget [B, K]; all
    contiguous and of one dtype. Blocks of features are starts[i] … stops[i] − 1.
    """
    batch, heads, size, e = state.shape
    group, blocks = features.shape[2] - 1, starts.numel()
    out = torch.empty_like(state)
    partial = torch.empty(batch, heads, group, blocks, e, dtype=state.dtype, device=state.device)
    _step[(batch * heads, blocks)](
        state, features, columns, forget, starts, stops, out, partial, size, blocks,
        GROUP=group, E=e, BE=width(e), BF=BLOCK, FORGETS=forget is not None, num_warps=4,
    )  # fmt: skip
    return out, partial
