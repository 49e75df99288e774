"""FlexAttention with the scores and the mask of a spec.

It returns softmax, so it stands for the cost of these scores under this mask, not always for the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maclaurin.bench.contender import Contender, PeerMissing
from maclaurin.bench.targets import PEER_TITLES
from maclaurin.spec import AttentionSpec, RowSum, parse
from maclaurin.testing.cases import TensorCase


def compiled_flex(case: TensorCase) -> Contender:
    """The peer as it is meant to be used."""
    if case.tensors["q"].device.type != "cuda":
        raise PeerMissing("fused on GPUs only")
    torch.compiler.reset()  # or compilations for earlier cases would count towards the limit on this one
    return flex_contender(case, torch.compile(flex_attention_of(case.spec), dynamic=False, fullgraph=True))


def flex_contender(case: TensorCase, attend: Callable[..., Tensor]) -> Contender:
    """On the tensors of a case, the forget gate among the leaves where there is one."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (case.tensors[name].transpose(1, 2) for name in "qkv")
    mask = create_block_mask(_mask_of(case.spec), None, None, q.shape[2], k.shape[2], device=q.device)
    leaves = tuple(case.tensors[name] for name in ("q", "k", "v", *_gates_of(case.spec)))

    def call() -> Tensor:
        totals = [running_totals(case.tensors[name]) for name in _gates_of(case.spec)]
        return attend(q, k, v, mask, *totals, *(total.clone() for total in totals)).transpose(1, 2)

    return Contender(PEER_TITLES["flex"], call, leaves, softmax_of(case.spec))


def running_totals(log_forget: Tensor) -> Tensor:
    """L [B, H, T] from log f [B, T, H]: a key weighs e^(L_t − L_s) less."""
    return log_forget.float().cumsum(1).transpose(1, 2).contiguous()


def _gates_of(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(gate.argument.name for gate in spec.decay_gates)


def softmax_of(spec: AttentionSpec) -> AttentionSpec:
    """The softmax over the scores of a spec: what FlexAttention returns for them."""
    if _function(spec) == "sigmoid":
        return parse("exp/sum")
    return AttentionSpec.of(spec.kernel, spec.window, *spec.decay_gates, RowSum())


def _function(spec: AttentionSpec) -> str | None:
    return None if spec.kernel.fused is None else spec.kernel.fused.function


def flex_attention_of(spec: AttentionSpec) -> Callable[..., Tensor]:
    """(q, k, v [B, H, T, ·], mask, L and a copy of it if it forgets) → softmax over its scores, times v.

    A copy, since FlexAttention differentiates by a tensor only where it is indexed once.
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

        return flex_attention(q, k, v, score_mod=change if changes else None, block_mask=mask)

    return attend


def _mask_of(spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Earlier keys, or the last ones of them."""
    if spec.window is None:
        return lambda b, h, t, s: s <= t
    size = spec.window.size
    return lambda b, h, t, s: (s <= t) & (s > t - size)
