"""What torch.compile must not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Run the function while tracing and take its result as a constant of the graph.

    The same mark as torch.compiler.assume_constant_result, which would import the whole compiler,
    most of a second, with this library.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
