"""Functions of tensors that torch.compile treats as one operator, and that are called directly otherwise.

    @operator("maclaurin::name")
    def name(x: Tensor, …) -> Tensor: …

    @name.register_fake
    def _(x, …): …

Calls are direct because a custom operator of torch takes some hundred microseconds of CPU time per call and
gradient, more than a short program takes on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from maclaurin.forms.tracing import are_traced

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """A function, the custom operator made of it for tracing, and its gradient."""

    def __init__(self, name: str, function: Callable[P, R]) -> None:
        self._function = function
        #: for torch.compile and torch.library.opcheck
        self.traced = torch.library.custom_op(name, function, mutates_args=())
        self._graded: type[torch.autograd.Function] | None = None

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R:
        if options:
            raise TypeError(
                f"{self._function.__name__} takes its arguments by position, got {sorted(options)}"
            )
        if are_traced(arguments):
            return self.traced(*arguments)  # type: ignore[no-any-return]
        if self._graded is None or not torch.is_grad_enabled():
            return self._function(*arguments)  # type: ignore[call-arg]
        return self._graded.apply(*arguments)  # type: ignore[no-any-return]

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Set the function that gives the shapes and dtypes of its results."""
        self.traced.register_fake(function)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    ) -> None:
        """Set its gradient, as in torch.library.register_autograd."""
        self.traced.register_autograd(backward, setup_context=setup_context)
        function = self._function

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = function(*arguments)  # type: ignore[call-arg]
            setup_context(ctx, arguments, output)
            return output

        body = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
        self._graded = type(function.__name__, (torch.autograd.Function,), body)


def operator(name: str) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """The decorator."""
    return lambda function: Operator(name, function)
