"""One decoding step recorded as a CUDA graph: hundreds of small launches become one.

A graph reads and writes the same memory each time. So the tensors of the cache are copied to fixed buffers,
and a replay overwrites the state before the token with the state after it. Keys that grow with the text get
preallocated buffers; when those are full, the step is recorded again. Between replays the cache
is the same as after an ordinary step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maclaurin.layers.layer_memory import Preallocation
from maclaurin.models.cache import MaclaurinCache
from maclaurin.models.modeling import MaclaurinForCausalLM
from maclaurin.programs.dispatch import plan
from maclaurin.spec import AttentionSpec
from maclaurin.spec.head_groups import HeadGroup

#: work → a function that repeats it
Recorder = Callable[[Callable[[], None]], Callable[[], None]]
#: spare tokens of a buffer: at least this many, or the tokens so far divided by this
_LEAST_SPARE, _SHARE_OF_SPARE = 1024, 8


def can_record(model: MaclaurinForCausalLM, cache: MaclaurinCache) -> bool:
    """Whether a step launches the same kernels each time, and no hook or autocast needs to run in it."""
    layers: list[Any] = [block.self_attn for block in model.model.layers]
    listened = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return (
        model.device.type == "cuda"
        and all(_has_fixed_work(layer, group, model) for layer in layers for group in layer.groups)
        and not listened
        and not hasattr(model, "hf_device_map")
        and not torch.is_autocast_enabled("cuda")
    )


def _has_fixed_work(layer: Any, group: HeadGroup, model: MaclaurinForCausalLM) -> bool:
    """Whether every step of these heads launches the same kernels."""
    if not group.spec.has_finite_state and layer.extras.extra_tokens:
        return False
    sizes = (layer.heads // layer.kv_heads, len(group.heads), layer.key_size, layer.value_size)
    return step_has_fixed_work(group.spec, *sizes, model.dtype, model.device)


@lru_cache(maxsize=1024)
def step_has_fixed_work(
    spec: AttentionSpec,
    group_size: int,
    kv_heads: int,
    key_size: int,
    value_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether the program of a decoding step launches the same kernels each time.

    With a state, the step is one more token; without one, it is one query over a buffer of keys.
    """
    keys = 1 if spec.has_finite_state else _LEAST_SPARE
    shapes = [
        (1, 1, kv_heads * group_size, key_size),
        (1, keys, kv_heads, key_size),
        (1, keys, kv_heads, value_size),
    ]
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    if spec.has_finite_state:
        return plan(q, k, v, spec, state=True, return_state=True, device=device, layout="bthd").has_fixed_work
    mask = torch.empty(1, keys, dtype=torch.bool, device="meta")
    return plan(q, k, v, spec, key_padding_mask=mask, device=device, layout="bthd").has_fixed_work


def fixed_shapes(cache: MaclaurinCache) -> dict[str, torch.Size]:
    """Shapes of all tensors that do not grow; a recorded step is valid only while they stay the same."""
    growing = cache.growing() | {"present"}
    return {name: t.shape for name, t in cache.tensors().items() if name not in growing}


class RecordedStep:
    """The recorded step of this model with this cache. Keys may grow; other tensors keep their shapes."""

    @torch.no_grad()
    def __init__(
        self, model: MaclaurinForCausalLM, cache: MaclaurinCache, record: Recorder | None = None
    ) -> None:
        self._model, self._cache = model, cache
        #: the graph holds addresses of the weights, so they must not be freed
        self._weights = [tensor.data for tensor in (*model.parameters(), *model.buffers())]
        rows, given = cache.batch_size, _of_layers(cache)
        self._growing, self._space = cache.growing(), None
        with torch.inference_mode(False):  # else only steps in inference mode could write to them
            self._held = {n: torch.empty_like(t).copy_(t) for n, t in given.items() if n not in self._growing}
            if self._growing:
                tokens = given[next(iter(self._growing))].shape[1]
                spare = max(_LEAST_SPARE, tokens // _SHARE_OF_SPARE)
                self._space = Preallocation(rows, tokens + spare, model.device)
                self._held |= {name: self._preallocated(given[name]) for name in self._growing}
                self._space.holds(tokens, cache.present)
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
        """Logits [B, vocabulary] after token [B, 1], valid until the next step.

        None if shapes changed or the buffers are full.
        """
        if token.shape != self._token.shape or not (self._is_placed() or self._place()):
            return None
        if self._space is not None and self._space.length == self._space.capacity:
            return None
        self._token.copy_(token)
        self._replay()
        self._cache.count(1)
        if self._space is not None:
            self._space.length += 1
        return self._logits

    def _work(self) -> None:
        """One step that reads and writes the fixed buffers."""
        working = self._cache.twin()
        working.lengths = working.present = None  # positions are passed in, and nothing else needs them
        working.restore(self._held)
        if self._space is not None:
            for memory in working.memories:
                memory.use(self._space, writes_in_place=True)
        out = self._model(
            input_ids=self._token, position_ids=self._position, past_key_values=working, logits_to_keep=1
        )
        self._hold(working.tensors())
        self._position.add_(1)
        if self._space is not None:
            self._space.advance()
        self._logits = out.logits[:, -1]

    def _hold(self, given: dict[str, Tensor]) -> None:
        """Copy tensors that do not grow into the fixed buffers; those of one dtype in one launch."""
        copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        fixed = {name: t for name, t in self._held.items() if name not in self._growing}
        for dtype in {t.dtype for t in fixed.values()}:
            names = [name for name, t in fixed.items() if t.dtype == dtype]
            copy([fixed[name] for name in names], [given[name] for name in names])

    def _preallocated(self, t: Tensor) -> Tensor:
        """A buffer for a tensor that grows; `_place` fills it."""
        assert self._space is not None
        return t.new_zeros(t.shape[0], self._space.capacity + 1, *t.shape[2:])

    def _is_placed(self) -> bool:
        """Whether the cache still holds our buffers; every change of the cache replaces its tensors."""
        return len(self._placed) > 0 and all(
            all(a is b for a, b in zip(placed, memory.parts, strict=True))
            for placed, memory in zip(self._placed, self._cache.memories, strict=True)
        )

    def _place(self) -> bool:
        """Copy the cache's tensors into our buffers and make it use those; False if shapes differ."""
        given = _of_layers(self._cache)
        if given.keys() != self._held.keys() or not all(self._fits(n, t) for n, t in given.items()):
            return False
        self._hold(given)
        self._position.copy_(self._cache.next_positions(len(self._token), self._token.device))
        if self._space is not None:
            tokens = given[next(iter(self._growing))].shape[1]
            self._space.holds(tokens, self._cache.present)
            for name in self._growing:
                self._held[name][:, :tokens].copy_(given[name])
        self._cache.restore(self._held)
        if self._space is not None:
            for memory in self._cache.memories:
                memory.use(self._space, writes_in_place=False)
        self._cache.is_rewritten = True
        self._placed = [memory.parts for memory in self._cache.memories]
        return True

    def _fits(self, name: str, t: Tensor) -> bool:
        """Whether a tensor has the shape of our buffer or, if it grows, fits with another token."""
        own = self._held[name]
        if name not in self._growing:
            return _kind(t) == _kind(own)
        same = t.shape[:1] + t.shape[2:] == own.shape[:1] + own.shape[2:]
        return same and t.shape[1] < own.shape[1] - 1 and t.dtype == own.dtype and t.device == own.device


def _of_layers(cache: MaclaurinCache) -> dict[str, Tensor]:
    """The tensors of a cache's layers, without those that describe rows and padding."""
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
