"""What torch.compile, export and other tracers need to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
_PLAIN = (Tensor, torch.nn.Parameter)


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
    return is_tracing() or any(isinstance(u, Tensor) and type(u) not in _PLAIN for u in arguments)
