"""How many bytes the cache of a model takes, and whether its states fit in the free memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from maclaurin.errors import StateBudgetError
from maclaurin.forms.inputs import working_dtype
from maclaurin.models.configuration import MaclaurinConfig


def state_bytes(config: MaclaurinConfig, batch: int, dtype: torch.dtype) -> int:
    """Bytes of all states of fixed size; layers that keep keys and values are not counted."""
    e = config.head_dim or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    numbers = sum(
        spec.state_size(extras.feature_size or e, e)
        for spec, extras in config.layer_attention()
        if spec.has_finite_state
    )
    return batch * kv_heads * numbers * working_dtype(dtype).itemsize


def key_value_bytes(config: MaclaurinConfig, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of so many tokens in every layer."""
    e = config.head_dim or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    numbers = sum((extras.feature_size or e) + e for _, extras in config.layer_attention())
    return batch * tokens * kv_heads * numbers * dtype.itemsize


def require_memory(config: MaclaurinConfig, batch: int, like: Tensor) -> None:
    """Raise unless the states of a batch fit in the free memory of the device."""
    needed, free = state_bytes(config, batch, like.dtype), _free_bytes(like.device)
    if free is None or needed <= free:
        return
    specs = ", ".join(dict.fromkeys(str(spec) for spec, _ in config.layer_attention()))
    raise StateBudgetError(
        f"the states of {specs} take {needed:,} bytes for {batch} sequences in {config.num_hidden_layers} "
        f"layers, and {free:,} are free on {like.device}. Use fewer sequences, a lower order, or a window "
        "beside a lower order."
    )


def _free_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None where it is unknown."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    facts = Path("/proc/meminfo")
    if device.type != "cpu" or not facts.is_file():
        return None
    for line in facts.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
