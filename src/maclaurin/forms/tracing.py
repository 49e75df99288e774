"""Whether a call is being traced, and what keeps code out of a trace (torch.compile, export, torch.func)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
#: types of arguments that no tracer hides behind
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple})
_AS_IT_IS = contextlib.nullcontext()


def untraced(function: Function) -> Function:
    """Run the function while tracing and take its result as a constant of the graph.

    The same mark as torch.compiler.assume_constant_result, which would import the whole compiler,
    most of a second, with this library.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_tracing() -> bool:
    """Whether calls are being recorded: by a compiler, a dispatch mode or a transform of torch.func."""
    if torch.compiler.is_compiling():  # first: what follows is not for a compiler to look at
        return True
    modes = torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]
    return modes > 0 or torch._C._are_functorch_transforms_active()  # type: ignore[attr-defined]


def are_traced(arguments: Iterable[Any]) -> bool:
    """The same, or one of the arguments is a tensor subclass that wants to see each operator."""
    if is_tracing():
        return True
    others = set(map(type, arguments)) - _PLAIN
    return any(issubclass(kind, Tensor) for kind in others)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products and sums inside keep their dtypes; where nothing casts there is nothing to switch off."""
    kind = device.type
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _AS_IT_IS
