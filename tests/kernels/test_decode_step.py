"""Tokens one after the other through the fused step, against the parallel form in float64."""

from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import maclaurin
from maclaurin import parse
from maclaurin.programs.decode_step import WindowStep, state_step, step_layout
from maclaurin.programs.plan_cache import forget_plans
from maclaurin.programs.triton import decode_step as program
from maclaurin.testing import Shape, random_tensors, relative_error
from tests.kernels.conftest import ON_GPU

SPECS = [
    "taylor(2)/sum",
    "power(2)*forget/sum(eps=0.001)",
    "taylor(2,about=mean)/sum",
    "hermite(2)/len",
    "linear(identity)",
    "taylor(2)*forget/sum/layer*out",
    "taylor(2,about=mean)+window(5,sinks=1)/sum",
    "taylor(2)+window(4)*forget/sum",
    "taylor(1,about=mean)+window(1)/sum",
    "taylor(2)+window(3,sinks=2)/sum(eps=0.5)",
    "poly(0)+window(4,sinks=2)/sum",
    "taylor(2)/len",
    # the interpreter leaves these to `make test-all`
    "taylor(3)/l2",
    "power(2)",
    "taylor(2)*forget/len",
    "taylor(2,about=mean)/sum*out",
    "taylor(0,about=mean)+window(40,sinks=1)/sum",
    "hermite(2)+window(3,sinks=1)/sum",
]


@pytest.mark.parametrize("notation", SPECS)
@pytest.mark.parametrize("e", [9, 32])
def test_token_by_token(notation, e, device, poisoned):
    shape = Shape(batch=2, tokens=70 if ON_GPU else 10, kv_heads=2, group=2, d=64 if ON_GPU else 7, e=e)
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
    assert state.count.tolist() == [shape.tokens] * 2
    if state.log_decay is not None:
        torch.testing.assert_close(state.log_decay, case.tensors["log_forget"].sum(1))


@pytest.mark.parametrize("block", [4, 8])  # of 1, 7 and 28 features per order, 36 in all
@pytest.mark.parametrize("added", [64, 4096])
@pytest.mark.parametrize(
    "notation",
    ["taylor(2)*forget/sum", "taylor(2)/len", "taylor(2,about=mean)/sum", "taylor(2)+window(2,sinks=1)/sum"],
)
def test_how_the_state_is_split_does_not_matter(notation, block, added, device, poisoned, settings):
    settings(program, BLOCK=block, ADDED=added)
    shape = Shape(batch=2, tokens=5, kv_heads=2, group=3, d=7, e=11)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    expected = case.map(torch.Tensor.double).output(form="parallel")
    with torch.no_grad():
        state = case.tokens(0, 3).state()
        _, state = case.tokens(3, 4)(state=state, return_state=True)
        y, after = case.tokens(4, 5)(state=state, return_state=True)
    assert relative_error(y, expected[:, -1:], 1e-3) < 2e-5
    plain = case.map(torch.Tensor.double).state()
    torch.testing.assert_close(after.moments, plain.moments.float(), rtol=1e-5, atol=1e-5)


def test_blocks_cover_every_feature_once():
    for sizes in ((1, 64, 2080), (2145,), (1,), (1, 7, 28), (33, 32, 31)):
        found = program.split(sizes, 64)
        assert [b - a for a, b in pairwise(found.features)] == list(sizes)
        assert [b - a for a, b in pairwise(found.blocks)] == [-(-size // 32) for size in sizes]


@pytest.mark.parametrize(
    "notation",
    ["taylor(2)/sum", "taylor(2)/len", "taylor(2)*forget/sum", "taylor(2,about=mean)+window(3,sinks=1)/sum"],
)
def test_half_precision_is_read_as_it_is(notation, device):
    """One token after others: what is rounded is the answer."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    case = random_tensors(
        parse(notation), Shape(tokens=9, kv_heads=2, group=2, d=16, e=24), 0, dtype, device=device
    )
    with torch.no_grad():
        before = case.tokens(0, 8).state()
        last = case.tokens(8, 9).tensors
        y, _ = maclaurin.attention(**last, spec=notation, state=before, return_state=True)
    expected = case.map(torch.Tensor.double).output(form="parallel")[:, -1:]
    assert y.dtype == dtype
    assert relative_error(y, expected, 1e-3) < (1e-2 if ON_GPU else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_window_in_two_launches_is_the_plain_one(dtype, device, poisoned, monkeypatch):
    """The same state after it, to the last key kept, for sequences of different lengths."""
    spec = parse("taylor(2,about=mean)+window(4,sinks=2)/sum")
    case = random_tensors(
        spec, Shape(batch=1, tokens=20, kv_heads=2, group=2, d=8, e=12), 0, dtype, device=device
    )
    cuts = torch.tensor([0, 1, 2, 5, 20], device=device)
    q, k, v = (case.tensors[name] for name in "qkv")
    with torch.no_grad():
        _, state = maclaurin.attention(q, k, v, spec, cu_seqlens=cuts, return_state=True)
        token = [3 * u[:, :4].transpose(0, 1) for u in (q, k, v)]
        answers = []
        for fused in (True, False):
            if not fused:
                monkeypatch.setattr(WindowStep, "cannot", lambda *_: "switched off")
                forget_plans()
            else:
                assert maclaurin.plan(*token, spec, state=state).program.name == "window step"
            answers.append(maclaurin.attention(*token, spec, state=state, return_state=True))
    forget_plans()
    (y, after), (expected, plain) = answers
    near = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(y, expected, rtol=near, atol=near)
    for name, tensor in plain.tensors().items():
        assert after.tensors()[name].dtype == tensor.dtype, name
        torch.testing.assert_close(after.tensors()[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def test_states_of_every_other_sequence(device):
    """A slice of a state has strides of its own."""
    case = random_tensors(
        parse("taylor(2)/len"), Shape(batch=1, tokens=18, kv_heads=2, d=8, e=8), 0, device=device
    )
    cuts = torch.tensor([0, 1, 4, 9, 18], device=device)
    q, k, v = (case.tensors[name].float() for name in "qkv")
    with torch.no_grad():
        _, state = maclaurin.attention(q, k, v, "taylor(2)/len", cu_seqlens=cuts, return_state=True)
        token = [u[:, :2].transpose(0, 1) for u in (q, k, v)]
        y, after = maclaurin.attention(*token, "taylor(2)/len", state=state[::2], return_state=True)
        alone, _ = maclaurin.attention(
            *(u[1:] for u in token), "taylor(2)/len", state=state[2:3], return_state=True
        )
    assert after.count.tolist() == [2, 6]
    torch.testing.assert_close(y[1:], alone)


def test_a_step_that_is_only_recorded(device):
    """Under a mode that makes no numbers nothing is launched, and nothing of it is kept."""
    q, k, v = (torch.randn(1, 3, 2, 8, device=device) for _ in range(3))
    with torch.no_grad():
        _, state = maclaurin.attention(q, k, v, "taylor(2)/sum", return_state=True)
        mode = FakeTensorMode()
        fake, before = [mode.from_tensor(u[:, :1]) for u in (q, k, v)], state.map(mode.from_tensor)
        with mode:
            y, _ = maclaurin.attention(*fake, "taylor(2)/sum", state=before, return_state=True)
        assert y.shape == (1, 1, 2, 8)
        y, _ = maclaurin.attention(
            q[:, :1], k[:, :1], v[:, :1], "taylor(2)/sum", state=state, return_state=True
        )
        assert y.isfinite().all()


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
