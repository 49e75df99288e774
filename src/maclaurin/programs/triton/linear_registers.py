"""What the linear-time programs do in registers: weights of scores, sums over moments."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def coefficient(ALPHA, n: tl.constexpr, C: tl.constexpr, rows, all_rows, m, T, ROWS: tl.constexpr):
    """α_n of the rows m."""
    if ROWS:
        alpha = tl.load(ALPHA + n * all_rows + rows + m, mask=m < T, other=0.0)
    else:
        alpha = tl.zeros(m.shape, tl.float32) + C[n]
    return alpha


@triton.jit
def log_decay(LOG, rows, n, T, DECAY: tl.constexpr):
    """L of the tokens n; fp64 for fp32 inputs, whose digits a difference of totals would lose."""
    if DECAY:
        log = tl.load(LOG + rows + n, mask=n < T, other=0.0)
    else:
        log = tl.zeros(n.shape, tl.float32)
    return log


@triton.jit
def left_of(log_t, log_s):
    """e^{L_t − L_s}, what is left of s when t looks at it; 1 where t is not behind s."""
    return tl.exp(tl.minimum((log_t - log_s).to(tl.float32), 0.0))


@triton.jit
def weights(s, a0, a1, a2, a3, ORDER: tl.constexpr):
    """Σ α_n sⁿ by Horner's rule."""
    if ORDER == 1:
        w = a1 * s + a0
    elif ORDER == 2:
        w = (a2 * s + a1) * s + a0
    else:
        w = ((a3 * s + a2) * s + a1) * s + a0
    return w


@triton.jit
def slopes(s, a1, a2, a3, ORDER: tl.constexpr):
    """Σ n α_n sⁿ⁻¹."""
    if ORDER == 1:
        slope = a1 + tl.zeros(s.shape, tl.float32)
    elif ORDER == 2:
        slope = 2 * a2 * s + a1
    else:
        slope = (3 * a3 * s + 2 * a2) * s + a1
    return slope


@triton.jit
def times_square(x, Z, d, D: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x Z for a symmetric Z [d, d] kept in fp32, by its two halves, so that the row sum is one of fp32."""
    inside = (d < D)[:, None] & (d < D)[None, :]
    z = tl.load(Z + d[:, None] * D + d[None, :], mask=inside, other=0.0)
    high = z.to(OPERAND)
    rest = (z - high.to(tl.float32)).to(OPERAND)
    return tl.dot(x, rest, tl.dot(x, high, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def add_block(total, x, factor, block, PRECISION: tl.constexpr):
    """+ x_a X S_a, with the entry x_a on the product.

    On X it would be one multiplication less. But then X lies in registers that are written again in the next turn,
    while a product may still be reading them: triton 3.6 waits for all but the last three parts of a product only
    (heads of 16 under a row sum had infinite gradients on an H200). It is no slower, and rounds less.
    """
    return total + tl.dot(x, block, input_precision=PRECISION) * factor[:, None]
