"""Polynomials over all pairs on a CPU, block by block, against the plain parallel form."""

import pytest
import torch
from torch.autograd import forward_ad

import maclaurin
from maclaurin.forms.attend import Form, attend
from maclaurin.forms.stream import Inputs
from maclaurin.programs import pairs_in_cache
from maclaurin.programs.pairs_in_cache import PairsInCache
from maclaurin.programs.program import Call
from maclaurin.testing import Shape, assert_same, random_tensors
from maclaurin.testing.tolerances import assert_same_gradients

SPECS = [
    "linear(elu1)/sum", "linear(cosine)*in", "taylor(1,about=mean)/sum", "taylor(2)/sum", "taylor(3)/l2",
    "taylor(2,about=mean)/l2*out", "power(2)",
]  # fmt: skip


def case_of(notation, dtype=torch.float64, group=2, tokens=13):
    shape = Shape(batch=2, tokens=tokens, kv_heads=2, group=group, d=4, e=5)
    return random_tensors(maclaurin.resolve(notation), shape, 0, dtype).with_gradients()


def inputs_of(case):
    q, k, v = (case.tensors[name] for name in "qkv")
    return Inputs(q, k, v, {a.name: case.tensors[a.name] for a in case.spec.arguments})


def plain(case, causal=True):
    scale = case.spec.kernel.default_scale(4)
    options = {"causal": causal, "chunk": 1, "state": None, "return_state": False}
    return attend(case.spec, inputs_of(case), Form.PARALLEL, scale=scale, **options)[0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [1, 1 << 10, 1 << 17])
@pytest.mark.parametrize("notation", SPECS)
def test_values_and_gradients_are_those_of_the_plain_form(notation, block, causal, monkeypatch):
    monkeypatch.setattr(pairs_in_cache, "_BLOCK", block)
    case = case_of(notation)
    scale = case.spec.kernel.default_scale(4)
    call = Call(case.spec, inputs_of(case), scale, torch.device("cpu"), causal)
    y, expected = PairsInCache().run(call)[0], plain(case, causal)
    assert_same(y, expected, notation)
    weights = torch.randn_like(y)
    found, wanted = case.gradients((y * weights).sum()), case.gradients((expected * weights).sum())
    assert_same_gradients(found, wanted, notation)


def test_the_last_queries_of_a_text():
    case = case_of("taylor(2,about=mean)/sum")
    q, k, v = inputs_of(case)[:3]
    assert maclaurin.plan(q[:, -4:], k, v, case.spec).program.name == "pairs in cache"
    assert_same(maclaurin.attention(q[:, -4:], k, v, case.spec), case.output()[:, -4:], "last queries")


@pytest.mark.parametrize("notation", ["linear(elu1)/sum", "taylor(2,about=mean)/sum"])
def test_it_can_be_differentiated_twice_and_forward(notation):
    q, k, v = inputs_of(case_of(notation, tokens=5))[:3]
    spec = maclaurin.resolve(notation)

    def attention(q, k, v):
        return maclaurin.attention(q, k, v, spec, layout="bthd")

    assert torch.autograd.gradgradcheck(attention, (q, k, v))
    with forward_ad.dual_level():
        y = attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        slope = forward_ad.unpack_dual(y).tangent
    _, expected = torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))
    assert_same(slope, expected, "forward derivative")


def test_products_stay_in_fp32_when_the_backward_pass_is_under_autocast():
    case = case_of("taylor(2)/sum", torch.float32)
    expected = case.gradients(case.output().sum())
    with torch.autocast("cpu", torch.bfloat16):
        found = case.gradients(case.output().sum())
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name])


def test_a_long_text_a_window_a_decay_and_padding_are_refused():
    spec, like = maclaurin.resolve("taylor(4)/sum"), torch.empty(1, 2048, 1, 4, device="meta")
    refusals = maclaurin.plan(like, like, like, spec, device="cpu").refusals
    assert any("scores do not fit into a cache" in why for why in refusals.values())
    short = torch.empty(1, 16, 1, 4, device="meta")
    for notation, word in (
        ("power(2)*forget", "decay"),
        ("taylor(2)+window(4)/sum", "window"),
        ("exp/sum", "poly"),
    ):
        found = maclaurin.plan(short, short, short, notation, device="cpu")
        (why,) = (why for program, why in found.refusals.items() if program.name == "pairs in cache")
        assert word in why
