"""Queries, keys and values of every layer, seen as a text passes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from maclaurin.layers.attention import AttentionLayer
from maclaurin.layers.layout import Layout

#: (number of the layer, the layer, q [B, T, H, d], k [B, T, Hkv, d], v [B, T, Hkv, e])
Watcher = Callable[[int, AttentionLayer, Tensor, Tensor, Tensor], None]


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """All of them, from the first."""
    return [module for module in model.modules() if isinstance(module, AttentionLayer)]


@contextmanager
def watched(model: nn.Module, watch: Watcher) -> Iterator[None]:
    """Calls `watch` with what each layer is about to attend with; the model computes as ever."""
    layers = attention_layers(model)
    for number, layer in enumerate(layers):
        layer.attend = _watching(number, layer, layer.attend, watch)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.attend


def _watching(number: int, layer: AttentionLayer, attend: Callable[..., Tensor], watch: Watcher) -> Any:
    def attend_and_tell(tensors: dict[str, Any], layout: Layout) -> Tensor:
        watch(number, layer, tensors["q"], tensors["k"], tensors["v"])
        return attend(tensors, layout)

    return attend_and_tell
