"""Tokens one after the other through the fused step, against the parallel form in float64."""

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.backends.state_step import state_step, step_layout
from maclaurin.testing import Shape, random_tensors, relative_error
from tests.kernels.conftest import ON_GPU

SPECS = [
    "taylor(2)/sum",
    "taylor(3)/l2",
    "power(2)*forget/sum(eps=0.001)",
    "taylor(2,about=mean)/sum",
    "hermite(2)/len",
    "linear(identity)",
    "taylor(2,about=mean)+window(5,sinks=1)/sum",
    "taylor(2)+window(4)*forget/sum",
]


@pytest.mark.parametrize("notation", SPECS)
@pytest.mark.parametrize("e", [9, 32])
def test_token_by_token(notation, e, device, poisoned):
    shape = Shape(batch=2, tokens=70 if ON_GPU else 14, kv_heads=2, group=2, d=64 if ON_GPU else 7, e=e)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    expected = case.map(torch.Tensor.double).output(form="parallel")
    state, parts = None, []
    with torch.no_grad():
        for t in range(shape.tokens):
            token = {name: u[:, t : t + 1] for name, u in case.tensors.items()}
            y, state = maclaurin.attention(
                token.pop("q"),
                token.pop("k"),
                token.pop("v"),
                notation,
                state=state,
                return_state=True,
                **token,
            )
            parts.append(y)
    assert relative_error(torch.cat(parts, 1), expected, 1e-3) < 2e-5


def test_the_state_before_is_left_as_it_was(device):
    q, k, v = (torch.randn(1, 3, 2, 16, device=device) for _ in range(3))
    with torch.no_grad():
        _, state = maclaurin.attention(q, k, v, "taylor(2)/sum", return_state=True)
        before = state.clone()
        maclaurin.attention(q[:, :1], k[:, :1], v[:, :1], "taylor(2)/sum", state=state, return_state=True)
    torch.testing.assert_close(state.moments, before.moments, rtol=0, atol=0)


def test_operator_is_registered_as_torch_wants_it(device):
    moments, v = torch.randn(1, 2, 45, 5, device=device), torch.randn(1, 2, 4, device=device)
    k, q, log_forget = (-torch.rand(1, *size, device=device) for size in ((2, 8), (6, 8), (2,)))
    call = (moments, k, q, v, log_forget, log_forget.exp(), *step_layout(8, (0, 1, 2), torch.device(device)))
    assert set(torch.library.opcheck(state_step.traced, call).values()) == {"SUCCESS"}


def test_a_step_with_a_gradient_takes_the_plain_form(device):
    q, k, v = (torch.randn(1, 3, 2, 16, device=device) for _ in range(3))
    _, state = maclaurin.attention(q, k, v, "taylor(2)/sum", return_state=True)
    last = v[:, :1].requires_grad_()
    y, _ = maclaurin.attention(q[:, :1], k[:, :1], last, "taylor(2)/sum", state=state, return_state=True)
    y.sum().backward()
    assert last.grad is not None
