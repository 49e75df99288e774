"""What a conversion costs: perplexity with its tail and, as a control, with the tail switched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from maclaurin.inspection.perplexity import perplexity, summed_loss
from maclaurin.inspection.trials import exchanged
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


def gap(model: MaclaurinForCausalLM, own: Sequence[str], converted: Sequence[str], rows: Tensor) -> Gap:
    """Softmax, window alone, converted: three passes over the same rows [B, T]."""
    alone = windows_alone(converted)
    return Gap(
        perplexity_with(model, own, rows),
        None if alone is None else perplexity_with(model, alone, rows),
        perplexity_with(model, converted, rows),
    )


def perplexity_with(model: MaclaurinForCausalLM, attention: Sequence[str], rows: Tensor) -> float:
    """Of the next token over rows [B, T], with this attention and the weights as they are."""
    layers: list[Any] = [block.self_attn for block in model.model.layers]
    with exchanged(layers, tuple(resolve(text) for text in attention)):
        total = sum(summed_loss(model, row) for row in rows)
    return perplexity(total / (rows.numel() - len(rows)))


def windows_alone(attention: Sequence[str]) -> list[str] | None:
    """The same with every tail switched off; None where there is none."""
    specs = [resolve(text) for text in attention]
    if all(spec.window is None for spec in specs):
        return None
    return [text if s.window is None else str(_alone(s)) for s, text in zip(specs, attention, strict=True)]


def _alone(spec: AttentionSpec) -> AttentionSpec:
    return parse(f"poly(0)+{spec.window}/sum")
