"""Whether a call is being traced (torch.compile, export, torch.func), and how to keep code out of a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])
#: types of arguments that no tracer passes
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple})
_UNCHANGED = contextlib.nullcontext()


def untraced(function: Function) -> Function:
    """Mark a function: a tracer runs it and takes its result as a constant of the graph.

    torch.compiler.assume_constant_result sets the same mark, but imports the whole compiler, which takes most
    of a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_tracing() -> bool:
    """Whether calls are recorded: by a compiler, a dispatch mode, a transform of torch.func or forward_ad."""
    if torch.compiler.is_compiling():  # first: a compiler cannot trace the rest
        return True
    if forward_ad._current_level >= 0:
        return True
    modes = torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]
    return modes > 0 or torch._C._are_functorch_transforms_active()  # type: ignore[attr-defined]


def are_traced(arguments: Iterable[Any]) -> bool:
    """Whether calls are being traced, or an argument is a tensor subclass, which may intercept operators."""
    if is_tracing():
        return True
    kinds = set(map(type, arguments))
    return not kinds <= _PLAIN and any(issubclass(kind, Tensor) for kind in kinds - _PLAIN)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, in which products and sums keep their dtypes."""
    kind = device.type
    if kind == "meta":  # autocast does not know it
        return _UNCHANGED
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _UNCHANGED
