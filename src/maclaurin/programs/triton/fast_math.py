"""Special functions as single instructions of the GPU, where triton's own take several.

triton computes `exp` so that results below 1e-38 are right, and divides with care for very large divisors: six and
eight instructions for every pair of query and key. Here such results are 0. The errors of the instructions are 2 units
in the last place of fp32. In triton's interpreter, plain functions are used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maclaurin.programs.triton import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def power_of_two(x):
    """2ˣ, 0 below 2⁻¹²⁶."""
    if _INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def inverse_of_one_plus_power(x):
    """1 / (1 + 2ˣ)"""
    if _INTERPRETED:
        y = 1 / (1 + tl.exp2(x))
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 a;
            ex2.approx.ftz.f32 a, $1;
            add.f32 a, a, 0f3F800000;
            rcp.approx.ftz.f32 $0, a;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return y


@triton.jit
def rounded_to_bfloat16(x):
    """x in bf16, and the same numbers in fp32.

    Two entries are rounded by one instruction; where triton needs the rounded numbers in fp32 as well, it rounds
    each by itself, at a quarter of the speed.
    """
    if _INTERPRETED:
        short = x.to(tl.bfloat16)
        wide = short.to(tl.float32)
    else:
        short, wide = tl.inline_asm_elementwise(
            """{
            cvt.rn.bf16x2.f32 $0, $4, $3;
            shl.b32 $1, $0, 16;
            and.b32 $2, $0, 0xffff0000;
            }""",
            "=&r,=f,=f,f,f",
            [x],
            dtype=(tl.bfloat16, tl.float32),
            is_pure=True,
            pack=2,
        )
    return short, wide
