"""The programs we are compared with, each imported when it is asked for.

A peer says what it computes, and is checked for that before it is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from maclaurin.bench.contender import Contender, PeerMissing
from maclaurin.bench.flex import compiled_flex
from maclaurin.bench.targets import PEER_TITLES
from maclaurin.spec import parse
from maclaurin.testing.cases import TensorCase


def make_peer(key: str, case: TensorCase) -> Contender:
    """The peer on the tensors of a case, which require gradients."""
    return _MAKERS[key](case)


# ------------------------------------------------------------------------------------------ torch


def _sdpa(case: TensorCase) -> Contender:
    """cuDNN's on a GPU, whichever torch has on a CPU."""
    q, k, v = (case.tensors[name].transpose(1, 2) for name in "qkv")

    def attend() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def attend_by_cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend()

    if q.device.type == "cuda":
        return Contender(PEER_TITLES["sdpa"], attend_by_cudnn, _leaves(case, "qkv"), parse("exp/sum"))
    return Contender("torch SDPA", attend, _leaves(case, "qkv"), parse("exp/sum"))


# ------------------------------------------------------------------------------------- other packages


def _chunk_linear_attn(case: TensorCase) -> Contender:
    attend = _function("fla.ops.linear_attn", "chunk_linear_attn")
    q, k, v = (case.tensors[name] for name in "qkv")
    name = PEER_TITLES["chunk_linear_attn"]
    return Contender(
        name, lambda: attend(q, k, v, normalize=False)[0], _leaves(case, "qkv"), parse("linear(identity)")
    )


def _fused_chunk_based(case: TensorCase) -> Contender:
    attend = _function("fla.ops.based", "fused_chunk_based")
    q, k, v = (case.tensors[name] for name in "qkv")
    name = PEER_TITLES["fused_chunk_based"]
    return Contender(name, lambda: attend(q, k, v), _leaves(case, "qkv"), parse("taylor(2)/sum"))


def _power_retention(case: TensorCase) -> Contender:
    """The second power alone, without the orders below: less work than ours, and another answer."""
    attend = _function("retention", "power_retention")
    q, k, v = (case.tensors[name] for name in "qkv")
    scale = q.shape[3] ** -0.5
    name = PEER_TITLES["power_retention"]
    return Contender(
        name,
        lambda: attend(q, k, v, log_G=None, deg=2, scale=scale, chunk_size=1024),
        _leaves(case, "qkv"),
        None,
    )


def _function(module: str, name: str) -> Callable[..., Any]:
    """From a package that may not be installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as problem:
        raise PeerMissing(f"cannot be imported here: {problem}") from None


# ------------------------------------------------------------------------------------------ our own


def _own_parallel(case: TensorCase) -> Contender:
    leaves = tuple(case.tensors.values())
    return Contender(PEER_TITLES["parallel"], lambda: case.output(form="parallel"), leaves, case.spec)


def _leaves(case: TensorCase, names: str) -> tuple[Tensor, ...]:
    return tuple(case.tensors[name] for name in names)


_MAKERS: dict[str, Callable[[TensorCase], Contender]] = {
    "sdpa": _sdpa,
    "flex": compiled_flex,
    "chunk_linear_attn": _chunk_linear_attn,
    "fused_chunk_based": _fused_chunk_based,
    "power_retention": _power_retention,
    "parallel": _own_parallel,
}
