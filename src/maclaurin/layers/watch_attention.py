"""Record the inputs and outputs of attention layers while a model runs; its output does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from maclaurin.layers.attention import AttentionLayer
from maclaurin.layers.layout import Layout


class AttentionCall(NamedTuple):
    """Inputs and output of a layer's attention: q, y [B, T, H, …], k, v [B, T, Hkv, …]."""

    number: int
    layer: AttentionLayer
    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor


class LayerCall(NamedTuple):
    """Arguments and output of a whole layer, projections included."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    output: Tensor


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """All attention layers, first to last."""
    return [module for module in model.modules() if isinstance(module, AttentionLayer)]


@contextmanager
def watch_attention(model: nn.Module, watch: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Call `watch` after the attention of every layer."""
    layers = attention_layers(model)
    for number, layer in enumerate(layers):
        layer.attend = _watching(number, layer, watch)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.attend


def _watching(number: int, layer: AttentionLayer, watch: Callable[[AttentionCall], None]) -> Any:
    attend = layer.attend

    def attend_and_watch(q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        y = attend(q, k, v, gates, layout)
        watch(AttentionCall(number, layer, q, k, v, y))
        return y

    return attend_and_watch


@contextmanager
def record_layers(layers: Sequence[nn.Module]) -> Iterator[dict[int, LayerCall]]:
    """The last call of each layer while the block runs, by its place in `layers`."""
    calls: dict[int, LayerCall] = {}

    def record(n: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            calls[n] = LayerCall(arguments, named, output[0] if isinstance(output, tuple) else output)

        return hook

    hooks = [layer.register_forward_hook(record(n), with_kwargs=True) for n, layer in enumerate(layers)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
