"""A window beside a polynomial tail on the fused programs, judged against float64."""

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.forms.attend import Form, attend
from maclaurin.forms.stream import Inputs
from maclaurin.testing import Shape, random_tensors, relative_error
from tests.kernels.conftest import ON_GPU
from tests.kernels.judging import ROUNDED_ROWS, ROUNDING, SLACK, assert_as_right_as_plain

SPECS = [
    "taylor(2,about=mean)+window(16,sinks=1)/sum",
    "taylor(2)+window(16)/sum",
    "taylor(1,about=mean)+window(7,sinks=3)/sum",
    "taylor(2,about=mean)+window(16,sinks=1)/l2",
    "taylor(2)+window(9,sinks=2)/sum*out",
]


@pytest.mark.parametrize("notation", SPECS)
def test_every_kind_of_spec_with_grouped_heads_and_odd_sizes(notation, dtype, device, poisoned):
    shape = Shape(batch=1, tokens=300 if ON_GPU else 70, kv_heads=1, group=2, d=24, e=20)
    assert_as_right_as_plain(
        parse(notation), shape, dtype, device, "triton", form="chunked", chunk_size=64, size=0.7
    )


@pytest.mark.parametrize("tokens", [1, 8, 9, 10, 11])
def test_texts_as_long_as_the_window(tokens, dtype, device, poisoned):
    shape = Shape(batch=2, tokens=tokens, kv_heads=1, group=1, d=24, e=16)
    spec = parse("taylor(2,about=mean)+window(8,sinks=1)/sum")
    assert_as_right_as_plain(spec, shape, dtype, device, "triton", form="chunked")


def test_a_tail_whose_sum_may_vanish_stays_with_the_plain_form(device):
    shape = Shape(batch=1, tokens=40, kv_heads=1, group=1, d=24, e=16)
    case = random_tensors(parse("taylor(1)+window(8)/l2"), shape, 0, torch.float32, device=device)
    assert bool(case.output(form="chunked").isfinite().all())


STATES = [
    "taylor(2,about=mean)+window(16,sinks=1)/sum",
    "taylor(2)+window(9)/sum",
    "taylor(1,about=mean)+window(5,sinks=3)/sum",
    "taylor(2,about=mean)/sum",
]


@pytest.mark.parametrize("notation", STATES)
def test_a_text_that_goes_on_from_a_state(notation, dtype, device, poisoned):
    """In pieces of 40, 1, 7 and the rest: as right as the plain form."""
    spec, sizes = parse(notation), (40, 1, 7, 200 if ON_GPU else 30)
    shape = Shape(batch=2, tokens=sum(sizes), kv_heads=2, group=2, d=24, e=20)
    case = random_tensors(spec, shape, 0, dtype, device=device)
    case.tensors["k"] += 1.5  # keys with a mean of their own
    expected = case.map(torch.Tensor.double).output(form="parallel")
    found, after = read_in_pieces(case, spec, sizes, ["triton", None, "triton", "triton"])
    plain, plain_after = read_in_pieces(case, spec, sizes, None)
    allowed = max(SLACK * ROUNDED_ROWS * relative_error(plain, expected, 1e-3), ROUNDING[dtype])
    assert relative_error(found, expected, 1e-3) <= allowed
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for name, tensor in plain_after.tensors().items():
        assert relative_error(after.tensors()[name], tensor, 1e-3) < tolerance, name


@torch.no_grad()
def read_in_pieces(case, spec, sizes, backends):
    """Rows, and the state after the last; by plain torch where no backends are expected."""
    state, parts, start = None, [], 0
    for n, size in enumerate(sizes):
        piece = case.tokens(start, start + size).tensors
        start += size
        if backends is None:
            scale = spec.kernel.default_scale(piece["q"].shape[3])
            how = {"scale": scale, "causal": True, "chunk": 16, "state": state, "return_state": True}
            y, state = attend(spec, Inputs(piece["q"], piece["k"], piece["v"]), Form.CHUNKED, **how)
            parts.append(y.to(piece["q"].dtype))
            continue
        call = {"spec": spec, "state": state, "return_state": True}
        if backends[n] is not None:
            call["form"] = "chunked"
            assert maclaurin.plan(**piece, **call).backend == backends[n]
        y, state = maclaurin.attention(**piece, **call)
        parts.append(y)
    return torch.cat(parts, 1), state


def test_gradients_through_a_state(device):
    spec = parse("taylor(2,about=mean)+window(6,sinks=1)/sum")
    case = random_tensors(spec, Shape(batch=1, tokens=50, kv_heads=1, d=16, e=16), 0, device=device)
    gradients = []
    for tensors, form in (
        (case.map(torch.Tensor.float), "chunked"),
        (case.map(torch.Tensor.double), "parallel"),
    ):
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.tensors.items()}
        if form == "parallel":
            y = maclaurin.attention(**leaves, spec=spec, form=form)
        else:
            first, second = ({n: t[:, a:b] for n, t in leaves.items()} for a, b in ((0, 30), (30, 50)))
            y, state = maclaurin.attention(**first, spec=spec, return_state=True, form=form)
            later, _ = maclaurin.attention(**second, spec=spec, state=state, return_state=True, form=form)
            y = torch.cat([y, later], dim=1)
        weights = torch.linspace(-1, 1, y.numel(), device=device, dtype=y.dtype).view_as(y)
        (y * weights).sum().backward()
        gradients.append({name: t.grad for name, t in leaves.items()})
    for name, found in gradients[0].items():
        assert relative_error(found, gradients[1][name], 1e-3) < 1e-4, name


def test_a_state_whose_tail_has_not_begun_goes_on_plainly(device):
    spec = parse("taylor(2,about=mean)+window(16,sinks=1)/sum")
    case = random_tensors(
        spec, Shape(batch=1, tokens=60, kv_heads=1, d=16, e=16), 0, torch.float32, device=device
    )
    expected = case.map(torch.Tensor.double).output(form="parallel")
    found, _ = read_in_pieces(case, spec, (10, 20, 30), ["torch", "torch", "triton"])
    assert relative_error(found, expected, 1e-3) < 1e-5


def test_a_scale_of_zero_has_finite_gradients(device):
    """Chunks divide by the scale: q and k had NaN."""
    case = random_tensors(
        parse("taylor(2,about=mean)+window(4)/sum"),
        Shape(1, 140, 1, 1, 4, 4),
        0,
        torch.float32,
        device=device,
    ).with_gradients()
    leaves = [case.tensors[name] for name in "qkv"]
    options = {"form": "chunked", "chunk_size": 64}
    y, wanted = case.output(scale=0.0, **options), case.output(scale=0.0, form="blocked")
    assert maclaurin.plan(*leaves, case.spec, **options).program.name == "tail in chunks"
    for own, plain in zip(*(torch.autograd.grad(u.square().sum(), leaves) for u in (y, wanted)), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-5)
