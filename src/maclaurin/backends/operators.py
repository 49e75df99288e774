"""Functions of tensors that torch.compile keeps whole, and that are called as they are where none is traced.

    @operator("maclaurin::name")
    def name(x: Tensor, …) -> Tensor: …

    @name.register_fake
    def _(x, …): …

A custom operator of torch costs some hundred microseconds of a CPU's time per call and gradient, more than
short programs run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

P = ParamSpec("P")
R = TypeVar("R")
_PLAIN = (Tensor, torch.nn.Parameter)


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
        if self._graded is None:
            return self._function(*arguments)  # type: ignore[call-arg]
        return self._graded.apply(*arguments)  # type: ignore[no-any-return]

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Shapes and dtypes of what it returns."""
        self.traced.register_fake(function)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    ) -> None:
        """Its gradient, as torch.library.register_autograd takes it."""
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


def are_traced(arguments: Iterable[Any]) -> bool:
    """Whether a call with them is recorded rather than made: by a compiler, a mode that sees operators, a
    transform of torch.func, or a kind of tensor of its own."""
    return is_recording() or any(isinstance(u, Tensor) and type(u) not in _PLAIN for u in arguments)


def is_recording() -> bool:
    """The same of any call now."""
    if torch.compiler.is_compiling():  # first: what follows is not for a compiler to look at
        return True
    modes = torch._C._len_torch_dispatch_stack()  # type: ignore[attr-defined]
    return modes > 0 or torch._C._are_functorch_transforms_active()  # type: ignore[attr-defined]
