"""The step of one token recorded as a CUDA graph: hundreds of small launches become one.

A graph reads and writes the same memory each time. So the tensors of the cache are copied to fixed buffers,
and a replay overwrites the state before the token with the state after it. Between replays the cache is the
same as after an ordinary step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from maclaurin.models.cache import MaclaurinCache
from maclaurin.models.modeling import MaclaurinForCausalLM
from maclaurin.programs.decode_step import MOST_FEATURES

#: work → a function that repeats it
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


def can_record(model: MaclaurinForCausalLM, cache: MaclaurinCache) -> bool:
    """Whether a step launches the same kernels each time, and no hook or autocast needs to run in it."""
    layers: list[Any] = [block.self_attn for block in model.model.layers]
    listened = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return (
        model.device.type == "cuda"
        and cache.is_constant
        and all(
            group.spec.features(layer.key_size) <= MOST_FEATURES for layer in layers for group in layer.groups
        )
        and not listened
        and not hasattr(model, "hf_device_map")
        and not torch.is_autocast_enabled("cuda")
    )


class RecordedStep:
    """The recorded step of this model with this cache, whose tensors must have constant shapes."""

    @torch.no_grad()
    def __init__(
        self, model: MaclaurinForCausalLM, cache: MaclaurinCache, record: Recorder | None = None
    ) -> None:
        self._model, self._cache = model, cache
        #: the graph holds addresses of the weights, so they must not be freed
        self._weights = [tensor.data for tensor in (*model.parameters(), *model.buffers())]
        rows, given = cache.batch_size, _of_layers(cache)
        with torch.inference_mode(False):  # else only steps in inference mode could write to them
            self._held = {name: torch.empty_like(t).copy_(t) for name, t in given.items()}
            self._token = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
            self._position = torch.zeros_like(self._token).copy_(cache.next_positions(rows, model.device))
        self._logits: Tensor | None = None
        with torch.inference_mode(False), torch.no_grad(), _current(model.device):
            self._replay = (record or cuda_graph)(self._work)
        self._placed: list[tuple[Any, ...]] = []

    def supports(self, model: MaclaurinForCausalLM, cache: MaclaurinCache) -> bool:
        """Whether it was recorded for this model, its weights at their present addresses, and this cache."""
        same = model is self._model and cache is self._cache
        return same and next(model.parameters()).data_ptr() == self._weights[0].data_ptr()

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor | None:
        """Logits [B, vocabulary] after token [B, 1], valid until the next step; None if shapes changed."""
        if token.shape != self._token.shape or not (self._is_placed() or self._place()):
            return None
        self._token.copy_(token)
        self._replay()
        self._cache.count(1)
        return self._logits

    def _work(self) -> None:
        """One step that reads and writes the fixed buffers."""
        working = self._cache.twin()
        working.lengths = working.present = None  # positions are passed in, and nothing else needs them
        working.restore(self._held)
        out = self._model(
            input_ids=self._token, position_ids=self._position, past_key_values=working, logits_to_keep=1
        )
        self._hold(working.tensors())
        self._position.add_(1)
        self._logits = out.logits[:, -1]

    def _hold(self, given: dict[str, Tensor]) -> None:
        """Copy tensors into the fixed buffers; those of one dtype and layout in one launch."""
        copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        for dtype in {t.dtype for t in self._held.values()}:
            names = [name for name, t in self._held.items() if t.dtype == dtype]
            copy([self._held[name] for name in names], [given[name] for name in names])

    def _is_placed(self) -> bool:
        """Whether the cache still holds our buffers; every change of the cache replaces its tensors."""
        return len(self._placed) > 0 and all(
            all(a is b for a, b in zip(placed, memory.parts, strict=True))
            for placed, memory in zip(self._placed, self._cache.memories, strict=True)
        )

    def _place(self) -> bool:
        """Copy the cache's tensors into our buffers and make it use those; False if shapes differ."""
        given = _of_layers(self._cache)
        if {name: _kind(t) for name, t in given.items()} != {n: _kind(t) for n, t in self._held.items()}:
            return False
        self._hold(given)
        self._position.copy_(self._cache.next_positions(len(self._token), self._token.device))
        self._cache.restore(self._held)
        self._cache.is_rewritten = True
        self._placed = [memory.parts for memory in self._cache.memories]
        return True


def _of_layers(cache: MaclaurinCache) -> dict[str, Tensor]:
    """The tensors of a cache's layers, without those about rows and padding."""
    return {n: t for n, t in cache.tensors().items() if n not in ("lengths", "present", "pending")}


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """A context with this GPU as the current one, to which streams and graphs belong."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _kind(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device


def cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Capture the work in one graph, after two ordinary runs that compile programs and fill tables."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
