"""Functions of tensors that torch.compile treats as one operator, and that are called directly otherwise.

    @operator("maclaurin::name")
    def name(x: Tensor, …) -> Tensor: …

    @name.register_fake
    def _(x, …): …

Calls are direct because a custom operator of torch takes some hundred microseconds of CPU time per call and
gradient, more than a short program takes on a GPU.

A custom operator has to return whatever its backward pass reads. `results` says how many of the outputs
callers get; autograd then need not follow the others.

Outputs that a call does not have are None, in the function and in its fake. A custom operator cannot return
None: when traced, they are empty tensors of the first argument's dtype, which `present` turns back into None.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maclaurin.forms.tracing import are_traced, is_tracing

P = ParamSpec("P")
R = TypeVar("R")


def present(u: Tensor | None) -> Tensor | None:
    """The tensor, or None if a traced call does not have it."""
    return None if u is None or u.numel() == 0 else u


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`; calls that are not traced skip its search for wrappers of torch.func."""
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*arguments: Any) -> Any:
        return function.apply(*arguments) if is_tracing() else direct(*arguments)

    return apply


class Operator(Generic[P, R]):
    """A function, the custom operator made of it for tracing, and its gradient."""

    def __init__(self, name: str, function: Callable[P, R], results: int | None = None) -> None:
        self._function = function
        #: how many of the outputs callers get; None for all
        self._results = results
        #: how many arguments are tensors, if it has a gradient; the others follow
        self._tensors = 0
        #: for torch.compile and torch.library.opcheck
        self.traced = torch.library.custom_op(
            name, _complete(function), mutates_args=(), schema=_schema(function)
        )
        self._graded: Callable[..., Any] | None = None

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R:
        if options:
            raise TypeError(
                f"{self._function.__name__} takes its arguments by position, got {sorted(options)}"
            )
        if are_traced(arguments):
            return self._for_caller(self.traced(*arguments))  # type: ignore[no-any-return]
        tensors = arguments[: self._tensors]
        if self._graded is None or not _need_gradient(tensors):
            return self._for_caller(self._function(*arguments))  # type: ignore[no-any-return, call-arg]
        return self._graded(*tensors, arguments[self._tensors :])  # type: ignore[no-any-return]

    def _for_caller(self, output: Any) -> Any:
        return output if self._results is None else output[: self._results]

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Set the function that gives the shapes and dtypes of its results."""
        self.traced.register_fake(_complete(function))

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    ) -> None:
        """Set its gradient, as in torch.library.register_autograd.

        Gradients of outputs that callers do not get may be missing; arguments after the tensors get None.
        """
        self.traced.register_autograd(backward, setup_context=setup_context)
        function, for_caller = self._function, self._for_caller
        self._tensors = _leading_tensors(function)

        def forward(ctx: Any, *given: Any) -> Any:
            *tensors, others = given  # as one argument: autograd inspects each of them
            arguments = (*tensors, *others)
            output = function(*arguments)  # type: ignore[call-arg]
            setup_context(ctx, arguments, output)
            return for_caller(output)

        def gradients(ctx: Any, *of_outputs: Any) -> tuple[Any, ...]:
            return *backward(ctx, *of_outputs), None  # autograd drops None beyond the arguments

        body = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(gradients))}
        self._graded = apply_of(type(function.__name__, (torch.autograd.Function,), body))


def _need_gradient(tensors: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled():
        for u in tensors:
            if u is not None and u.requires_grad:
                return True
    return False


def _complete(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with empty tensors for outputs that it does not have."""

    @functools.wraps(function)
    def complete(*arguments: Any) -> Any:
        found = function(*arguments)
        if not isinstance(found, tuple):
            return found
        return tuple(arguments[0].new_empty(0) if u is None else u for u in found)

    return complete


def _schema(function: Callable[..., Any]) -> str:
    """The schema of the custom operator, whose outputs are all tensors."""

    def prototype() -> None: ...

    signature = inspect.signature(function, eval_str=True)
    returned = get_args(signature.return_annotation)
    kind: Any = tuple[(Tensor,) * len(returned)] if returned else signature.return_annotation
    prototype.__signature__ = signature.replace(return_annotation=kind)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=())


def _leading_tensors(function: Callable[..., Any]) -> int:
    """How many arguments are tensors; these come first."""
    hints = get_type_hints(function)
    are_tensors = [hints[name] in (Tensor, Tensor | None) for name in inspect.signature(function).parameters]
    count = sum(are_tensors)
    if not all(are_tensors[:count]):
        raise TypeError(f"{function.__name__} has a gradient, so its tensors must be its first arguments")
    return count


def operator(name: str, *, results: int | None = None) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """The decorator."""
    return lambda function: Operator(name, function, results)
