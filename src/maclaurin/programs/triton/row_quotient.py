"""What a row y = n/D hands back to its numerator and its denominator, one pass over memory.

    dn = dy/D,        dz = −Σ dn∘y

dn is rounded to what matrix products multiply, and dz made from it as it was rounded: what counts is dn·v + dz =
dn·(v − y), and rows of nearly equal values cancel in it. For the same reason a rounded y comes with what rounding
took from it. Rows are [B, T, H, e], D and dz [B, H, T] in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import dense
from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.tiles import entries, operand, row_offsets, row_tiles


@launched
@triton.jit
def _backward(
    DY, Y, REST, DIVISOR, DN, DZ, dy_b, dy_t, dy_h, rows, T, H,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BY_SUM: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
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


def backward(
    dy: Tensor, y: Tensor, rest: Tensor | None, divisor: Tensor, like: Tensor, *, by_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """dn [B, T, H, e] to multiply with what is `like` v, and dz where D is a row sum; y is contiguous."""
    dy = dense(dy)
    dn = torch.empty(y.shape, dtype=operand(like), device=y.device)
    dz = torch.empty_like(divisor) if by_sum else None
    grid, rows, sizes = row_tiles(y)
    _backward[grid](
        dy, y, rest, divisor, dn, dz, *dy.stride()[:3], *rows, **sizes, BY_SUM=by_sum, NARROW=rest is not None
    )
    return dn, dz
