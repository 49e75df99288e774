"""The programs that ours are compared with, each imported when it is needed.

A peer declares what it computes; this is checked before it is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from maclaurin.bench.targets import PEER_TITLES
from maclaurin.errors import MaclaurinError
from maclaurin.programs.dispatch import attention
from maclaurin.spec import AttentionSpec, RowSum, parse
from maclaurin.testing.cases import TensorCase


class PeerMissing(MaclaurinError):
    """A peer that is not available here; the message says why."""


@final
@dataclass(frozen=True)
class Implementation:
    """`call` returns y [B, T, H, e]; `leaves` are the tensors whose gradients are computed.

    `means` is the spec that its output must equal; None for a program that computes a different function.
    """

    name: str
    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    means: AttentionSpec | None

    def forward(self) -> Tensor:
        """The output, as in training: what the backward pass needs is kept."""
        return self.call()

    def forward_backward(self, direction: Tensor) -> list[Tensor]:
        """The output and the gradients of all leaves it depends on."""
        y = self.call()
        gradients = torch.autograd.grad(y, self.leaves, direction, allow_unused=True)
        return [y.detach(), *(g for g in gradients if g is not None)]


def compiled_flex(case: TensorCase) -> Implementation:
    """Compiled FlexAttention, its intended use."""
    if case.tensors["q"].device.type != "cuda":
        raise PeerMissing("fused on GPUs only")
    torch.compiler.reset()  # else compilations of earlier cases would count towards the limit
    attend = torch.compile(flex_attention_of(case.spec), dynamic=False, fullgraph=True)
    return flex_implementation(case, attend)


def flex_implementation(case: TensorCase, attend: Callable[..., Tensor]) -> Implementation:
    """FlexAttention on the tensors of a case, with the forget gate among the leaves if there is one."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (case.tensors[name].transpose(1, 2) for name in "qkv")
    mask = create_block_mask(_mask_of(case.spec), None, None, q.shape[2], k.shape[2], device=q.device)
    leaves = tuple(case.tensors[name] for name in ("q", "k", "v", *_gates_of(case.spec)))

    def call() -> Tensor:
        totals = [running_totals(case.tensors[name]) for name in _gates_of(case.spec)]
        return attend(q, k, v, mask, *totals, *(total.clone() for total in totals)).transpose(1, 2)

    return Implementation(PEER_TITLES["flex"], call, leaves, softmax_of(case.spec))


def running_totals(log_forget: Tensor) -> Tensor:
    """L [B, H, T] from log f [B, T, H]: a key weighs e^(L_t − L_s) less."""
    return log_forget.float().cumsum(1).transpose(1, 2).contiguous()


