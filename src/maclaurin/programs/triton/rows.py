"""Norm, denominator and gates of finished attention rows, in one pass over memory forward and one backward.

**Norm** N(y) with a gate p after it; rows run over b, t, h:

    n = s·a/‖a‖,    a = y, or y − mean(y) for LayerNorm,      out = p·n
    da = s/‖a‖ (dn − â (â·dn)),  â = a/‖a‖,  dn = p·dout;      dp = Σ dout∘n, or dout∘n per channel

Without a gate the backward pass needs only the output and g = s/‖a‖, one number per row:

    da = g (dn − n (n·dn)/‖n‖²),        a = n/g

A row of zeros stays zero and passes its gradient on unchanged. Rows are first divided by their largest entry, so that
no square overflows.

**Quotient** y = n/D, backward only. Rows are [B, T, H, e], D and dz [B, H, T] in fp32:

    dn = dy/D,        dz = −Σ dn∘y

dn is rounded to the dtype of matrix products, and dz is computed from the rounded dn: gradients use dn·v + dz =
dn·(v − y), which cancels if all values are nearly equal. For the same reason a rounded y comes with its rounding error.

**Scale**: a factor e^g/D and a gate p. Tensors are [B, H, T, E] with strides for the first three axes; g and u are
[B, H, T], contiguous; ln D [B or 1, H or 1, T] and p [B, T, H] may have any strides, p any dtype:

    y = p e^g o/D      do = p e^g dy/D,   total = Σ dy∘o e^g/D,   kept = u·o,     δ = Σ do∘o − dlse

`kept` replaces the saved output in torch's backward pass (programs/stock_softmax.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import LEAST_GATE, dense, on_its_device
from maclaurin.programs.triton.launch import Launch, Layout, by_shapes, launched, new_like, prepared
from maclaurin.programs.triton.tiles import entries, operand, row_offsets, row_tiles

# --------------------------------------------------------------------------------------------------- the norm


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
def _norm(
    Y, P, OUT, GAIN, y_strides, o_strides, rows, T, H, factor,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, CENTRED: tl.constexpr, GATE: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    y_b, y_t, y_h = y_strides
    o_b, o_t, o_h = o_strides
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
def _norm_backward_from_answer(
    OUT, GAIN, DOUT, DY, Y, g_strides, d_strides, rows, T, H,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    g_b, g_t, g_h = g_strides
    d_b, d_t, d_h = d_strides
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    out = tl.load(OUT + entries(row, e, E), mask=inside, other=0.0).to(tl.float32)
    at = row_offsets(row, T, H, g_b, g_t, g_h)[:, None] + e[None, :]
    dout = tl.load(DOUT + at, mask=inside, other=0.0).to(tl.float32)
    squared = tl.sum(out * out, 1)  # of the rounded output: da must be orthogonal to that
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
def _norm_backward(
    Y, P, DOUT, DY, DP, y_strides, g_strides, rows, T, H, factor,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, CENTRED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    y_b, y_t, y_h = y_strides
    g_b, g_t, g_h = g_strides
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
def normed(
    y: Tensor, gate: Tensor | None, factor: float, centred: bool, *, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """p·N(y), contiguous, for y [B, T, H, e] with a dense last axis and a contiguous gate [B, T, H(, e)].

    With `keep`, also g [B, T, H] in fp32.
    """
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    gain = torch.empty(y.shape[:3], dtype=torch.float32, device=y.device) if keep else None
    _normed_launch(Layout.of(y), _gate_kind(gate), factor, centred, keep)(y, gate, out, gain)
    return out, gain


@by_shapes
def _normed_launch(y: Layout, gate: int, factor: float, centred: bool, keep: bool) -> Launch:
    grid, rows, sizes = row_tiles(y)
    out = Layout.contiguous(y.shape, y.dtype)
    options = {**sizes, "CENTRED": centred, "GATE": gate, "KEEP": keep}
    return prepared(_norm, grid, (y.strides[:3], out.strides[:3], *rows, factor), options)


@on_its_device
def normed_backward_from_answer(
    dout: Tensor, out: Tensor, gain: Tensor, centred: bool, layout: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """dy, and y (minus its mean, if centred), with strides `layout`, from output and g of `normed` without a gate."""
    dout = dense(dout)
    dy, y = (torch.empty_strided(out.shape, layout, dtype=out.dtype, device=out.device) for _ in range(2))
    _backward_from_answer_launch(Layout.of(out), Layout.of(dout), tuple(layout), centred)(
        out, gain, dout, dy, y
    )
    return dy, y


@by_shapes
def _backward_from_answer_launch(
    out: Layout, dout: Layout, of_gradient: tuple[int, ...], centred: bool
) -> Launch:
    grid, rows, sizes = row_tiles(out)
    numbers = (dout.strides[:3], of_gradient[:3], *rows)
    return prepared(_norm_backward_from_answer, grid, numbers, {**sizes, "CENTRED": centred})


@on_its_device
def normed_backward(
    dout: Tensor, y: Tensor, gate: Tensor | None, factor: float, centred: bool
) -> tuple[Tensor, Tensor | None]:
    """dy in the layout of y, and dgate."""
    dy = new_like(y)
    dgate = None if gate is None else torch.empty_like(gate)
    dout = dense(dout)
    launch = _normed_backward_launch(Layout.of(y), Layout.of(dout), _gate_kind(gate), factor, centred)
    launch(y, gate, dout, dy, dgate)
    return dy, dgate


@by_shapes
def _normed_backward_launch(y: Layout, dout: Layout, gate: int, factor: float, centred: bool) -> Launch:
    grid, rows, sizes = row_tiles(y)
    numbers = (y.strides[:3], dout.strides[:3], *rows, factor)
    return prepared(_norm_backward, grid, numbers, {**sizes, "CENTRED": centred, "GATE": gate})


def _gate_kind(gate: Tensor | None) -> int:
    return 0 if gate is None else 1 if gate.dim() == 3 else 2


# ----------------------------------------------------------------------------------------------- the quotient


@launched
@triton.jit
def _quotient_backward(
    DY, Y, REST, DIVISOR, DN, DZ, dy_strides, rows, T, H,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BY_SUM: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    dy_b, dy_t, dy_h = dy_strides
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    t, h = row // H % T, row % H
    of_row = ((row // (T * H)).to(tl.int64) * H + h) * T + t
    divisor = tl.load(DIVISOR + of_row, mask=row < rows, other=1.0)
    at = row_offsets(row, T, H, dy_b, dy_t, dy_h)[:, None] + e[None, :]
    dn = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32) / divisor[:, None]
    dn = dn.to(DN.dtype.element_ty)
    at = entries(row, e, E)
    tl.store(DN + at, dn, mask=inside)
    if BY_SUM:
        y = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
        if NARROW:
            y += tl.load(REST + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DZ + of_row, -tl.sum(dn.to(tl.float32) * y, 1), mask=row < rows)


def quotient_backward(
    dy: Tensor, y: Tensor, rest: Tensor | None, divisor: Tensor, like: Tensor, *, by_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """dn [B, T, H, e] in the dtype for products with `like`, and dz if D is a row sum; y must be contiguous."""
    dy = dense(dy)
    dn = torch.empty(y.shape, dtype=operand(like), device=y.device)
    dz = torch.empty_like(divisor) if by_sum else None
    _quotient_launch(Layout.of(y), Layout.of(dy), by_sum, rest is not None)(dy, y, rest, divisor, dn, dz)
    return dn, dz


@by_shapes
def _quotient_launch(y: Layout, dy: Layout, by_sum: bool, narrow: bool) -> Launch:
    grid, rows, sizes = row_tiles(y)
    options = {**sizes, "BY_SUM": by_sum, "NARROW": narrow}
    return prepared(_quotient_backward, grid, (dy.strides[:3], *rows), options)


# -------------------------------------------------------------------------------------------------- the scale

_LEAST_GATE = tl.constexpr(LEAST_GATE)


@triton.jit
def _factor(
    G, LOG_D, P, l_b, l_h, l_t, p_b, p_h, p_t, row, rows, H, T, DIVIDED: tl.constexpr, GATE: tl.constexpr
):
    """e^g/D, p e^g/D and p."""
    log = tl.load(G + row, mask=row < rows, other=0.0)
    if DIVIDED:
        log -= tl.load(LOG_D + row_offsets(row, H, T, l_b, l_h, l_t), mask=row < rows, other=0.0).to(
            tl.float32
        )
    gain = tl.exp(log)
    if GATE:
        gate = tl.load(P + row_offsets(row, H, T, p_b, p_h, p_t), mask=row < rows, other=0.0).to(tl.float32)
        gate = tl.where(tl.abs(gate) < _LEAST_GATE, _LEAST_GATE, gate)
        return gain, gain * gate, gate
    return gain, gain, tl.full(gain.shape, 1.0, tl.float32)


@launched
@triton.jit
def _scale(
    O, G, LOG_D, P, Y, o_strides, y_strides, l_strides, p_strides, rows, H, T,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, DIVIDED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    o_b, o_h, o_t = o_strides
    y_b, y_h, y_t = y_strides
    l_b, l_h, l_t = l_strides
    p_b, p_h, p_t = p_strides
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    _, factor, _ = _factor(G, LOG_D, P, l_b, l_h, l_t, p_b, p_h, p_t, row, rows, H, T, DIVIDED, GATE)
    at = row_offsets(row, H, T, o_b, o_h, o_t)[:, None] + e[None, :]
    y = tl.load(O + at, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
    at = row_offsets(row, H, T, y_b, y_h, y_t)[:, None] + e[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _scale_backward(
    DY, O, G, LOG_D, P, U, DO, KEPT, TOTAL,
    d_strides, o_strides, l_strides, p_strides, rows, H, T,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, DIVIDED: tl.constexpr, GATE: tl.constexpr,
    READ: tl.constexpr, KEEP: tl.constexpr, OF_ANSWER: tl.constexpr,
):  # fmt: skip
    """OF_ANSWER: O is y = p e^g o/D."""
    d_b, d_h, d_t = d_strides
    o_b, o_h, o_t = o_strides
    l_b, l_h, l_t = l_strides
    p_b, p_h, p_t = p_strides
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    e = tl.arange(0, BE)
    inside = (row < rows)[:, None] & (e < E)[None, :]
    gain, factor, gate = _factor(G, LOG_D, P, l_b, l_h, l_t, p_b, p_h, p_t, row, rows, H, T, DIVIDED, GATE)
    at = row_offsets(row, H, T, d_b, d_h, d_t)[:, None] + e[None, :]
    dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
    at = row_offsets(row, H, T, o_b, o_h, o_t)[:, None] + e[None, :]
    tl.store(DO + at, (dy * factor[:, None]).to(DO.dtype.element_ty), mask=inside)
    if READ:
        o = tl.load(O + at, mask=inside, other=0.0).to(tl.float32)
        found = tl.sum(dy * o, 1)
        tl.store(TOTAL + row, found / gate if OF_ANSWER else found * gain, mask=row < rows)
        if KEEP:
            log_slope = tl.load(U + row, mask=row < rows, other=0.0)
            tl.store(KEPT + at, (o * log_slope[:, None]).to(KEPT.dtype.element_ty), mask=inside)


@launched
@triton.jit
def _delta(
    DO, O, DLSE, DELTA, d_strides, o_strides, rows, H, T,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, LESS: tl.constexpr,
):  # fmt: skip
    d_b, d_h, d_t = d_strides
    o_b, o_h, o_t = o_strides
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
    _delta_launch(Layout.of(do), Layout.of(o), dlse is not None)(do, o, dlse, found)
    return found


@by_shapes
def _delta_launch(do: Layout, o: Layout, less: bool) -> Launch:
    grid, rows, sizes = row_tiles(o)
    return prepared(_delta, grid, (do.strides[:3], o.strides[:3], *rows), {**sizes, "LESS": less})


@on_its_device
def scaled(o: Tensor, log_gain: Tensor, log_divisor: Tensor | None, gate: Tensor | None) -> Tensor:
    """y in the layout of o."""
    y = new_like(o)
    divided, gated = log_divisor is not None, gate is not None
    strides = _strides_of_divisor(log_divisor), _strides_of_gate(gate)
    _scaled_launch(Layout.of(o), *strides, divided, gated)(o, log_gain, log_divisor, gate, y)
    return y


@by_shapes
def _scaled_launch(
    o: Layout, of_divisor: tuple[int, ...], of_gate: tuple[int, ...], divided: bool, gated: bool
) -> Launch:
    grid, rows, sizes = row_tiles(o)
    numbers = (o.strides[:3], o.strides[:3], of_divisor, of_gate, *rows)
    return prepared(_scale, grid, numbers, {**sizes, "DIVIDED": divided, "GATE": gated})


@on_its_device
def scaled_backward(
    dy: Tensor,
    o: Tensor,
    log_gain: Tensor,
    log_divisor: Tensor | None,
    gate: Tensor | None,
    log_slope: Tensor | None,
    *,
    sums: bool,
    rows_are_output: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """do, kept (if `log_slope` is given) in the layout of o, and `total` [B, H, T] in fp32 (if `sums`).

    `rows_are_output`: o is y = p e^g o/D.
    """
    read = sums or log_slope is not None
    dy = dense(dy)
    do = new_like(o)
    kept = None if log_slope is None else torch.empty_like(do)
    total = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device) if read else None
    divided, gated, keep = log_divisor is not None, gate is not None, log_slope is not None
    strides = _strides_of_divisor(log_divisor), _strides_of_gate(gate)
    _scaled_backward_launch(
        Layout.of(dy), Layout.of(o), *strides, divided, gated, read, keep, rows_are_output
    )(dy, o, log_gain, log_divisor, gate, log_slope, do, kept, total)
    return do, kept, total


@by_shapes
def _scaled_backward_launch(
    dy: Layout,
    o: Layout,
    of_divisor: tuple[int, ...],
    of_gate: tuple[int, ...],
    divided: bool,
    gated: bool,
    read: bool,
    keep: bool,
    rows_are_output: bool,
) -> Launch:
    grid, rows, sizes = row_tiles(o)
    numbers = (dy.strides[:3], o.strides[:3], of_divisor, of_gate, *rows)
    options = {"DIVIDED": divided, "GATE": gated, "READ": read, "KEEP": keep, "OF_ANSWER": rows_are_output}
    return prepared(_scale_backward, grid, numbers, {**sizes, **options})


def _strides_of_divisor(u: Tensor | None) -> tuple[int, int, int]:
    """Strides over b, h and t of [B or 1, H or 1, T]."""
    if u is None:
        return 0, 0, 0
    b, h, t = u.stride()
    return b if u.shape[0] > 1 else 0, h if u.shape[1] > 1 else 0, t


def _strides_of_gate(u: Tensor | None) -> tuple[int, int, int]:
    """Strides over b, h and t of [B, T, H]."""
    if u is None:
        return 0, 0, 0
    b, t, h = u.stride()
    return b, h, t
