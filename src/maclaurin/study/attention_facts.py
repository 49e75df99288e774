"""What a run's attention is, in numbers: its order and the size of its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from maclaurin.models import MaclaurinConfig, size_named
from maclaurin.training.config import TrainConfig


@final
@dataclass(frozen=True)
class AttentionFacts:
    """See RunRecord: the highest power of the score, and the bytes of the state of all layers."""

    order: int | None
    state_bytes: int | None


def attention_facts(config: TrainConfig) -> AttentionFacts:
    """Over all layers: the highest order, the sum of the states; None where one layer has no such number."""
    attention = config.attention[0] if len(config.attention) == 1 else list(config.attention)
    model = MaclaurinConfig.of_size(
        size_named(config.size), attention, vocab_size=2, num_key_value_heads=config.kv_heads
    )
    size = model.hidden_size // model.num_attention_heads
    heads = model.num_key_value_heads or model.num_attention_heads
    layers = model.layer_attention()
    if not all(spec.has_finite_state for spec, _ in layers):
        return AttentionFacts(None, None)
    state = sum(4 * heads * spec.state_size(extras.feature_size or size, size) for spec, extras in layers)
    return AttentionFacts(max(spec.highest_order for spec, _ in layers), state)
