"""softmax of a modified score, against float64 written out here."""

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.programs.fused_rows import row_products
from maclaurin.programs.score_mod import modified_softmax, modified_softmax_backward
from maclaurin.programs.triton import INSTALLED
from maclaurin.testing import Shape, assert_same, random_tensors
from tests.kernels.conftest import ON_GPU
from tests.kernels.judging import assert_as_right_as_plain

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

from maclaurin.programs.triton import score_mod

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
        (40, score_mod.Call(0.3, True), False),
        (70, score_mod.Call(0.3, True, clamp=0.5), False),
        (70, score_mod.Call(0.3, True), True),
        (90, score_mod.Call(0.3, True, window=20, sinks=2), False),
        (90, score_mod.Call(0.3, True, window=20, sinks=40), True),
        # with keys that all queries of a tile see
        (300, score_mod.Call(0.3, True, window=150, sinks=3), False),
        (300, score_mod.Call(0.3, True, window=129), True),
        (257, score_mod.Call(0.3, True, window=192, sinks=70), False),
        (200, score_mod.Call(0.3, True, window=2), False),
        (70, score_mod.Call(0.3, True, window=500), False),
        (33, score_mod.Call(0.3, False, clamp=0.2), False),
    ],
)
def test_softmax_with_a_score_mod(tokens, call, decays, dtype, device, poisoned):
    q, k, v = (torch.randn(2, h, tokens, s, device=device).to(dtype) for h, s in ((4, 16), (2, 16), (2, 12)))
    totals = -torch.rand(2, 2, tokens, dtype=torch.float64, device=device).cumsum(-1) if decays else None
    leaves = [u.double().requires_grad_() for u in (q, k, v, *([totals] if decays else []))]
    expected = softmax_of_a_changed_score(*leaves[:3], leaves[3] if decays else None, call)
    direction = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(expected, leaves, direction.double())
    o, lse = score_mod.forward(q, k, v, totals, call)
    delta = (direction.float() * o.float()).sum(-1)
    found = score_mod.backward(direction, q, k, v, totals, lse, delta, call)
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


@pytest.mark.parametrize(
    "notation",
    [
        "exp(clamp=0.5)/len",
        "exp(clamp=0.5)/sum",
        "exp(clamp=0.5)/l2",
        "exp*forget/sum",
        "exp*forget/len*out",
        "exp*forget*in",
        "exp*forget/running",
        "exp(clamp=1)*forget/sum(eps=0.1,detach)",
        "poly(0)+window(9,sinks=2)/sum",
        "poly(0)+window(20)/rms",
    ],
)
def test_every_kind_of_spec_with_grouped_heads_and_odd_sizes(notation, dtype, device, poisoned):
    shape = Shape(batch=2, tokens=130 if ON_GPU else 37, kv_heads=2, group=2, d=24, e=40)
    assert_as_right_as_plain(parse(notation), shape, dtype, device, "triton")


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4097])
@pytest.mark.parametrize("notation", ["exp(clamp=1)/len", "exp*forget/sum"])
def test_every_length(length, notation, dtype, device, poisoned):
    shape = Shape(batch=1, tokens=length, kv_heads=2, group=1, d=64, e=64)
    assert_as_right_as_plain(parse(notation), shape, dtype, device, "triton")


def test_operator_is_registered_as_torch_wants_it(device):
    q, k, v = (torch.randn(1, 20, 2, 16, device=device, requires_grad=True) for _ in range(3))
    totals = (-torch.rand(1, 2, 20, dtype=torch.float64, device=device)).cumsum(-1).requires_grad_()
    call = (q, k, v, totals, None, 0.25, True, 0.5, None, 0)
    assert set(torch.library.opcheck(modified_softmax.traced, call).values()) == {"SUCCESS"}
    with torch.no_grad():
        o, lse = modified_softmax(*call)
    given = [u.detach() for u in call[:4]]
    for rows in ((o, lse), (o, None), (None, None)):
        back = (o, *given, None, lse, *rows, *call[5:])
        assert set(torch.library.opcheck(modified_softmax_backward.traced, back).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(row_products.traced, (o, o)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("notation", ["exp(clamp=0.5)/len", "exp(clamp=0.5)/len*out", "exp*forget/len"])
def test_padding_under_a_denominator_that_is_no_variable(notation, device):
    case = random_tensors(parse(notation), Shape(batch=2, tokens=20, kv_heads=1, group=2, d=8, e=8), 0)
    case = case.map(lambda u: u.float().to(device)).with_gradients()
    mask = torch.arange(20, device=device)[None] < torch.tensor([[20], [13]], device=device)
    y = case(key_padding_mask=mask, form="parallel")
    assert not y[1, 13:].any()
    alone = case.map(lambda u: u[1:, :13].detach()).with_gradients()
    torch.testing.assert_close(y[1:, :13], alone(form="parallel"))
    of_alone = alone.gradients((alone(form="parallel") ** 2).sum())
    for name, found in case.gradients((y[1] ** 2).sum()).items():
        assert_same(found[1:, :13], of_alone[name], name)
        assert not found[:1].any(), name
        assert not found[1:, 13:].any(), name


@pytest.mark.parametrize("forget", [-4.0, -0.2, float("-inf")])
def test_strong_forgetting_in_texts_that_end_within_a_tile(forget, dtype, device, poisoned):
    q, k, v = (torch.randn(1, 100, 1, 16, device=device).to(dtype).requires_grad_() for _ in range(3))
    log_forget = torch.full((1, 100, 1), forget, device=device).to(dtype).requires_grad_()
    y = maclaurin.attention(q, k, v, "exp*forget/sum", log_forget=log_forget, form="parallel")
    gradients = torch.autograd.grad(y.float().square().sum(), (q, k, v, log_forget))
    assert all(bool(u.isfinite().all()) for u in (y, *gradients))


def test_the_clamp_hands_on_a_gradient_where_it_is_reached(device):
    q = torch.zeros(1, 4, 1, 16, device=device, requires_grad=True)
    k, v = (torch.randn(1, 4, 1, 16, device=device) for _ in range(2))
    found, expected = (
        torch.autograd.grad(maclaurin.attention(q, k, v, "exp(clamp=0)/len", form=form).sum(), q)[0]
        for form in ("parallel", "blocked")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("notation", "form"), [("exp*forget/sum", "parallel"), ("taylor(2)*forget/sum", "chunked")]
)
def test_gates_that_reset_cost_fp32_no_digits(notation, form, device):
    """Totals of the log gate are large after many resets, and their differences are what counts."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 150, 2, 24, device=device) for _ in range(3))
    log_forget = -torch.rand(1, 150, 2, device=device)
    log_forget[:, ::4] = -torch.inf
    found, gold = (
        maclaurin.attention(
            *(u.to(dtype) for u in (q, k, v)), notation, log_forget=log_forget.to(dtype), form=form
        )
        for dtype in (torch.float32, torch.float64)
    )
    assert float((found.double() - gold).norm() / gold.norm()) < 1e-6
