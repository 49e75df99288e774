"""A gain e^g and a gate p on every row of attention's output, one pass over memory each way.

    y = p e^g o        do = p e^g dy,   dp = e^g Σ dy∘o,   kept = u·o,     δ = Σ do∘o − dlse

`kept` is what a stock backward is handed as its saved output (backends/row_gain.py). Tensors are
[B, H, T, E] seen through three strides; g, p and u are [B, H, T], contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import dense, on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.tiles import row_offsets, row_tiles


@triton.jit
def _factor(G, P, row, rows, GATE: tl.constexpr):
    gain = tl.exp(tl.load(G + row, mask=row < rows, other=0.0))
    if GATE:
        return gain, gain * tl.load(P + row, mask=row < rows, other=0.0).to(tl.float32)
    return gain, gain


@launched
@triton.jit
def _forward(
    O, G, P, Y, o_b, o_h, o_t, y_b, y_h, y_t, rows, H, T,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    _, factor = _factor(G, P, row, rows, GATE)
    at = row_offsets(row, H, T, o_b, o_h, o_t)[:, None] + e[None, :]
    y = tl.load(O + at, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
    at = row_offsets(row, H, T, y_b, y_h, y_t)[:, None] + e[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _backward(
    DY, O, G, P, U, DO, KEPT, DP,
    d_b, d_h, d_t, o_b, o_h, o_t, rows, H, T,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, GATE: tl.constexpr, READ: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    gain, factor = _factor(G, P, row, rows, GATE)
    at = row_offsets(row, H, T, d_b, d_h, d_t)[:, None] + e[None, :]
    dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    at = row_offsets(row, H, T, o_b, o_h, o_t)[:, None] + e[None, :]
    tl.store(DO + at, (dy * factor[:, None]).to(DO.dtype.element_ty), mask=inside)
    if READ:
        o = tl.load(O + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DP + row, tl.sum(dy * o, 1) * gain, mask=row < rows)
        if KEEP:
            unseen = tl.load(U + row, mask=row < rows, other=0.0)
            tl.store(KEPT + at, (o * unseen[:, None]).to(KEPT.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _delta(
    DO, O, DLSE, DELTA, d_b, d_h, d_t, o_b, o_h, o_t, rows, H, T,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, LESS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    at = row_offsets(row, H, T, d_b, d_h, d_t)[:, None] + e[None, :]
    do = tl.load(DO + at, mask=inside, other=0.0).to(tl.float32)
    at = row_offsets(row, H, T, o_b, o_h, o_t)[:, None] + e[None, :]
    found = tl.sum(do * tl.load(O + at, mask=inside, other=0.0).to(tl.float32), 1)
    if LESS:
        found -= tl.load(DLSE + row, mask=row < rows, other=0.0)
    tl.store(DELTA + row, found, mask=row < rows)


@on_its_device
def delta(do: Tensor, o: Tensor, dlse: Tensor | None) -> Tensor:
    """Σ do∘o − dlse [B, H, T] in fp32."""
    do, dlse = dense(do), None if dlse is None else dlse.contiguous()
    found = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
    grid, rows, sizes = row_tiles(o)
    _delta[grid](do, o, dlse, found, *do.stride()[:3], *o.stride()[:3], *rows, **sizes, LESS=dlse is not None)
    return found


@on_its_device
def forward(o: Tensor, log_gain: Tensor, gate: Tensor | None) -> Tensor:
    """y in the layout of o."""
    y = torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device)
    grid, rows, sizes = row_tiles(o)
    _forward[grid](
        o, log_gain, gate, y, *o.stride()[:3], *y.stride()[:3], *rows, **sizes, GATE=gate is not None
    )
    return y


@on_its_device
def backward(
    dy: Tensor, o: Tensor, log_gain: Tensor, gate: Tensor | None, unseen: Tensor | None, *, sums: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """do, kept (if `unseen` is given) in the layout of o, and e^g Σ dy∘o [B, H, T] in fp32 (if `sums`)."""
    read = sums or unseen is not None
    dy = dense(dy)
    do = torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device)
    kept = None if unseen is None else torch.empty_like(do)
    total = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device) if read else None
    grid, rows, sizes = row_tiles(o)
    _backward[grid](
        dy, o, log_gain, gate, unseen, do, kept, total, *dy.stride()[:3], *o.stride()[:3], *rows, **sizes,
        GATE=gate is not None, READ=read, KEEP=unseen is not None,
    )  # fmt: skip
    return do, kept, total
