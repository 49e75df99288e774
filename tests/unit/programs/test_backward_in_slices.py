"""The backward pass of exp under a gain, over some sequences at a time: the same gradients, in float64."""

import weakref

import pytest
import torch

from maclaurin import parse
from maclaurin.programs import stock_softmax
from maclaurin.programs.plan import forget_plans
from maclaurin.testing import Shape, assert_same, random_tensors


def gradients(case):
    leaves = case.with_gradients()
    y = leaves.output(form="parallel")
    direction = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    return leaves.gradients((y * direction).sum())


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "notation",
    ["exp/len", "exp", "exp/len*out", "exp*in/len*out", "exp/sum(eps=1)", "exp/running", "exp/running*out"],
)
def test_slices_change_no_gradient(notation, batch, monkeypatch):
    case = random_tensors(parse(notation), Shape(batch=batch, tokens=11, kv_heads=2, group=2, d=4, e=6), 0)
    whole = gradients(case)
    monkeypatch.setattr(stock_softmax, "SLICED_BYTES", 0)
    monkeypatch.setattr(stock_softmax, "SLICED_TOKENS", 0)
    for name, gradient in gradients(case).items():
        assert_same(gradient, whole[name], f"{notation}: {name}")


def test_what_a_slice_takes_is_free_before_the_next(monkeypatch):
    """No two slices of do and o are held at once."""
    monkeypatch.setattr(stock_softmax, "SLICED_BYTES", 0)
    monkeypatch.setattr(stock_softmax, "SLICED_TOKENS", 0)
    alive, most = set(), []

    class Watched(stock_softmax._Cpu):
        def backward(self, do, *others):
            alive.add(id(do))
            weakref.finalize(do, alive.discard, id(do))
            most.append(len(alive))
            return super().backward(do, *others)

    monkeypatch.setattr(stock_softmax, "torch_softmax", lambda *_: Watched())
    forget_plans()
    try:
        gradients(random_tensors(parse("exp/len*out"), Shape(batch=8, tokens=11), 0))
    finally:
        forget_plans()
    assert most == [1] * 4
