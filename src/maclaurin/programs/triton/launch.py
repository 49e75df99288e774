"""Launching a kernel that was compiled before, in a few microseconds of CPU time.

triton looks up the compiled kernel at every launch, asks the driver about every pointer, and calls the hooks of
profilers even if there are none. For a kernel with many arguments that takes 30 µs and more, longer than a short kernel
runs. Here the compiled kernel is looked up by dtypes and alignment of its tensors and by the values of its other
arguments. Only the first launch with new ones goes through triton.

    @launched
    @triton.jit
    def _kernel(X, Y, n, BLOCK: tl.constexpr): …

    _kernel[grid](x, y, n, BLOCK=64)    # tensors first, then numbers; compile-time arguments and options by name

Grid, numbers and options depend only on shapes and strides. For short calls they are computed once and cached:

    @by_shapes
    def _launch(x: Layout, y: Layout) -> Launch:
        return prepared(_kernel, grid, (n,), BLOCK=64)

    _launch(Layout.of(x), Layout.of(y))(x, y)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from maclaurin.programs.triton import current_gpu

_run = JITFunction.run
_hooks: Any = knobs.runtime
#: sets of arguments remembered per kernel
_MOST_CALLS = 2048
#: sets of shapes that prepared launches are cached for
_MOST_SHAPES = 1024

#: a kernel with all arguments but its tensors
Launch = Callable[..., None]
Function = TypeVar("Function", bound=Callable[..., Any])
_caches: list[Any] = []


def by_shapes(function: Function) -> Function:
    """Cache what a call needs besides its tensors; it may depend on the arguments and on constants of its module."""
    cached: Any = lru_cache(maxsize=_MOST_SHAPES)(function)
    _caches.append(cached)
    return cached


def forget_launches() -> None:
    """Clear these caches, after a test or benchmark has changed tile sizes or other constants."""
    for cached in _caches:
        cached.cache_clear()


class Layout(NamedTuple):
    """Shape, strides and dtype of a tensor; they determine grid, numbers and options of a launch."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(u: Tensor) -> Layout:
        """The layout of a tensor."""
        return Layout(u.shape, u.stride(), u.dtype)

    @staticmethod
    def of_given(u: Tensor | None) -> Layout | None:
        """The layout of a tensor that a call may lack."""
        return None if u is None else Layout.of(u)

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """The layout of a new contiguous tensor."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return Layout(shape, tuple(reversed(strides)), dtype)


class New(NamedTuple):
    """Shape and dtype of a tensor that a call allocates; computed once, like its launches."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def new_tensors(like: Tensor, *kinds: New | None) -> list[Any]:
    """Uninitialised tensors on the device of `like`, None where a call has none."""
    device = like.device
    return [None if kind is None else torch.empty(kind[0], dtype=kind[1], device=device) for kind in kinds]


def new_like(u: Tensor) -> Tensor:
    """An uninitialised tensor with shape, strides and dtype of `u`."""
    made = torch.empty_like(u)
    if made.stride() == u.stride():
        return made
    return torch.empty_strided(u.shape, u.stride(), dtype=u.dtype, device=u.device)


def launched(jit: Any) -> Any:
    """The kernel with a fast launch; in triton's interpreter, the kernel unchanged."""
    return Launched(jit) if isinstance(jit, JITFunction) else jit


def prepared(kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    """The kernel with all arguments but its tensors."""
    if isinstance(kernel, Launched):
        return _Prepared(kernel, grid, numbers, options)
    return lambda *tensors: kernel[grid](*tensors, *numbers, **options)


class Launched:
    """A triton kernel and its compiled versions."""

    def __init__(self, jit: JITFunction[Any]) -> None:
        self.jit = jit
        #: how many arguments are tensors (or None in place of a tensor); found at the first launch
        self._tensors = 0
        self._calls: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        def launch(*arguments: Any, **options: Any) -> None:
            if JITFunction.run is not _run:  # compile only (compiled_code.py)
                self.jit[grid](*arguments, **options)
                return
            if self._tensors == 0:
                self._tensors = sum(u is None or isinstance(u, Tensor) for u in arguments)
            tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
            pointers, kinds = _pointers(tensors)
            device = current_gpu()
            key = (device, kinds, numbers, tuple(options.items()))
            known = self._calls.get(key)
            if known is None:
                if len(self._calls) >= _MOST_CALLS:
                    self._calls.clear()
                self._calls[key] = self.first_launch(grid, arguments, options)
                return
            kernel, constants = known
            _start(kernel, (*grid, 1, 1)[:3], device, (*pointers, *numbers, *constants))

        return launch

    def first_launch(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Launch through triton, which compiles if needed; returns the kernel and its compile-time arguments."""
        kernel = self.jit[grid](*arguments, **options)
        return kernel, tuple(options.get(p.name, p.default) for p in self.jit.params[len(arguments) :])


class _Prepared:
    """A kernel with grid, numbers and options, and its compiled versions by dtypes and alignments of tensors."""

    def __init__(
        self, kernel: Launched, grid: tuple[int, ...], numbers: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._kernel, self._grid, self._numbers, self._options = kernel, grid, numbers, options
        self._whole_grid = (*grid, 1, 1)[:3]
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        if JITFunction.run is not _run:
            self._kernel.jit[self._grid](*tensors, *self._numbers, **self._options)
            return
        pointers, kinds = _pointers(tensors)
        device = current_gpu()
        known = self._known.get((device, kinds))
        if known is None:
            kernel, constants = self._kernel.first_launch(
                self._grid, (*tensors, *self._numbers), self._options
            )
            self._known[device, kinds] = kernel, (*self._numbers, *constants)
            return
        kernel, others = known
        _start(kernel, self._whole_grid, device, (*pointers, *others))


def _start(kernel: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel on the current stream, through triton's hooks only if a profiler has set some."""
    stream = _stream(device)
    if _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls:
        kernel[grid](*arguments, stream=stream)
    else:
        x, y, z = grid
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)


def _pointers(tensors: tuple[Tensor | None, ...]) -> tuple[list[int | None], tuple[Any, ...]]:
    """Addresses of tensors, and the properties a kernel is compiled for: dtypes, and whether 16 divides addresses."""
    pointers = [None if u is None else u.data_ptr() for u in tensors]
    kinds: list[Any] = [None if u is None else u.dtype for u in tensors]
    if any([at & 15 for at in pointers if at]):  # noqa: C419 (a list is faster)
        kinds += [at is None or at & 15 == 0 for at in pointers]
    return pointers, tuple(kinds)


def _stream(device: int) -> int:
    """The current stream of a device, as the driver names it."""
    return torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]
