"""Denominators of exp as a gain on a stock softmax, judged against float64."""

import pytest
import torch

from maclaurin import attention, parse
from maclaurin.programs import stock_softmax
from maclaurin.programs.fused_rows import (
    fused_scaled_rows,
    fused_scaled_rows_backward,
    normed_rows,
    normed_rows_backward,
    row_norm,
)
from maclaurin.testing import Shape
from tests.kernels.conftest import ON_GPU
from tests.kernels.judging import assert_as_right_as_plain

SPECS = [
    "exp/len",
    "exp",
    "exp/len*out",
    "exp*in/len",
    "exp/sum(floor=5)",
    "exp/sum(eps=1)",
    "exp/sum(floor=9,eps=1,detach)",
    "exp/running(floor=1,len)",
    "exp/running",
    "exp/l2",
    "exp/layer",
    "exp/rms",
    "exp/len/l2*out",
    "exp/l2(scale=dim)*out",
]


@pytest.fixture(params=["float32", *(["float16", "bfloat16"] if ON_GPU else [])])
def stock_dtype(request):
    return getattr(torch, request.param)


@pytest.mark.parametrize("notation", SPECS)
def test_every_denominator(notation, stock_dtype, device, poisoned):
    shape = Shape(batch=2, tokens=130 if ON_GPU else 37, kv_heads=2, group=2, d=24, e=40)
    assert_as_right_as_plain(parse(notation), shape, stock_dtype, device, "sdpa")


@pytest.mark.parametrize("notation", ["exp/l2", "exp/layer", "exp/rms", "exp/l2(scale=dim)", "exp*in/l2"])
@pytest.mark.parametrize("tokens", [5, 33, 1000] if ON_GPU else [5, 33])
def test_norms_that_keep_only_their_answer(notation, tokens, stock_dtype, device, poisoned):
    shape = Shape(batch=2, tokens=tokens, kv_heads=3, group=1, d=16, e=16)
    assert_as_right_as_plain(parse(notation), shape, stock_dtype, device, "sdpa")


@pytest.fixture
def in_slices(monkeypatch):
    """Rows of any size are large; says of how many sequences each slice was."""
    monkeypatch.setattr(stock_softmax, "SLICED_BYTES", 0)
    monkeypatch.setattr(stock_softmax, "SLICED_TOKENS", 0)
    sizes, of_part = [], stock_softmax._Backward.of_part
    seen = lambda self, q, *others: sizes.append(q.shape[0]) or of_part(self, q, *others)  # noqa: E731
    monkeypatch.setattr(stock_softmax._Backward, "of_part", seen)
    return sizes


@pytest.mark.parametrize("notation", SPECS)
@pytest.mark.parametrize("by_head", [False, True])
def test_backward_in_slices_of_the_batch(notation, by_head, in_slices, stock_dtype, device, poisoned):
    shape = Shape(batch=9, tokens=33 if ON_GPU else 9, kv_heads=2, group=1, d=16, e=16)
    layout = (0, 2, 1, 3) if by_head else None
    assert_as_right_as_plain(parse(notation), shape, stock_dtype, device, "sdpa", layout=layout)
    own = not notation.endswith(("l2*out", "l2(scale=dim)*out"))  # there torch's softmax has its own gradient
    assert set(in_slices) in (({4, 5}, {3}) if own else (set(),)), "two slices, or three beside kept rows"


def test_small_rows_go_back_in_one_piece(device):
    q = torch.randn(4, 16, 2, 16, device=device)
    assert not stock_softmax._is_large(q)
    assert not stock_softmax._is_large(torch.empty(32, 1024, 16, 64, dtype=torch.bfloat16, device="meta"))
    assert stock_softmax._is_large(torch.empty(8, 4096, 16, 64, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000] if ON_GPU else [1, 2, 33])
def test_every_length(length, stock_dtype, device, poisoned):
    shape = Shape(batch=1, tokens=length, kv_heads=2, group=1, d=64, e=64)
    assert_as_right_as_plain(parse("exp/len"), shape, stock_dtype, device, "sdpa")


