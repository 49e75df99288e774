"""softmax of a changed score, against float64 written out here."""

import pytest
import torch

from maclaurin.backends.triton import INSTALLED
from tests.kernels.conftest import ON_GPU

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

from maclaurin.backends.triton import exp_modified

DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
LARGEST = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def error(value, reference):
    return float((value.double() - reference).norm() / reference.norm().clamp(min=1e-3))


def assert_close(values, references, dtype):
    errors = [error(value, reference.detach()) for value, reference in zip(values, references, strict=True)]
    assert max(errors) < LARGEST[dtype], errors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "call", "decays"),
    [
        (40, exp_modified.Call(0.3, True), False),
        (70, exp_modified.Call(0.3, True, clamp=0.5), False),
        (70, exp_modified.Call(0.3, True), True),
        (90, exp_modified.Call(0.3, True, window=20, sinks=2), False),
        (90, exp_modified.Call(0.3, True, window=20, sinks=40), True),
        (33, exp_modified.Call(0.3, False, clamp=0.2), False),
    ],
)
def test_softmax_of_a_changed_score(tokens, call, decays, dtype, device, poisoned):
    q, k, v = (torch.randn(2, h, tokens, s, device=device).to(dtype) for h, s in ((4, 16), (2, 16), (2, 12)))
    totals = -torch.rand(2, 2, tokens, dtype=torch.float64, device=device).cumsum(-1) if decays else None
    leaves = [u.double().requires_grad_() for u in (q, k, v, *([totals] if decays else []))]
    expected = softmax_of_a_changed_score(*leaves[:3], leaves[3] if decays else None, call)
    direction = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(expected, leaves, direction.double())
    o, lse = exp_modified.forward(q, k, v, totals, call)
    delta = (direction.float() * o.float()).sum(-1)
    found = exp_modified.backward(direction, q, k, v, totals, lse, delta, call)
    assert_close([o, *(g for g in found if g is not None)], [expected, *gradients], dtype)


def softmax_of_a_changed_score(q, k, v, totals, call):
    k, v = (u.repeat_interleave(2, 1) for u in (k, v))
    x = q @ k.mT * call.scale
    x = x if call.clamp is None else x.clamp(max=call.clamp)
    if totals is not None:
        totals = totals.repeat_interleave(2, 1)
        x = x + totals[..., :, None] - totals[..., None, :]
    t, s = (
        torch.arange(x.shape[-1], device=x.device)[:, None],
        torch.arange(x.shape[-1], device=x.device)[None],
    )
    seen = s <= t if call.causal else s >= 0
    if call.window is not None:
        seen = seen & ((s > t - call.window) | (s < call.sinks))
    return x.masked_fill(~seen, -torch.inf).softmax(-1) @ v
