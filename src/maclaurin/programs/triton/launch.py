"""Launching a kernel that was compiled before, in a few microseconds of CPU time.

triton finds the compiled kernel anew at every launch, which takes some 30 µs for a kernel with many arguments:
longer than short kernels run. Here it is found by what triton specialises a kernel on: dtypes and alignment of
tensors, whether integers are 1, divisible by 16 or beyond 32 bits, and the values of compile-time arguments.

    @launched
    @triton.jit
    def _kernel(X, Y, n, BLOCK: tl.constexpr): …

    _kernel[grid](x, y, n, BLOCK=64)       # arguments by position, compile-time arguments and options by name
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

_run = JITFunction.run


def launched(jit: Any) -> Any:
    """The kernel with a short way to launch it; as it is in triton's interpreter."""
    return Launched(jit) if isinstance(jit, JITFunction) else jit


class Launched:
    """A kernel of triton and its compiled versions."""

    def __init__(self, jit: JITFunction[Any]) -> None:
        self.jit = jit
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if JITFunction.run is not _run:  # somebody compiles without launching
                self.jit[grid](*arguments, **options)
                return
            device = next(u.get_device() for u in arguments if isinstance(u, Tensor))
            key = (device, tuple(map(_kind, arguments)), tuple(options.items()))
            known = self._compiled.get(key)
            if known is None:
                kernel = self.jit[grid](*arguments, **options)
                self._compiled[key] = kernel, self._constants(len(arguments), options)
                return
            kernel, constants = known
            stream = torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]
            kernel[(*grid, 1, 1)[:3]](*arguments, *constants, stream=stream)

        return launch

    def _constants(self, given: int, options: dict[str, Any]) -> tuple[Any, ...]:
        """The values of the parameters behind those given by position."""
        behind = self.jit.params[given:]
        return tuple(options.get(p.name, p.default) for p in behind)


def _kind(u: Any) -> Any:
    """What triton specialises a kernel on."""
    if isinstance(u, Tensor):
        return u.dtype, u.data_ptr() % 16 == 0
    if type(u) is int:
        return 1 if u == 1 else (u % 16 == 0, -(1 << 31) <= u < 1 << 31)
    return float if type(u) is float else u
