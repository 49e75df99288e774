"""Entries of vectors along the text: line a holds x_a of every token side by side.

    x [B, T, H, d]  →  [B, H, lines, padded],   zeros behind the text and below the last entry

A program that walks over the text with one entry of every token reads 64 tokens as one piece of memory there, and
as 64 in the vectors themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton.launch import launched
from maclaurin.programs.triton.tiles import cdiv, power_of_2


@launched
@triton.jit
def _turn(
    X, WEIGHT, OUT, x_b, x_t, x_h, T, H, padded,
    D: tl.constexpr, LINES: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    line = tl.program_id(2) * BL + tl.arange(0, BL)
    inside = (t < T)[:, None] & (line < D)[None, :]
    x = tl.load(X + b * x_b + h * x_h + t[:, None] * x_t + line[None, :], mask=inside, other=0.0)
    if WEIGHTED:
        weight = tl.load(WEIGHT + (b * H + h) * T + t, mask=t < T, other=0.0)
        x = (x.to(tl.float32) * weight[:, None]).to(x.dtype)  # rounded once
    at = OUT + ((b * H + h) * LINES + line)[:, None] * padded + t[None, :]
    tl.store(at, tl.trans(x), mask=(line < LINES)[:, None] & (t < padded)[None, :])


def lines(x: Tensor, count: int, padded: int, weight: Tensor | None = None) -> Tensor:
    """`count` ≥ d lines of x, each entry times its token's weight [B, H, T]."""
    batch, tokens, heads, d = x.shape
    out = torch.empty(batch, heads, count, padded, dtype=x.dtype, device=x.device)
    _turn[(cdiv(padded, 64), batch * heads, cdiv(count, 64))](
        x, weight, out, *x.stride()[:3], tokens, heads, padded,
        D=d, LINES=count, BT=64, BL=min(64, power_of_2(count)), WEIGHTED=weight is not None, num_warps=4,
    )  # fmt: skip
    return out
