"""Offsets beyond 2³¹ elements, as programs compute them, without the memory."""

import pytest
import torch

from maclaurin.programs.triton import INSTALLED

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

import triton
import triton.language as tl

from maclaurin.programs.triton import linear_time
from maclaurin.programs.triton.tiles import entries, row_offsets


@triton.jit
def _offsets(OUT, first, N, M, s_b, s_n, s_m, BLOCK: tl.constexpr):
    row = first + tl.arange(0, BLOCK)
    tl.store(OUT + tl.arange(0, BLOCK), row_offsets(row, N, M, s_b, s_n, s_m))


@triton.jit
def _entries(OUT, first, E: tl.constexpr, BLOCK: tl.constexpr):
    i, e = tl.arange(0, BLOCK), tl.arange(0, E)
    tl.store(OUT + i[:, None] * E + e[None, :], entries(first + i, e, E))


def test_rows_of_long_texts(device):
    """[B, H, T, e] laid out as [B, T, H, e] with T·H·e > 2³¹."""
    heads, tokens, e = 64, 1 << 20, 128
    strides = (tokens * heads * e, e, heads * e)
    found = torch.empty(4, dtype=torch.int64, device=device)
    first = heads * tokens - 4
    _offsets[(1,)](found, first, heads, tokens, *strides, BLOCK=4)
    expected = [(heads - 1) * e + (tokens - 4 + i) * heads * e for i in range(4)]
    assert found.tolist() == expected
    assert expected[-1] > 1 << 31


def test_entries_of_a_gate_per_channel(device):
    found = torch.empty(2, 16, dtype=torch.int64, device=device)
    first = (1 << 31) - 64
    _entries[(1,)](found, first, E=16, BLOCK=2)
    assert found.flatten().tolist() == list(range(first * 16, (first + 2) * 16))


def test_order_3_has_no_row_sum(device):
    q = torch.randn(1, 16, 1, 4, device=device)
    call = linear_time.Call((1.0, 1.0, 0.5, 0.1), "sum", 0.0, 16)
    with pytest.raises(Exception, match="cubic"):
        linear_time.forward(q, q, q, linear_time.Rows(), call)
