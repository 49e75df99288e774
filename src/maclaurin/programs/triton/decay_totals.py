"""Running totals of a log decay gate, and its gradient from theirs, in one launch each.

    L_t = Σ_{r≤t} ln f_r in fp64,        d ln f_r = Σ_{t≥r} dL_t

Gates below `LOWEST` forget everything; they count as LOWEST and get no gradient. With the totals come, for tiles of
keys and of queries, the decay from each key to the end of its tile and from the start of its tile to each query:

    e^{L_last − L_s},    e^{L_t − L_first}

and for pairs within a tile log₂ of the decay since the start of each `PADDING` tokens, in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton.fast_math import LOG2E, power_of_two
from maclaurin.programs.triton.launch import Launch, Layout, by_shapes, launched, prepared
from maclaurin.programs.triton.tiles import cdiv, power_of_2

#: as in forms/stream.py
_LOWEST = tl.constexpr(-200.0)
#: tokens that a program adds up at a time
_BLOCK = 1024
#: rows of factors are padded to a multiple of this, the largest tile
PADDING = 128
_START = tl.constexpr(PADDING)


class Decay(NamedTuple):
    """L [B, K, T] in fp64; log₂ of the decay within PADDING tokens, and that within tiles, [B·K, padded] in fp32."""

    totals: Tensor
    since: Tensor
    of_keys: Tensor
    of_queries: Tensor


@triton.jit
def kept(later, earlier):
    """The decay e^{L_t − L_s}; at most 1, also for masked pairs."""
    return power_of_two(tl.minimum((later - earlier).to(tl.float32), 0.0) * LOG2E)


@triton.jit
def _log_gate(LOGS, l_t, n, T):
    """ln f of the tokens n, at least LOWEST, and 0 beyond the text."""
    log = tl.load(LOGS + n * l_t, mask=n < T, other=0.0).to(tl.float64)
    return tl.where(log < _LOWEST, _LOWEST, log)


@triton.jit
def _at_place(totals, PLACE: tl.constexpr):
    """The total at one place of each tile; totals are [tiles, tokens]."""
    here = tl.arange(0, totals.shape[1])[None, :] == PLACE
    return tl.sum(tl.where(here, totals, 0.0), 1)[:, None]


@triton.jit
def _factors(totals, SIZE: tl.constexpr, LAST: tl.constexpr):
    """The decay from each token to the end of its tile, or from its start to each token."""
    tiles = tl.reshape(totals, (totals.shape[0] // SIZE, SIZE))
    if LAST:
        found = kept(_at_place(tiles, SIZE - 1), tiles)
    else:
        found = kept(tiles, _at_place(tiles, 0))
    return tl.reshape(found, (totals.shape[0],))


@triton.jit
def _since(totals):
    """log₂ of the decay since the start of each PADDING tokens."""
    tiles = tl.reshape(totals, (totals.shape[0] // _START, _START))
    return tl.reshape((tiles - _at_place(tiles, 0)).to(tl.float32) * LOG2E, (totals.shape[0],))


@launched
@triton.jit
def _add_up(
    LOGS, TOTALS, SINCE, OF_KEYS, OF_QUERIES, l_strides, T, K, padded,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    l_b, l_k, l_t = l_strides
    row = tl.program_id(0).to(tl.int64)
    LOGS += row // K * l_b + row % K * l_k
    before = tl.zeros((), tl.float64)
    for start in range(0, padded, BLOCK):
        n = start + tl.arange(0, BLOCK)
        log = _log_gate(LOGS, l_t, n, T)
        totals = tl.cumsum(log, 0) + before
        before += tl.sum(log, 0)
        tl.store(TOTALS + row * T + n, totals, mask=n < T)
        tl.store(SINCE + row * padded + n, _since(totals), mask=n < padded)
        tl.store(OF_KEYS + row * padded + n, _factors(totals, KEYS, True), mask=n < padded)
        tl.store(OF_QUERIES + row * padded + n, _factors(totals, QUERIES, False), mask=n < padded)


@launched
@triton.jit
def _add_up_backward(
    LOGS, OF_ROWS, OF_KEYS, D_LOGS, l_strides, d_strides, T, K,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    l_b, l_k, l_t = l_strides
    d_b, d_k, d_t = d_strides
    row = tl.program_id(0).to(tl.int64)
    LOGS += row // K * l_b + row % K * l_k
    D_LOGS += row // K * d_b + row % K * d_k
    after = tl.zeros((), tl.float64)
    blocks = tl.cdiv(T, BLOCK)
    for i in range(blocks):
        n = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        d = -tl.load(OF_KEYS + row * T + n, mask=n < T, other=0.0).to(tl.float64)
        for member in tl.static_range(GROUP):
            d += tl.load(OF_ROWS + (row * GROUP + member) * T + n, mask=n < T, other=0.0).to(tl.float64)
        found = tl.cumsum(d, 0, reverse=True) + after
        after += tl.sum(d, 0)
        log = tl.load(LOGS + n * l_t, mask=n < T, other=0.0).to(tl.float32)
        found = tl.where(log < _LOWEST, 0.0, found)
        tl.store(D_LOGS + n * d_t, found.to(D_LOGS.dtype.element_ty), mask=n < T)


def padded(tokens: int) -> int:
    """The length of a row of factors."""
    return cdiv(tokens, PADDING) * PADDING


def totals_of(log_decay: Tensor, keys: int, queries: int) -> Decay:
    """Totals of ln f [B, K, T], and factors for tiles of so many keys and queries."""
    batch, heads, tokens = log_decay.shape
    totals = torch.empty(batch, heads, tokens, dtype=torch.float64, device=log_decay.device)
    factors = torch.empty(3, batch * heads, padded(tokens), dtype=torch.float32, device=log_decay.device)
    since, of_keys, of_queries = factors.unbind()
    _add_up_launch(Layout.of(log_decay), keys, queries)(log_decay, totals, since, of_keys, of_queries)
    return Decay(totals, since, of_keys, of_queries)


@by_shapes
def _add_up_launch(logs: Layout, keys: int, queries: int) -> Launch:
    batch, heads, tokens = logs.shape
    options = {"KEYS": keys, "QUERIES": queries, **_block(tokens)}
    return prepared(_add_up, (batch * heads,), (logs.strides, tokens, heads, padded(tokens)), options)


def totals_backward(log_decay: Tensor, of_rows: Tensor, of_keys: Tensor) -> Tensor:
    """The gradient of ln f [B, K, T]; that of L_t is `of_rows` [B, H, T] summed over groups minus `of_keys` [B, K, T]."""
    d_logs = torch.empty_like(log_decay)
    launch = _add_up_backward_launch(Layout.of(log_decay), d_logs.stride(), of_rows.shape[1])
    launch(log_decay, of_rows, of_keys, d_logs)
    return d_logs


@by_shapes
def _add_up_backward_launch(logs: Layout, strides: tuple[int, ...], heads: int) -> Launch:
    batch, kv_heads, tokens = logs.shape
    options = {"GROUP": heads // kv_heads, **_block(tokens)}
    return prepared(_add_up_backward, (batch * kv_heads,), (logs.strides, strides, tokens, kv_heads), options)


def _block(tokens: int) -> dict[str, int]:
    return {"BLOCK": min(_BLOCK, power_of_2(padded(tokens))), "num_warps": 4}