def _gates_of(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(gate.argument.name for gate in spec.decay_gates)


def softmax_of(spec: AttentionSpec) -> AttentionSpec:
    """The softmax over the scores of a spec: what FlexAttention returns for them."""
    if _kernel_function(spec) == "sigmoid":
        return parse("exp/sum")
    return AttentionSpec.of(spec.kernel, spec.window, *spec.decay_gates, RowSum())


def _kernel_function(spec: AttentionSpec) -> str | None:
    return None if spec.kernel.fused is None else spec.kernel.fused.function


def flex_attention_of(spec: AttentionSpec) -> Callable[..., Tensor]:
    """(q, k, v [B, H, T, ·], mask, L and a copy of it if it forgets) → softmax over its scores, times v.

    The copy is needed because FlexAttention differentiates only a tensor that is indexed once.
    """
    from torch.nn.attention.flex_attention import flex_attention

    weight = spec.kernel.fused
    clamp = None if weight is None else weight.clamp
    bias = weight.coefficients[0] if weight is not None and weight.function == "sigmoid" else None
    changes = clamp is not None or bias is not None or spec.decay_gates

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, *totals: Tensor) -> Any:
        def change(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            if clamp is not None:
                score = score.clamp(max=clamp)
            if bias is not None:
                score = score + bias
            return score + totals[0][b, h, t] - totals[1][b, h, s] if totals else score

        grouped = q.shape[1] != k.shape[1]
        return flex_attention(
            q, k, v, score_mod=change if changes else None, block_mask=mask, enable_gqa=grouped
        )

    return attend


def _mask_of(spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Causal, or causal within the window."""
    if spec.window is None:
        return lambda b, h, t, s: s <= t
    size = spec.window.size
    return lambda b, h, t, s: (s <= t) & (s > t - size)


def make_peer(key: str, case: TensorCase) -> Implementation:
    """The peer on the tensors of a case, which require gradients."""
    return _MAKERS[key](case)


# ------------------------------------------------------------------------------------------ torch


def _sdpa(case: TensorCase) -> Implementation:
    """cuDNN's on a GPU, torch's default on a CPU."""
    q, k, v = (case.tensors[name].transpose(1, 2) for name in "qkv")

    def attend() -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    def attend_by_cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend()

    if q.device.type == "cuda":
        return Implementation(PEER_TITLES["sdpa"], attend_by_cudnn, _leaves(case, "qkv"), parse("exp/sum"))
    return Implementation("torch SDPA", attend, _leaves(case, "qkv"), parse("exp/sum"))


# ------------------------------------------------------------------------------------- other packages


def _chunk_linear_attn(case: TensorCase) -> Implementation:
    attend = _function("fla.ops.linear_attn", "chunk_linear_attn")
    q, k, v = (case.tensors[name] for name in "qkv")
    name = PEER_TITLES["chunk_linear_attn"]
    return Implementation(
        name, lambda: attend(q, k, v, normalize=False)[0], _leaves(case, "qkv"), parse("linear(identity)")
    )


def _fused_chunk_based(case: TensorCase) -> Implementation:
    attend = _function("fla.ops.based", "fused_chunk_based")
    q, k, v = (case.tensors[name] for name in "qkv")
    name = PEER_TITLES["fused_chunk_based"]
    return Implementation(name, lambda: attend(q, k, v), _leaves(case, "qkv"), parse("taylor(2)/sum"))


def _power_retention(case: TensorCase) -> Implementation:
    """Only the second power, without the lower orders: less work than ours, and a different result."""
    attend = _function("retention", "power_retention")
    q, k, v = (case.tensors[name] for name in "qkv")
    scale = q.shape[3] ** -0.5
    name = PEER_TITLES["power_retention"]
    return Implementation(
        name,
        lambda: attend(q, k, v, log_G=None, deg=2, scale=scale, chunk_size=1024),
        _leaves(case, "qkv"),
        None,
    )


def _function(module: str, name: str) -> Callable[..., Any]:
    """A function of a package that may not be installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as problem:
        raise PeerMissing(f"cannot be imported here: {problem}") from None


# ------------------------------------------------------------------------------------------ our own


def _own_parallel(case: TensorCase) -> Implementation:
    leaves = tuple(case.tensors.values())
    return Implementation(PEER_TITLES["parallel"], lambda: case.output(form="parallel"), leaves, case.spec)


def _own_rows(case: TensorCase) -> Implementation:
    """The same tokens as rows of one length, for a case that packs texts of uneven length."""
    return Implementation(PEER_TITLES["equal_rows"], case.output, tuple(case.tensors.values()), case.spec)


def _own(key: str, notation: str) -> Callable[[TensorCase], Implementation]:
    """Another of our specs on the same queries, keys and values, causal."""

    def make(case: TensorCase) -> Implementation:
        q, k, v = (case.tensors[name] for name in "qkv")
        spec = parse(notation)
        return Implementation(PEER_TITLES[key], lambda: attention(q, k, v, spec), _leaves(case, "qkv"), None)

    return make


def _leaves(case: TensorCase, names: str) -> tuple[Tensor, ...]:
    return tuple(case.tensors[name] for name in names)


_MAKERS: dict[str, Callable[[TensorCase], Implementation]] = {
    "sdpa": _sdpa,
    "flex": compiled_flex,
    "chunk_linear_attn": _chunk_linear_attn,
    "fused_chunk_based": _fused_chunk_based,
    "power_retention": _power_retention,
    "parallel": _own_parallel,
    "about_zero": _own("about_zero", "taylor(2)/sum"),
    "ungated": _own("ungated", "linear(identity)"),
    "equal_rows": _own_rows,
}
