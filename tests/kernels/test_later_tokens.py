"""Later tokens of any finite size do not reach earlier rows through a fused program."""

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.testing import Shape, assert_same, random_tensors
from tests.kernels.conftest import ON_GPU

CASES = [
    ("taylor(2)/sum", "parallel"),
    ("taylor(2)/sum", "chunked"),
    ("taylor(2,about=mean)/sum", "chunked"),
    ("taylor(2,about=mean)+window(4,sinks=1)/sum", "chunked"),
    ("power(2)*forget/sum", "chunked"),
    ("linear(identity)", "chunked"),
    ("exp(clamp=5)/len", "parallel"),
    ("exp*forget/sum", "parallel"),
    ("sigmoid(-1)", "parallel"),
    ("exp/l2", "parallel"),
    ("exp/len", "parallel"),
]


GATED = [
    ("linear(relu)*in/len", "chunked"),
    ("linear(relu)*in/len", "parallel"),
    ("taylor(2)*in/sum", "chunked"),
    ("taylor(2)*in/sum", "parallel"),
    ("exp*in/sum", "parallel"),
    ("exp*in*forget/sum", "parallel"),
]


@pytest.mark.parametrize(("notation", "form"), GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_values_beyond_the_range_reach_no_earlier_row(notation, form, dtype, device):
    """Value and gate are finite, their product is not."""
    spec, cut = parse(notation), 70
    shape = Shape(batch=1, tokens=96, kv_heads=1, group=1, d=16, e=16)
    case = random_tensors(spec, shape, 0, dtype, device=device).with_gradients()
    large = 1e4 if dtype is torch.float16 else 1e22
    changed = {
        n: torch.cat([case.tensors[n][:, :cut], large * case.tensors[n][:, cut:]], 1)
        for n in ("v", "input_gate")
    }
    options = {"form": form, "chunk_size": 64}
    found = case.with_tensors(**changed).output(**options)[:, :cut]
    expected = case.output(**options)[:, :cut]
    assert_same(found, expected, notation, 1e-6)
    gradients = case.gradients(expected.float().square().sum())
    for name, gradient in case.gradients(found.float().square().sum()).items():
        assert_same(gradient[:, :cut], gradients[name][:, :cut], name, 1e-6)


@pytest.mark.parametrize(("notation", "form"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
@pytest.mark.parametrize("factor", [2e3, 1e18])
def test_earlier_rows_stay_as_they_are(notation, form, dtype, factor, device):
    spec, cut = parse(notation), 70
    case = random_tensors(
        spec, Shape(batch=1, tokens=96, kv_heads=1, group=1, d=16, e=16), 0, dtype, device=device
    )
    large = case.with_tensors(
        **{n: torch.cat([case.tensors[n][:, :cut], case.tensors[n][:, cut:] * factor], 1) for n in "qkv"}
    )
    options = {"form": form, "chunk_size": 64}
    if "exp/" not in notation:
        q, k, v = (case.tensors[n] for n in "qkv")
        assert maclaurin.plan(q, k, v, spec, **options).backend == "triton"
    assert_same(large.output(**options)[:, :cut], case.output(**options)[:, :cut], notation, 1e-6)
