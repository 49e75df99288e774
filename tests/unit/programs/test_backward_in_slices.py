"""The backward pass of exp under a gain, over some sequences at a time: the same gradients, in float64."""

import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from maclaurin import parse
from maclaurin.programs import stock_softmax
from maclaurin.programs.plan_cache import forget_plans
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
    assert most == [1] * 2


class Allocator(TorchDispatchMode):
    """Bytes of all tensors alive that were made inside the block, and the most there were at a time."""

    def __init__(self):
        super().__init__()
        self.held, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        given = {u.untyped_storage().data_ptr() for u in tree_leaves(args) if isinstance(u, torch.Tensor)}
        for u in tree_leaves(made):
            if isinstance(u, torch.Tensor) and u.untyped_storage().data_ptr() not in given:
                storage = u.untyped_storage()
                self.held[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.alive())
        return made

    def alive(self):
        self.held = {at: (ref, size) for at, (ref, size) in self.held.items() if not ref.expired()}
        return sum(size for _, size in self.held.values())


class LikeCudnn(stock_softmax._Cpu):
    """torch's backward for CPUs, with the memory that cuDNN's takes for its sums: twice that of q in bf16."""

    def backward(self, do, q, *others):
        sums = torch.empty(2 * q.numel(), dtype=q.dtype)
        found = super().backward(do, q, *others)
        del sums
        return found


#: of cuDNN's own backward, which makes nothing but its sums and the gradients
LIMIT = 1.2 * 2


@pytest.mark.parametrize("batch", [8, 6, 2])
@pytest.mark.parametrize("notation", ["exp/len", "exp/len*out", "exp/running*out", "exp/sum(eps=1)"])
def test_memory_beyond_inputs_and_gradients(notation, batch, monkeypatch):
    """In units of the rows of all sequences, rows kept since the forward pass included."""
    monkeypatch.setattr(stock_softmax, "torch_softmax", lambda *_: LikeCudnn())
    for name in ("is_tracing", "are_traced"):  # the allocator is no tracer
        monkeypatch.setattr(stock_softmax, name, lambda *_: False)
    case = random_tensors(parse(notation), Shape(batch=batch, tokens=32, kv_heads=2, group=1, d=64, e=64), 0)
    leaves = case.with_gradients()
    unit = leaves.tensors["q"].numel() * leaves.tensors["q"].element_size()
    direction = torch.ones_like(leaves.tensors["v"])

    def most():
        forget_plans()
        with Allocator() as allocator:
            y = leaves.output(form="parallel")
            made = [y, *torch.autograd.grad(y, list(leaves.tensors.values()), direction)]
        return (allocator.most - sum(u.numel() * u.element_size() for u in made)) / unit

    whole = most()
    monkeypatch.setattr(stock_softmax, "SLICED_BYTES", 0)
    monkeypatch.setattr(stock_softmax, "SLICED_TOKENS", 0)
    sliced = most()
    forget_plans()
    assert sliced < whole
    if batch > 2 or "sum" not in notation:  # rows that are kept need a third slice
        assert sliced < LIMIT < whole


@pytest.mark.parametrize(("batch", "sizes"), [(8, [4, 4]), (5, [3, 2]), (3, [2, 1]), (2, [1, 1])])
def test_slices_are_as_equal_as_possible(batch, sizes):
    found = stock_softmax._slices(batch, 2)
    assert [part.stop - part.start for part in found] == sizes
    assert [part.start for part in found] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert len(stock_softmax._slices(batch, 3)) == min(batch, 3)
