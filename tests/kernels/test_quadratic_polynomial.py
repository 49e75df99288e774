"""The fused quadratic program for polynomial kernels, judged against float64."""

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.programs.quadratic_polynomial import polynomial_attention
from maclaurin.testing import Shape
from tests.kernels import interpreted_bfloat16
from tests.kernels.conftest import INTERPRETED, ON_GPU
from tests.kernels.judging import assert_as_right_as_plain

if INTERPRETED:
    interpreted_bfloat16.correct()

LENGTHS = [1, 63, 64, 65, 1000, 4097] if ON_GPU else [1, 15, 33, 65]
SPECS = [
    "taylor(2)/sum",
    "taylor(4)/sum",
    "taylor(3)/l2",
    "taylor(1)/rms",
    "power(2)/sum(eps=0.001)",
    "poly(1,0.5,0.25)/len*out",
    "linear(identity)",
    "linear(relu)/sum(eps=1e-08)",
    "linear(relu)*in/len",
    "sigmoid(-1)",
    "sigmoid(-0.5)/sum",
    "power(2)*forget/sum",
    "taylor(2)*in*forget/len",
]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(length, dtype, device, poisoned):
    shape = Shape(batch=1, tokens=length, kv_heads=1, group=1, d=64 if ON_GPU else 16, e=64 if ON_GPU else 16)
    assert_as_right_as_plain(parse("taylor(2)/sum"), shape, dtype, device, "triton")


@pytest.mark.parametrize("notation", SPECS)
def test_every_kind_of_spec_with_grouped_heads_and_odd_sizes(notation, dtype, device, poisoned):
    shape = Shape(batch=2, tokens=130 if ON_GPU else 37, kv_heads=2, group=2, d=24, e=40)
    assert_as_right_as_plain(parse(notation), shape, dtype, device, "triton")


def test_feature_maps_that_would_be_rounded_run_fused_in_fp32_only(device):
    shape = Shape(batch=1, tokens=20, kv_heads=1, group=1, d=16, e=16)
    for notation in ("linear(elu1)/sum", "linear(cosine)"):
        assert_as_right_as_plain(parse(notation), shape, torch.float32, device, "triton")
        assert_as_right_as_plain(parse(notation), shape, torch.float16, device, "torch")


def test_without_a_causal_mask(dtype, device, poisoned):
    shape = Shape(batch=1, tokens=45, kv_heads=1, group=2, d=16, e=8)
    assert_as_right_as_plain(parse("taylor(2)/sum"), shape, dtype, device, "triton", causal=False)


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("d", [16, 64, 128])
def test_head_sizes(d, dtype, device, poisoned):
    shape = Shape(batch=2, tokens=515, kv_heads=2, group=1, d=d, e=d)
    assert_as_right_as_plain(parse("taylor(4)/sum"), shape, dtype, device, "triton")


@pytest.mark.parametrize(
    "notation", ["power(2)*forget/sum", "taylor(2)*forget/sum", "taylor(4)/sum", "sigmoid(-6.93)"]
)
def test_tiles_of_bf16(notation, device, poisoned):
    """Three tiles: with a decay gate, pairs within a tile are computed in another way than pairs of two."""
    shape = Shape(batch=1, tokens=150, kv_heads=2, group=1, d=16, e=16)
    assert_as_right_as_plain(parse(notation), shape, torch.bfloat16, device, "triton", draws=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gates_that_forget_everything(dtype, device):
    """−∞ and numbers below the lowest, for gates in fp32 and in half precision."""
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(1, 90, 2, 16, device=device) for _ in range(4))
    gate = -torch.rand(1, 90, 2, device=device)
    gate[:, ::4], gate[:, 5] = float("-inf"), -500.0
    gate = gate.to(dtype)

    def outputs_and_gradients(kind):
        leaves = [u.to(kind, copy=True).requires_grad_() for u in (q, k, v)]
        given = gate.double().requires_grad_() if kind == torch.float64 else gate.clone().requires_grad_()
        y = maclaurin.attention(*leaves, "taylor(2)*forget/sum", log_forget=given, form="parallel")
        return [y.detach(), *torch.autograd.grad(y, [*leaves, given], dy.to(kind))]

    for found, gold in zip(*map(outputs_and_gradients, (torch.float32, torch.float64)), strict=True):
        assert float((found - gold).norm() / gold.norm()) < (2e-6 if found.dtype == torch.float32 else 1e-3)


def test_large_scores_of_a_scale_invariant_spec(device):
    shape = Shape(batch=1, tokens=40, kv_heads=1, group=1, d=16, e=16)
    assert_as_right_as_plain(parse("taylor(2)/l2"), shape, torch.float32, device, "triton", size=20.0)


def test_operator_is_registered_as_torch_wants_it(device):
    q, k, v = (torch.randn(1, 9, 2, 16, device=device, requires_grad=True) for _ in range(3))
    for narrow in (False, True):
        decay = (-torch.rand(1, 2, 9, device=device)).requires_grad_()
        call = (q, k, v, decay if narrow else None, None, [1.0, 0.25, 0.03], "sum", 0.0, True, False, narrow)
        assert set(torch.library.opcheck(polynomial_attention.traced, call).values()) == {"SUCCESS"}


def test_what_rounding_takes_from_a_row_is_not_forgotten(device):
    """y in bf16 and the rest are y, and gradients do not change."""
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(1, 33, 2, 16, device=device).bfloat16().float() for _ in range(4))
    found = []
    for narrow in (False, True):
        leaves = [u.clone().requires_grad_() for u in (q, k, v)]
        y, rest, _ = polynomial_attention(
            *leaves, None, None, [1.0, 0.25, 0.03], "sum", 0.0, True, False, narrow
        )
        gradients = torch.autograd.grad((y.float() * dy).sum(), leaves)
        found.append([(y.float() + (rest.float() if narrow else 0.0)).detach(), *gradients])
    assert y.dtype is torch.bfloat16
    for wide, narrow in zip(*found, strict=True):
        assert float((wide - narrow).norm() / wide.norm()) < 1e-4


@pytest.mark.gpu  # torch.compile and the interpreter do not go together
def test_compiles_whole(device):
    q, k, v = (torch.randn(1, 65, 2, 32, device=device, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        return maclaurin.attention(q, k, v, "taylor(2)/sum", form="parallel")

    compiled = torch.compile(run, fullgraph=True)
    y, direction = run(q, k, v), torch.randn(1, 65, 2, 32, device=device)
    torch.testing.assert_close(compiled(q, k, v), y)
    known = torch.autograd.grad(y, (q, k, v), direction)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v), direction)
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-4)
