"""What a conversion costs: perplexity with its tail and, as a control, with the tail switched off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from maclaurin.models import MaclaurinForCausalLM
from maclaurin.spec import AttentionSpec, parse
from maclaurin.spec.catalogue import resolve


@final
@dataclass(frozen=True)
class Gap:
    """Perplexities on the same text, and how much of the way from window to softmax the tail has gone."""

    softmax: float
    window_only: float | None
    converted: float

    @property
    def closed(self) -> float | None:
        """1: as good as softmax; 0: the tail does nothing; None where there is no window to compare with."""
        if self.window_only is None or self.window_only == self.softmax:
            return None
        return (self.window_only - self.converted) / (self.window_only - self.softmax)


@torch.no_grad()
def perplexity(model: MaclaurinForCausalLM, rows: Tensor) -> float:
    """e^(mean loss of the next token) over rows [B, T]."""
    total, count = 0.0, 0
    for row in rows:
        logits = model(input_ids=row[None]).logits[0, :-1]
        total += float(nn.functional.cross_entropy(logits.float(), row[1:], reduction="sum"))
        count += row.numel() - 1
    return math.exp(total / count)


def without_tail(spec: AttentionSpec) -> AttentionSpec | None:
    """The same window with nothing beside it; None for a spec without a window."""
    return None if spec.window is None else parse(f"poly(0)+{spec.window}/sum")


def with_attention(model: MaclaurinForCausalLM, attention: list[str]) -> list[AttentionSpec]:
    """Run the model with these specs from now on, weights as they are; returns those before."""
    before = []
    for block, text in zip(model.model.layers, attention, strict=True):
        layer: Any = block.self_attn
        before.append(layer.spec)
        layer.spec = resolve(text)
    return before


def gap(model: MaclaurinForCausalLM, own: list[str], converted: list[str], rows: Tensor) -> Gap:
    """Softmax, window alone, converted: three passes over the same rows."""
    alone = [without_tail(resolve(text)) for text in converted]
    windows = [str(spec) if spec is not None else text for spec, text in zip(alone, converted, strict=True)]
    before = with_attention(model, own)
    try:
        exact = perplexity(model, rows)
        window = None
        if any(spec is not None for spec in alone):
            with_attention(model, windows)
            window = perplexity(model, rows)
        with_attention(model, converted)
        return Gap(exact, window, perplexity(model, rows))
    finally:
        with_attention(model, [str(spec) for spec in before])
