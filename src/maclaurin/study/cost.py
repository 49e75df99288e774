"""The cost of a run before it is trained: parameters, FLOPs, time, and the memory of its attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import final

import torch

from maclaurin.data.data_config import is_task, open_task
from maclaurin.data.text_tokenizers import Bytes
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, size_named
from maclaurin.study.run_record import Run
from maclaurin.training.config import TrainConfig, config_from
from maclaurin.training.estimate import ASSUMED_UTILISATION, estimate, flops_per_token
from maclaurin.training.model import row_length

#: vocabulary size of tokenizers that are only on the hub
ASSUMED_VOCABULARY = 32_000


@final
@dataclass(frozen=True)
class Cost:
    """The cost of a run: exact counts, and the time one device of this machine would need."""

    parameters: int
    tokens: int
    flops: float
    seconds: float


def cost_of(run: Run) -> Cost:
    """The cost of a run, counted without opening any data."""
    config = config_from(run.config)
    parameters, flops = counted(config)
    speed = ASSUMED_UTILISATION * _matmul_speed(config.precision)
    return Cost(parameters, run.tokens, run.tokens * flops, run.tokens * flops / speed)


def counted(config: TrainConfig) -> tuple[int, float]:
    """(parameters, FLOPs of training on one token)"""
    length = row_length(config)
    return _counted(config.attention, config.size, config.kv_heads, _vocabulary(config, length), length)


def _vocabulary(config: TrainConfig, length: int) -> int:
    """The vocabulary size, from the names of data and tokenizer."""
    if is_task(config.data):
        return open_task(config.data, length).vocab_size
    kind, _, rest = config.tokenizer.partition(":")
    if kind == "bytes":
        return Bytes().vocab_size
    return int(rest) if kind == "bpe" and rest.isdecimal() else ASSUMED_VOCABULARY


def attention_facts(config: TrainConfig) -> tuple[int | None, int | None]:
    """(highest order, bytes of state over all layers); both None if a layer has no finite state."""
    model = _model_config(config.attention, config.size, config.kv_heads, 2)
    size, layers = model.head_size, model.layer_attention()
    specs = [spec for layer in layers for spec in layer.specs]
    if not all(spec.has_finite_state for spec in specs):
        return None, None
    state = sum(
        4 * len(group.heads) * group.spec.state_size(layer.extras.feature_size or size, size)
        for layer in layers
        for group in layer.groups
    )
    return max(spec.highest_order for spec in specs), state


def memory_at_length(config: TrainConfig) -> int:
    """Bytes that a decoder keeps after a row of the trained length, in fp32, over all layers.

    A finite state counts as a whole, an attention without one with its keys and values.
    """
    model = _model_config(config.attention, config.size, config.kv_heads, 2)
    size, length = model.head_size, row_length(config)
    shared = (model.num_key_value_heads or model.num_attention_heads) / model.num_attention_heads
    found = 0.0
    for layer in model.layer_attention():
        key_size = layer.extras.feature_size or size
        for group in layer.groups:
            heads = len(group.heads)
            if group.spec.has_finite_state:
                found += 4 * heads * group.spec.state_size(key_size, size)
            else:
                found += 4 * heads * shared * length * (key_size + size)
    return round(found)


@cache
def _counted(
    attention: tuple[str, ...], size: str, kv_heads: int | None, vocabulary: int, length: int
) -> tuple[int, float]:
    model_config = _model_config(attention, size, kv_heads, vocabulary)
    with torch.device("meta"):
        model = MaclaurinForCausalLM(model_config)
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, flops_per_token(model, model_config, length)


@cache
def _matmul_speed(precision: str) -> float:
    """FLOP/s of this machine's fastest device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = TrainConfig(precision=precision)
    return estimate(config, _model_config(("exp/sum",), "nano", None, 2), 1, device).matmul_flops_per_second


def _model_config(
    attention: tuple[str, ...], size: str, kv_heads: int | None, vocabulary: int
) -> MaclaurinConfig:
    layers = attention[0] if len(attention) == 1 else list(attention)
    return MaclaurinConfig.of_size(size_named(size), layers, vocabulary, num_key_value_heads=kv_heads)
