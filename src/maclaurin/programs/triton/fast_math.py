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
def inverse_of_one_plus_power(x, PAIRED: tl.constexpr):
    """1 / (1 + 2ˣ); with PAIRED at least 2⁻⁶⁰.

    PAIRED: two entries share a reciprocal, 1/a = b · 1/(ab), for the unit that computes 2ˣ and 1/x is the slowest.
    """
    if _INTERPRETED:
        y = 1 / (1 + tl.exp2(tl.minimum(x, 60.0)))
    elif PAIRED:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b, r;
            min.f32 a, $2, 0f42700000;
            min.f32 b, $3, 0f42700000;
            ex2.approx.ftz.f32 a, a;
            ex2.approx.ftz.f32 b, b;
            add.f32 a, a, 0f3F800000;
            add.f32 b, b, 0f3F800000;
            mul.f32 r, a, b;
            rcp.approx.ftz.f32 r, r;
            mul.f32 $0, r, b;
            mul.f32 $1, r, a;
            }""",
            "=&f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
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
