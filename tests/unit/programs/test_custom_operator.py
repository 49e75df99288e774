"""An operator is called as it is, and recorded where something records."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from maclaurin.programs.custom_operator import operator, present


@operator("maclaurin::doubled_for_tests")
def doubled(x: torch.Tensor, times: float) -> torch.Tensor:
    return 2 * times * x.detach()


@doubled.register_fake
def _(x, times):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.times = inputs[1]


doubled.register_autograd(lambda ctx, grad: (2 * ctx.times * grad, None), setup_context=_save)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_gradient_is_the_same_called_and_compiled():
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda u: doubled(u, 3.0).sum(), fullgraph=True, backend="aot_eager")
    for call in (lambda u: doubled(u, 3.0).sum(), compiled):
        (grad,) = torch.autograd.grad(call(x), x)
        torch.testing.assert_close(grad, torch.full((3,), 6.0))


def test_a_mode_sees_the_operator_and_not_its_inside():
    x = torch.randn(3)
    with Seen() as seen:
        doubled(x, 1.0)
    assert seen.names == ["maclaurin.doubled_for_tests.default"]


def test_transforms_of_torch_func_get_the_operator():
    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.func.vmap(lambda u: doubled(u, 1.0))(x), 2 * x)


def test_there_is_no_second_gradient():
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(doubled(x, 1.0).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_arguments_are_given_by_position():
    with pytest.raises(TypeError, match=r"by position, got \['times'\]"):
        doubled(torch.randn(3), times=1.0)


@operator("maclaurin::halved_for_tests", results=1)
def halved(x: torch.Tensor, y: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return x.detach() / 2, torch.full_like(x, 0.5)


@halved.register_fake
def _(x, y):
    return torch.empty_like(x), torch.empty_like(x)


halved.register_autograd(
    lambda ctx, grad, *_: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@pytest.mark.slow
def test_callers_get_only_the_results_and_the_backward_pass_reads_the_other_outputs():
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda u: halved(u, None), fullgraph=True, backend="aot_eager")
    for call in (lambda u: halved(u, None), compiled):
        (only,) = call(x)
        (grad,) = torch.autograd.grad(only.sum(), x)
        torch.testing.assert_close(grad, torch.full((3,), 0.5))
    with torch.no_grad():
        assert len(halved(x, None)) == 1


@operator("maclaurin::lacking_for_tests")
def lacking(x: torch.Tensor, both: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    return x.detach() + 1, x.detach() + 2 if both else None


@lacking.register_fake
def _(x, both):
    return torch.empty_like(x), torch.empty_like(x) if both else None


def test_an_output_that_a_call_lacks_is_none_and_empty_when_traced():
    x = torch.randn(3)
    assert lacking(x, False)[1] is None
    with Seen():
        _, traced = lacking(x, False)
    assert traced.shape == (0,)
    assert present(traced) is present(None) is None
    assert present(x) is x
    for both in (False, True):
        assert set(torch.library.opcheck(lacking.traced, (x, both)).values()) == {"SUCCESS"}


def test_without_a_tensor_that_needs_a_gradient_autograd_records_nothing():
    assert doubled(torch.randn(3), 1.0).grad_fn is None


def test_tensors_come_first_where_there_is_a_gradient():
    @operator("maclaurin::swapped_for_tests")
    def swapped(times: float, x: torch.Tensor) -> torch.Tensor:
        return times * x

    with pytest.raises(TypeError, match="first arguments"):
        swapped.register_autograd(lambda ctx, grad: (None, grad), setup_context=_save)
