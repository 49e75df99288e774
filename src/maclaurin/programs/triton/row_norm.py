"""N(y) per row with a gate after it, one pass over memory each way.

    unit:   n = s·a/‖a‖,    a = y, or y − mean(y) for LayerNorm,      out = p·n
    da = s/‖a‖ (dn − â (â·dn)),  â = a/‖a‖,  dn = p·dout;      dp = Σ dout∘n, or dout∘n per channel

Without a gate the way back needs only the answer and g = s/‖a‖, one number per row:

    da = g (dn − n (n·dn)/‖n‖²),        a = n/g

A row of zeros stays zero and hands its gradient on as it came. Rows are divided by their largest entry
first, so no square overflows. Tensors are [rows, E] seen through three strides: rows run over b, t, h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import dense, on_its_device
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.tiles import entries, row_offsets, row_tiles


@triton.jit
def _unit(y, inside, E: tl.constexpr, CENTRED: tl.constexpr):
    """â and 1/‖a‖ of each row."""
    if CENTRED:
        y = tl.where(inside, y - tl.sum(y, 1)[:, None] / E, 0.0)
    largest = tl.max(tl.abs(y), 1)
    largest = tl.where(largest == 0, 1.0, largest)
    y = y / largest[:, None]
    squared = tl.sum(y * y, 1)
    inverse = 1 / tl.sqrt(tl.where(squared == 0, 1.0, squared))
    return y * inverse[:, None], inverse / largest


@launched
@triton.jit
def _forward(
    Y, P, OUT, GAIN, y_b, y_t, y_h, o_b, o_t, o_h, rows, T, H, factor,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, CENTRED: tl.constexpr, GATE: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    at = row_offsets(row, T, H, y_b, y_t, y_h)[:, None] + e[None, :]
    y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    unit, inverse = _unit(y, inside, E, CENTRED)
    out = unit * factor
    if KEEP:
        tl.store(GAIN + row, inverse * factor, mask=row < rows)
    if GATE == 1:
        out *= tl.load(P + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if GATE == 2:
        out *= tl.load(P + entries(row, e, E), mask=inside, other=0.0).to(tl.float32)
    at = row_offsets(row, T, H, o_b, o_t, o_h)[:, None] + e[None, :]
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _backward_from_answer(
    OUT, GAIN, DOUT, DY, Y, g_b, g_t, g_h, d_b, d_t, d_h, rows, T, H,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    out = tl.load(OUT + entries(row, e, E), mask=inside, other=0.0).to(tl.float32)
    at = row_offsets(row, T, H, g_b, g_t, g_h)[:, None] + e[None, :]
    dout = tl.load(DOUT + at, mask=inside, other=0.0).to(tl.float32)
    squared = tl.sum(out * out, 1)  # of the answer as it was rounded: da is to be orthogonal to that
    share = tl.sum(out * dout, 1) / tl.where(squared == 0, 1.0, squared)
    gain = tl.load(GAIN + row, mask=row < rows, other=1.0)[:, None]
    da = (dout - out * share[:, None]) * gain
    if CENTRED:
        da = tl.where(inside, da - tl.sum(da, 1)[:, None] / E, 0.0)
    at = row_offsets(row, T, H, d_b, d_t, d_h)[:, None] + e[None, :]
    tl.store(DY + at, da.to(DY.dtype.element_ty), mask=inside)
    tl.store(Y + at, (out / gain).to(Y.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _backward(
    Y, P, DOUT, DY, DP, y_b, y_t, y_h, g_b, g_t, g_h, rows, T, H, factor,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, CENTRED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    at = row_offsets(row, T, H, y_b, y_t, y_h)[:, None] + e[None, :]
    y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    dout_at = row_offsets(row, T, H, g_b, g_t, g_h)[:, None] + e[None, :]
    dout = tl.load(DOUT + dout_at, mask=inside, other=0.0).to(tl.float32)
    unit, inverse = _unit(y, inside, E, CENTRED)
    dn = dout * factor
    if GATE == 1:
        dp = tl.sum(dn * unit, 1)
        tl.store(DP + row, dp.to(DP.dtype.element_ty), mask=row < rows)
        dn *= tl.load(P + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if GATE == 2:
        gate_at = entries(row, e, E)
        tl.store(DP + gate_at, (dn * unit).to(DP.dtype.element_ty), mask=inside)
        dn *= tl.load(P + gate_at, mask=inside, other=0.0).to(tl.float32)
    da = (dn - unit * tl.sum(dn * unit, 1)[:, None]) * inverse[:, None]
    if CENTRED:
        da = tl.where(inside, da - tl.sum(da, 1)[:, None] / E, 0.0)
    tl.store(DY + at, da.to(DY.dtype.element_ty), mask=inside)


@on_its_device
def forward(
    y: Tensor, gate: Tensor | None, factor: float, centred: bool, *, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """p·N(y), contiguous, for y [B, T, H, e] with a dense last axis and a contiguous gate [B, T, H(, e)].

    And g [B, T, H] in fp32, if it is to be kept.
    """
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    gain = torch.empty(y.shape[:3], dtype=torch.float32, device=y.device) if keep else None
    grid, rows, sizes = row_tiles(y)
    _forward[grid](
        y, gate, out, gain, *y.stride()[:3], *out.stride()[:3], *rows, factor,
        **sizes, CENTRED=centred, GATE=_gate_kind(gate), KEEP=keep,
    )  # fmt: skip
    return out, gain


@on_its_device
def backward_from_answer(
    dout: Tensor, out: Tensor, gain: Tensor, centred: bool, layout: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """dy, and y again (less its mean, if centred), in a layout, from what `forward` gave and kept without a gate."""
    dout = dense(dout)
    dy, y = (torch.empty_strided(out.shape, layout, dtype=out.dtype, device=out.device) for _ in range(2))
    grid, rows, sizes = row_tiles(out)
    _backward_from_answer[grid](
        out, gain, dout, dy, y, *dout.stride()[:3], *dy.stride()[:3], *rows, **sizes, CENTRED=centred
    )
    return dy, y


@on_its_device
def backward(
    dout: Tensor, y: Tensor, gate: Tensor | None, factor: float, centred: bool
) -> tuple[Tensor, Tensor | None]:
    """dy in the layout of y, and dgate."""
    dy = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)
    dgate = None if gate is None else torch.empty_like(gate)
    dout = dense(dout)
    grid, rows, sizes = row_tiles(y)
    _backward[grid](
        y, gate, dout, dy, dgate, *y.stride()[:3], *dout.stride()[:3], *rows, factor,
        **sizes, CENTRED=centred, GATE=_gate_kind(gate),
    )  # fmt: skip
    return dy, dgate


def _gate_kind(gate: Tensor | None) -> int:
    return 0 if gate is None else 1 if gate.dim() == 3 else 2
