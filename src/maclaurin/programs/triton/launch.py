"""Launching a kernel that was compiled before, in a few microseconds of CPU time.

triton finds the compiled kernel anew at every launch, and asks the driver about every pointer: 30 µs and more for a
kernel with many arguments, longer than short kernels run. Here the compiled kernel is found by dtypes and alignment
of the tensors and by all other arguments as they are; new arguments go triton's way once.

    @launched
    @triton.jit
    def _kernel(X, Y, n, BLOCK: tl.constexpr): …

    _kernel[grid](x, y, n, BLOCK=64)    # tensors first, then numbers; compile-time arguments and options by name
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

_run = JITFunction.run
#: sets of arguments remembered per kernel
_MOST_CALLS = 2048


def launched(jit: Any) -> Any:
    """The kernel with a short way to launch it; as it is in triton's interpreter."""
    return Launched(jit) if isinstance(jit, JITFunction) else jit


class Launched:
    """A kernel of triton and its compiled versions."""

    def __init__(self, jit: JITFunction[Any]) -> None:
        self.jit = jit
        #: how many of the arguments are tensors, or None in place of one; known from the first launch
        self._tensors = 0
        self._calls: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if JITFunction.run is not _run:  # somebody compiles without launching
                self.jit[grid](*arguments, **options)
                return
            if self._tensors == 0:
                self._tensors = sum(u is None or isinstance(u, Tensor) for u in arguments)
            tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
            pointers = [None if u is None else u.data_ptr() for u in tensors]
            dtypes = tuple([None if u is None else u.dtype for u in tensors])
            aligned = tuple([at is None or at & 15 == 0 for at in pointers])
            device = torch.cuda.current_device()
            key = (device, dtypes, aligned, numbers, tuple(options.items()))
            known = self._calls.get(key)
            if known is None:
                self._first_launch(key, grid, arguments, options)
                return
            kernel, constants = known
            stream = torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]
            kernel[(*grid, 1, 1)[:3]](*pointers, *numbers, *constants, stream=stream)

        return launch

    def _first_launch(
        self, key: tuple[Any, ...], grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Launch it triton's way, which compiles it if need be, and remember what these arguments run."""
        kernel = self.jit[grid](*arguments, **options)
        constants = tuple(options.get(p.name, p.default) for p in self.jit.params[len(arguments) :])
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[key] = kernel, constants
