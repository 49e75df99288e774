"""Whether the states of a model fit in memory, asked before the first is made."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from maclaurin.errors import StateBudgetError
from maclaurin.forms.inputs import Inputs
from maclaurin.forms.state import State
from maclaurin.models.configuration import MaclaurinConfig
from maclaurin.spec.head_groups import HeadGroup, LayerAttention


def state_bytes(config: MaclaurinConfig, batch: int, dtype: torch.dtype) -> int:
    """Bytes of all states of fixed size, to the last one; heads that keep keys and values count nothing."""
    with torch.device("meta"):
        return sum(
            State.bytes_for(group.spec, _one_token(config, layer, group, batch, dtype))
            for layer in config.layer_attention()
            for group in layer.groups
            if group.spec.has_finite_state
        )


def growing_bytes(config: MaclaurinConfig, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys, values and gates that heads without a state keep of so many tokens."""
    with torch.device("meta"):
        rows = [
            _one_token(config, layer, group, batch, dtype)
            for layer in config.layer_attention()
            for group in layer.groups
            if not group.spec.has_finite_state
        ]
    return tokens * sum(inputs.k.nbytes + inputs.v.nbytes for inputs in rows)


def cache_bytes(config: MaclaurinConfig, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of a cache that has read so many tokens without padding, for specs without gates."""
    return state_bytes(config, batch, dtype) + growing_bytes(config, batch, tokens, dtype)


def key_value_bytes(config: MaclaurinConfig, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of so many tokens in every layer."""
    e = config.head_size
    numbers = sum((layer.extras.feature_size or e) + e for layer in config.layer_attention())
    return batch * tokens * config.kv_heads * numbers * dtype.itemsize


def _one_token(
    config: MaclaurinConfig, layer: LayerAttention, group: HeadGroup, batch: int, dtype: torch.dtype
) -> Inputs:
    """The shapes of what a group of heads takes for one token."""
    e, heads = config.head_size, len(group.heads)
    d = layer.extras.feature_size or e
    queries = heads * (config.num_attention_heads // config.kv_heads)
    sizes = ((queries, d), (heads, d), (heads, e))
    q, k, v = (torch.empty(batch, 1, number, size, dtype=dtype) for number, size in sizes)
    return Inputs(q, k, v)


def require_room(config: MaclaurinConfig, batch: int, like: Tensor) -> None:
    """Raise unless the states of a batch fit in what is free on the device."""
    needed, free = state_bytes(config, batch, like.dtype), _free_bytes(like.device)
    if free is None or needed <= free:
        return
    specs = ", ".join(dict.fromkeys(str(layer) for layer in config.layer_attention()))
    raise StateBudgetError(
        f"the states of {specs} take {needed:,} bytes for {batch} sequences in {config.num_hidden_layers} "
        f"layers, and {free:,} are free on {like.device}. Use fewer sequences, a lower order, or a window "
        "beside a lower order."
    )


def _free_bytes(device: torch.device) -> int | None:
    """What can still be had, or None where that cannot be told."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    facts = Path("/proc/meminfo")
    if device.type != "cpu" or not facts.is_file():
        return None
    for line in facts.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
