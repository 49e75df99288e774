"""The cost of a run before it begins: `maclaurin train --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from maclaurin.machine import matmul_flops_per_second
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.spec import AttentionSpec
from maclaurin.training.config import TrainConfig
from maclaurin.training.losses import LOGITS_AT_ONCE
from maclaurin.wording import duration

#: the share of a plain matrix product's speed that training steps usually reach
ASSUMED_UTILISATION = 0.4


@dataclass(frozen=True)
class Estimate:
    """Counts are exact; bytes and seconds are estimates."""

    parameters: int
    tokens: int
    flops: float
    state_bytes: int | None
    memory_bytes: float
    matmul_flops_per_second: float

    @property
    def seconds(self) -> float:
        """Estimated seconds, at the assumed utilisation of the measured matrix speed."""
        return self.flops / (ASSUMED_UTILISATION * self.matmul_flops_per_second)

    def __str__(self) -> str:
        state = (
            "grows with the text" if self.state_bytes is None else f"{self.state_bytes:,} bytes per sequence"
        )
        return "\n".join(
            [
                f"parameters  {self.parameters:,}",
                f"tokens      {self.tokens:,}",
                f"operations  {self.flops:.3g} FLOP",
                f"state       {state}",
                f"memory      about {self.memory_bytes / 2**30:.2f} GiB with gradients, AdamW, activations",
                f"time        about {duration(self.seconds)} here, at {ASSUMED_UTILISATION:.0%} of the "
                f"{self.matmul_flops_per_second / 1e9:,.0f} GFLOP/s just measured on a matrix product",
            ]
        )


def estimate(
    config: TrainConfig, model_config: MaclaurinConfig, length: int, device: torch.device
) -> Estimate:
    """Count on the meta device, and measure one matrix product."""
    with torch.device("meta"):
        model = MaclaurinForCausalLM(model_config)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = config.steps * config.batch_size * length
    width = 2 if config.precision == "bf16" else 4
    in_a_part = config.batch_size // config.accumulate * length
    activations = in_a_part * model_config.num_hidden_layers * 34 * model_config.hidden_size * width
    logits = min(in_a_part * model_config.vocab_size, LOGITS_AT_ONCE) * (width + 8)
    return Estimate(
        parameters,
        tokens,
        tokens * flops_per_token(model, model_config, length),
        _state_bytes(model_config),
        16.0 * parameters + activations + logits,
        matmul_flops_per_second(device, torch.bfloat16 if config.precision == "bf16" else torch.float32),
    )


def flops_per_token(model: nn.Module, config: MaclaurinConfig, length: int) -> float:
    """Forward and backward: 6 per matrix parameter, plus three times attention's own products.

    An embedding lookup costs nothing; with a tied head the same matrix is multiplied once.
    """
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) - lookup
    attention = sum(
        _attention_flops(group.spec, len(group.heads), config, length)
        for layer in config.layer_attention()
        for group in layer.groups
    )
    return 6.0 * matrices + 3.0 * attention


def _attention_flops(spec: AttentionSpec, kv_heads: int, config: MaclaurinConfig, length: int) -> float:
    """Per token, forward, for some heads: half a row of scores and values, or state and window if cheaper."""
    size = config.head_size
    parallel = 2.0 * length * size
    if spec.has_finite_state:
        window = 0 if spec.window is None else min(spec.window.slots, length)
        seen = window - window**2 / (2 * length)  # on average: the first tokens see fewer
        parallel = min(parallel, 4.0 * (spec.features(size) + seen) * size)
    return parallel * kv_heads * (config.num_attention_heads // config.kv_heads)


def _state_bytes(config: MaclaurinConfig) -> int | None:
    total = 0
    for layer in config.layer_attention():
        for group in layer.groups:
            if not group.spec.has_finite_state:
                return None
            size = group.spec.state_size(layer.extras.feature_size or config.head_size, config.head_size)
            total += 4 * len(group.heads) * size
    return total
