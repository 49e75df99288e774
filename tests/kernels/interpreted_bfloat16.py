"""bf16 in triton's interpreter, which multiplies raw bits in `tl.dot` and truncates in casts.

Only casts and matrix products are corrected. Programs that add or multiply bf16 tiles are still wrong there.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def correct():
    """Replace the interpreter's casts and matrix products of bf16."""
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target.is_floating():
            wide = interpreter.TensorHandle(_widened(src.data), tl.float32)
            return wide if target == tl.float32 else cast(self, wide, dst_type)
        if target == tl.bfloat16 and source.is_floating():
            return interpreter.TensorHandle(_narrowed(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self, a, b, d, *options):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_widened(u.data), tl.float32) for u in (a, b))
        return dot(self, a, b, d, *options)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    builder.create_fp_to_fp = lambda self, src, dst_type, rounding: cast_impl(self, src, dst_type)


def _widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrowed(values):
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy().reshape(values.shape)
