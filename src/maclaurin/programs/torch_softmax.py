"""softmax(x)V with its log-sum-exp, and its backward pass, by whichever fused attention torch has here.

Each program takes q, k, v [B, H, T, ·] of one head count and one size; causal means T queries and T keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

_ops = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class TorchSoftmax(Protocol):
    """One of torch's fused softmax attentions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """softmax(x)V [B, H, T, e] and ln Σ eˣ [B, H, T] in fp32."""
        ...

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv from dx = P∘(do Vᵀ − Σ do∘o).

        o must lie in memory as `forward` laid it: cuDNN keeps what it built for q, k, v of some layout and
        takes it for granted that o follows from theirs.
        """
        ...


def zeros_in_layout(like: Tensor, layout: tuple[int, ...]) -> Tensor:
    """Zeros of the shape and dtype of `like`, laid as `forward` laid its output."""
    return torch.empty_strided(like.shape, layout, dtype=like.dtype, device=like.device).zero_()


def torch_softmax(q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> TorchSoftmax | None:
    """The fastest program for such tensors, or None where torch has none."""
    if device.type == "cpu":
        return _Cpu() if q.dtype in (torch.float32, torch.float64) else None
    if device.type != "cuda" or q.shape[-1] > 256:
        return None
    if q.dtype == torch.float32:
        return _Efficient()
    if q.dtype not in _HALF:
        return None
    return _CuDNN() if _has_hopper_cudnn(device) and q.shape[-1] <= 128 and q.shape[2] > 1 else _Flash()


@lru_cache(maxsize=16)
def _has_hopper_cudnn(device: torch.device) -> bool:
    """AMD's GPUs count their capability from 9 as well."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return torch.version.hip is None
    return torch.cuda.get_device_properties(device).major >= 9


class _Cpu:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, scale=scale
        )


class _CuDNN:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        found = _ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return found[0], found[1].view(q.shape[:3])

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        if do.stride() != o.stride():
            do = torch.empty_strided(o.shape, o.stride(), dtype=do.dtype, device=do.device).copy_(do)
        return _ops._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse[..., None], seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip


class _Flash:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        found = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return found[0], found[1]

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return _ops._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[0], scale=scale
        )


class _Efficient:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        found = _ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return found[0], found[1][..., : q.shape[2]]

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        dq, dk, dv, _ = _ops._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, None, o, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq, dk, dv