@pytest.mark.parametrize("by_head", [False, True])
def test_one_after_the_other_in_either_layout(by_head, stock_dtype, device, poisoned):
    """cuDNN keeps what it built for a layout of q, k and v, and expects that of its output to follow."""
    shape = Shape(batch=2, tokens=64, kv_heads=2, group=1, d=32, e=32)
    for notation in ("exp/len", "exp/l2", "exp/sum(eps=1)", "exp/len*out", "exp/len"):
        assert_as_right_as_plain(
            parse(notation), shape, stock_dtype, device, "sdpa", layout=(0, 2, 1, 3) if by_head else None
        )


def test_without_a_causal_mask(stock_dtype, device, poisoned):
    shape = Shape(batch=1, tokens=45, kv_heads=1, group=2, d=16, e=8)
    assert_as_right_as_plain(parse("exp/len"), shape, stock_dtype, device, "sdpa", causal=False)


@pytest.mark.gpu  # CPUs have one program for all sizes
def test_a_gate_of_zero_has_its_gradient(stock_dtype, device, poisoned):
    """Only the answer is kept for the backward pass, and there a gate of zero leaves nothing to see."""
    q, k, v = (torch.randn(2, 12, 2, 16, dtype=stock_dtype, device=device).requires_grad_() for _ in range(3))
    gate = torch.rand(2, 12, 2, dtype=stock_dtype, device=device)
    gate[0, 3], gate[1, 5:9, 1] = 0.0, 0.0
    found = []
    for wide in (False, True):
        given = [(u.double() if wide else u).detach().requires_grad_() for u in (q, k, v, gate)]
        y = attention(*given[:3], "exp/len*out", output_gate=given[3])
        found.append([y, *torch.autograd.grad(y.square().sum() + y.sum(), given)])
    for own, right in zip(*found, strict=True):
        assert float((own.double() - right).norm() / right.norm()) < (
            1e-5 if stock_dtype == torch.float32 else 1e-2
        )


@pytest.mark.parametrize("d", [8, 64, 128, 256])
def test_head_sizes(d, stock_dtype, device, poisoned):
    shape = Shape(batch=1, tokens=200, kv_heads=2, group=1, d=d, e=d)
    assert_as_right_as_plain(parse("exp/len"), shape, stock_dtype, device, "sdpa")


def test_operators_that_keep_only_the_answer_are_registered_as_torch_wants_it(device):
    y = torch.randn(1, 9, 2, 16, device=device)
    assert set(torch.library.opcheck(normed_rows.traced, (y, 4.0, True)).values()) == {"SUCCESS"}
    call = (y, *normed_rows(y, 4.0, True), True, (288, 16, 144, 1))
    assert set(torch.library.opcheck(normed_rows_backward.traced, call).values()) == {"SUCCESS"}


def test_gain_operators_are_registered_as_torch_wants_it(device):
    o, log_gain = torch.randn(1, 2, 9, 16, device=device), torch.randn(1, 2, 9, device=device)
    log_divisor, gate = torch.rand(1, 1, 9, device=device), torch.rand(1, 9, 2, device=device)
    for given in ((None, None), (log_divisor, gate)):
        call = (o, log_gain, *given)
        assert set(torch.library.opcheck(fused_scaled_rows.traced, call).values()) == {"SUCCESS"}
    kinds = (
        (None, False, False),
        (None, True, False),
        (None, True, True),
        (torch.rand_like(log_gain), False, False),
    )
    for kind in kinds:
        call = (torch.randn_like(o), o, log_gain, log_divisor, gate, *kind)
        assert set(torch.library.opcheck(fused_scaled_rows_backward.traced, call).values()) == {"SUCCESS"}


def test_norm_operator_is_registered_as_torch_wants_it(device):
    y = torch.randn(1, 9, 2, 16, device=device, requires_grad=True)
    gate = torch.rand(1, 9, 2, device=device, requires_grad=True)
    assert set(torch.library.opcheck(row_norm.traced, (y, gate, 4.0, True)).values()) == {"SUCCESS"}
    assert set(torch.library.opcheck(row_norm.traced, (y, None, 1.0, False)).values()) == {"SUCCESS"}
