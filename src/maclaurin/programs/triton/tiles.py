"""What the programs share: tiles of memory, and how large they are.

`lines` turns vectors into entries along the text: line a holds x_a of every token side by side.

    x [B, T, H, d]  →  [B, H, lines, padded],   zeros behind the text and below the last entry

A program that walks over the text with one entry of every token reads 64 tokens as one piece of memory there,
and as 64 pieces in the vectors themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor, float16, float32

from maclaurin.programs.triton.launch import MOST_SHAPES, Launch, Layout, launched, prepared


@triton.jit
def load_rows(pointer, stride_t, rows, columns, T, SIZE: tl.constexpr):
    """A tile [rows, columns] with zeros beyond T and SIZE."""
    inside = (rows < T)[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] * stride_t + columns[None, :], mask=inside, other=0.0)


@triton.jit
def divisor_of(total, count, eps, BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr):
    """What rows are divided by: their sum and eps, the keys they see, or 1; never 0."""
    if BY_SUM:
        divisor = total + eps
    elif BY_COUNT:
        divisor = count.to(tl.float32)
    else:
        divisor = tl.zeros(total.shape, tl.float32) + 1.0
    return tl.where(divisor == 0, 1.0, divisor)


@triton.jit
def store_rows(Y, REST, at, y, inside, NARROW: tl.constexpr):
    """y as it is kept; rounded, with what rounding took from it in REST."""
    rounded = y.to(Y.dtype.element_ty)
    tl.store(Y + at, rounded, mask=inside)
    if NARROW:
        tl.store(REST + at, (y - rounded.to(tl.float32)).to(REST.dtype.element_ty), mask=inside)


@triton.jit
def no_sums(ROWS: tl.constexpr, ONES: tl.constexpr):
    """Where `add_sum` begins."""
    return tl.zeros((ROWS, 16), tl.float32) if ONES else tl.zeros((ROWS,), tl.float32)


@triton.jit
def add_sum(z, w, ONES: tl.constexpr):
    """Sums over the rows of weights as they are multiplied.

    Those of bf16 by a product with ones: to take them back to fp32 costs more time than the matrix units need.
    """
    if ONES:
        z = tl.dot(w, tl.full((w.shape[1], 16), 1.0, tl.float32).to(w.dtype), z)
    else:
        z += tl.sum(w.to(tl.float32), 1)
    return z


@triton.jit
def sums_of(z, ONES: tl.constexpr):
    """One number per row."""
    return tl.sum(z, 1) * 0.0625 if ONES else z


@triton.jit
def row_offsets(row, N, M, s_b, s_n, s_m):
    """Where row (b, n, m) of a tensor [B, N, M, size] begins, rows counted through; in 64 bits."""
    row = row.to(tl.int64)
    b, rest = row // (N * M), row % (N * M)
    return b * s_b + rest // M * s_n + rest % M * s_m


@triton.jit
def entries(row, e, E: tl.constexpr):
    """Where the entries e of rows of a contiguous tensor [rows, E] lie; in 64 bits."""
    return row.to(tl.int64)[:, None] * E + e[None, :]


def width(size: int) -> int:
    """The columns of a tile that holds `size`."""
    return max(16, power_of_2(size))


def power_of_2(least: int) -> int:
    """triton.next_power_of_2 and triton.cdiv are made for programs and cost microseconds outside of them."""
    return 1 << (least - 1).bit_length()


def cdiv(size: int, tile: int) -> int:
    """Tiles that cover a size."""
    return -(-size // tile)


def precision(tensor: Tensor | Layout) -> str:
    """How products of fp32 operands are made: in full, or for fp16 inputs in three passes of tf32.

    One pass would cut digits off, not round them; bf16 operands know no choice.
    """
    return {float32: "ieee", float16: "tf32x3"}.get(tensor.dtype, "tf32")


def empty_rows(q: Tensor, v: Tensor, narrow: bool) -> tuple[Tensor, Tensor | None]:
    """New tensors for y [B, T, H, e]: in fp32, or in bf16 with one more for what rounding takes from it."""
    shape = (*q.shape[:3], v.shape[3])
    y = torch.empty(shape, dtype=torch.bfloat16 if narrow else float32, device=q.device)
    return y, torch.empty_like(y) if narrow else None


def operand(like: Tensor | Layout) -> torch.dtype:
    """What sums of many terms are multiplied in again: they would leave fp16's range, so it goes as fp32."""
    return torch.bfloat16 if like.dtype == torch.bfloat16 else float32


def operand_options(like: Tensor | Layout) -> dict[str, object]:
    """The same for a program."""
    kind = tl.bfloat16 if like.dtype == torch.bfloat16 else tl.float32
    return {"OPERAND": kind, "PRECISION": precision(like)}


@dataclass(frozen=True, eq=False)  # a key of what launches remember: told apart by identity, which is quick
class Tile:
    """Queries × keys that a program holds at a time, with how many warps, how many loads ahead.

    Few registers per thread let more programs run side by side; 0 leaves their number to the compiler.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


def tile_options(
    tiles: tuple[Tile, Tile], q: Tensor | Layout, v: Tensor | Layout, tokens: int
) -> dict[str, int]:
    """Of a tile for heads up to 64 and one for heads up to 128, the one that fits, as a program takes it.

    fp32 takes twice the memory and more registers; short texts need no long tiles.
    """
    tile = tiles[max(q.shape[3], v.shape[3]) > 64]
    queries, keys = tile.queries, tile.keys
    if q.dtype == float32:
        queries, keys = min(queries, 64), min(keys, 32)
    return {
        "BM": min(queries, width(tokens)),
        "BN": min(keys, width(tokens)),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **({"maxnreg": tile.registers} if tile.registers else {}),
    }


def row_tiles(y: Tensor | Layout) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Grid, (rows, N, M) and sizes for a pass over the rows of y [B, N, M, size]."""
    batch, n, m, size = y.shape
    rows = max(1, 4096 // width(size))
    sizes = {"E": size, "BE": width(size), "BR": rows, "num_warps": 4}
    return (cdiv(batch * n * m, rows),), (batch * n * m, n, m), sizes


# ------------------------------------------------------------------------------------------------------ lines


@launched
@triton.jit
def _turn(
    X, WEIGHT, OUT, x_strides, T, H, padded,
    D: tl.constexpr, LINES: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    x_b, x_t, x_h = x_strides
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
    batch, _, heads, _ = x.shape
    out = torch.empty(batch, heads, count, padded, dtype=x.dtype, device=x.device)
    _lines_launch(Layout.of(x), count, padded, weight is not None)(x, weight, out)
    return out


@lru_cache(maxsize=MOST_SHAPES)
def _lines_launch(x: Layout, count: int, padded: int, weighted: bool) -> Launch:
    batch, tokens, heads, d = x.shape
    grid = cdiv(padded, 64), batch * heads, cdiv(count, 64)
    options = {
        "D": d,
        "LINES": count,
        "BT": 64,
        "BL": min(64, power_of_2(count)),
        "WEIGHTED": weighted,
        "num_warps": 4,
    }
    return prepared(_turn, grid, (x.strides[:3], tokens, heads, padded), options)
