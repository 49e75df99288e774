"""Replace the attention of a model's layers: permanently, or within a `with` block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from maclaurin.models.configuration import MaclaurinConfig
from maclaurin.models.modeling import MaclaurinForCausalLM


def set_attention(model: MaclaurinForCausalLM, attention: Sequence[str]) -> None:
    """Set the attention of every layer, in the modules and in the configuration."""
    config = cast("MaclaurinConfig", model.config)
    config.attention = attention[0] if len(set(attention)) == 1 else list(attention)
    for block, layer in zip(model.model.layers, config.layer_attention(), strict=True):
        module: Any = block.self_attn
        module.groups = layer.groups


@contextmanager
def with_attention(model: MaclaurinForCausalLM, attention: Sequence[str]) -> Iterator[None]:
    """The same within a `with` block; caches made in the block have it too."""
    layers: list[Any] = [block.self_attn for block in model.model.layers]
    own, groups = model.config.attention, [layer.groups for layer in layers]
    try:
        set_attention(model, attention)
        yield
    finally:
        model.config.attention = own
        for layer, before in zip(layers, groups, strict=True):
            layer.groups = before
