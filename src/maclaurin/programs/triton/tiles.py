"""Helpers shared by the programs: loading and storing tiles, tile sizes, precision.

`lines` transposes vectors: line a holds x_a of all tokens, contiguous along the text.

    x [B, T, H, d]  →  [B, H, lines, padded],   zeros after the end of the text and in lines from d on

A program that needs one entry of every token then reads 64 tokens from one contiguous piece of memory instead of 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, float16, float32

from maclaurin.programs.triton.launch import Launch, Layout, by_shapes, launched, prepared


@triton.jit
def load_rows(pointer, stride_t, rows, columns, T, SIZE: tl.constexpr):
    """A tile [rows, columns] with zeros beyond T and SIZE."""
    inside = (rows < T)[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] * stride_t + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_tile(pointer, stride_t, first, rows, columns, T, SIZE: tl.constexpr, INSIDE: tl.constexpr):
    """Rows first + `rows` with zeros beyond T and SIZE; with INSIDE, none of them is beyond T and there is no mask."""
    at = pointer + (first + rows)[:, None] * stride_t + columns[None, :]
    if not INSIDE:
        inside = (first + rows < T)[:, None]
        if columns.shape[0] != SIZE:
            inside = inside & (columns < SIZE)[None, :]
        tile = tl.load(at, mask=inside, other=0.0)
    elif columns.shape[0] != SIZE:
        tile = tl.load(at, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def divisor_of(total, count, eps, BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr):
    """The divisor of each row: its sum plus eps, the number of visible keys, or 1; 0 is replaced by 1."""
    if BY_SUM:
        divisor = total + eps
    elif BY_COUNT:
        divisor = count.to(tl.float32)
    else:
        divisor = tl.zeros(total.shape, tl.float32) + 1.0
    return tl.where(divisor == 0, 1.0, divisor)


@triton.jit
def store_rows(Y, REST, at, y, inside, NARROW: tl.constexpr):
    """Store y in the dtype of Y; with NARROW also its rounding error in REST."""
    rounded = y.to(Y.dtype.element_ty)
    tl.store(Y + at, rounded, mask=inside)
    if NARROW:
        tl.store(REST + at, (y - rounded.to(tl.float32)).to(REST.dtype.element_ty), mask=inside)


@triton.jit
def no_sums(ROWS: tl.constexpr, ONES: tl.constexpr):
    """The initial value for `add_sum`."""
    return tl.zeros((ROWS, 16), tl.float32) if ONES else tl.zeros((ROWS,), tl.float32)


@triton.jit
def add_sum(z, w, ONES: tl.constexpr):
    """Add the row sums of the rounded weights w to z.

    With ONES (bf16) they are a product with ones: converting w to fp32 takes more time than the matrix units need.
    """
    if ONES:
        z = tl.dot(w, tl.full((w.shape[1], 16), 1.0, tl.float32).to(w.dtype), z)
    else:
        z += tl.sum(w.to(tl.float32), 1)
    return z


@triton.jit
def sums_of(z, ONES: tl.constexpr):
    """The row sums that `add_sum` has added up."""
    return tl.sum(z, 1) * 0.0625 if ONES else z


@triton.jit
def row_offsets(row, N, M, s_b, s_n, s_m):
    """The 64-bit offsets of rows of a tensor [B, N, M, size]; `row` numbers all (b, n, m) in order."""
    row = row.to(tl.int64)
    b, rest = row // (N * M), row % (N * M)
    return b * s_b + rest // M * s_n + rest % M * s_m


@triton.jit
def entries(row, e, E: tl.constexpr):
    """The 64-bit offsets of entries e of rows of a contiguous tensor [rows, E]."""
    return row.to(tl.int64)[:, None] * E + e[None, :]


def width(size: int) -> int:
    """The columns of a tile that holds `size` entries: a power of 2, at least 16."""
    return max(16, power_of_2(size))


def power_of_2(least: int) -> int:
    """The next power of 2; triton's own functions for this and for `cdiv` cost microseconds on the host."""
    return 1 << (least - 1).bit_length()


def cdiv(size: int, tile: int) -> int:
    """How many tiles cover a size."""
    return -(-size // tile)


def precision(tensor: Tensor | Layout) -> str:
    """How products of fp32 operands are computed: in full, or for fp16 inputs in three passes of tf32.

    One pass would truncate digits instead of rounding them. For bf16 operands it makes no difference.
    """
    return {float32: "ieee", float16: "tf32x3"}.get(tensor.dtype, "tf32")


def empty_rows(q: Tensor, v: Tensor, narrow: bool) -> tuple[Tensor, Tensor | None]:
    """New tensors for y [B, T, H, e]: one in fp32, or one in bf16 and one for its rounding error."""
    shape = (*q.shape[:3], v.shape[3])
    y = torch.empty(shape, dtype=torch.bfloat16 if narrow else float32, device=q.device)
    return y, torch.empty_like(y) if narrow else None


def operand(like: Tensor | Layout) -> torch.dtype:
    """The dtype for products with sums of many terms: bf16 for bf16, else fp32, as sums may exceed fp16's range."""
    return torch.bfloat16 if like.dtype == torch.bfloat16 else float32


def operand_options(like: Tensor | Layout) -> dict[str, object]:
    """The same as compile-time arguments of a program."""
    kind = tl.bfloat16 if like.dtype == torch.bfloat16 else tl.float32
    return {"OPERAND": kind, "PRECISION": precision(like)}


@dataclass(frozen=True, eq=False)  # used as a cache key; comparing identities is fast
class Tile:
    """Queries × keys that a program processes at a time, its warps, pipeline stages, and registers per thread.

    Fewer registers per thread let more programs run at the same time; 0 leaves the number to the compiler.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


def tile_options(
    tiles: tuple[Tile, Tile], q: Tensor | Layout, v: Tensor | Layout, tokens: int
) -> dict[str, int]:
    """The options of the tile for this head size: the first of `tiles` up to 64, the second up to 128.

    Tiles are smaller for fp32, which takes twice the memory and more registers, and for short texts.
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


def with_settings(settings: NamedTuple, tile: dict[str, int]) -> dict[str, Any]:
    """The compile-time arguments of a launch: its settings (S), and the options of triton that a tile has."""
    return {"S": settings, **{name: value for name, value in tile.items() if name not in ("BM", "BN")}}


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
    """`count` ≥ d lines of x, each entry times its token's weight [B, H, T] if given."""
    batch, _, heads, _ = x.shape
    out = torch.empty(batch, heads, count, padded, dtype=x.dtype, device=x.device)
    _lines_launch(Layout.of(x), count, padded, weight is not None)(x, weight, out)
    return out


@by_shapes
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
