"""linear(φ) through its own program: outputs, states and every gradient against the plain form in float64."""

from dataclasses import dataclass

import pytest
import torch

from maclaurin import parse
from maclaurin.forms.attend import Form, attend
from maclaurin.programs.linear_attention import LinearAttention, first_order
from maclaurin.programs.program import Call
from maclaurin.programs.triton import INSTALLED
from maclaurin.spec import FeatureMap, Sign, part
from maclaurin.testing import Shape, assert_same, random_tensors
from tests.kernels.conftest import ON_GPU
from tests.kernels.judging import ROUNDED_ROWS, ROUNDING, SLACK, inputs_of, outputs_and_gradients, plain

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

from maclaurin.programs.triton import linear_attention as program
from tests.kernels import interpreted_bfloat16

if not ON_GPU:
    interpreted_bfloat16.correct()

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def fused(case, *, causal=True, chunk=16, state=None, return_state=False):
    """y through the program, and the state after it."""
    inputs, program = inputs_of(case), LinearAttention()
    scale = case.spec.kernel.default_scale(inputs.q.shape[3])
    options = {"chunk_size": chunk, "state": state, "return_state": return_state}
    call = Call(case.spec, inputs, scale, inputs.q.device, causal, **options)
    assert program.refuses(call) is None, program.refuses(call)
    return program.run(call)


def assert_right(notation, shape, dtype, device, *, causal=True, chunk=16):
    case = random_tensors(parse(notation), shape, 0, dtype, device=device)
    direction = torch.randn(*case.tensors["q"].shape[:3], shape.e, dtype=torch.float64, device=device)
    gold = outputs_and_gradients(case.map(torch.Tensor.double), lambda c: plain(c, causal=causal), direction)
    found = outputs_and_gradients(case, lambda c: fused(c, causal=causal, chunk=chunk)[0], direction)
    largest = max(float(g.norm()) for name, g in gold.items() if name != "output")
    errors = {
        name: float((found[name].double() - reference).norm())
        / max(float(reference.norm()), 1e-3 if name == "output" else largest / 10)
        for name, reference in gold.items()
    }
    # features are rounded to the dtype of products, which the plain form does not do; where features are
    # positive and rows are divided by their sum, the mean of values cancels in q's gradient, not its rounding
    reasons = 1 + notation.startswith("linear(elu1)/sum")
    assert max(errors.values()) < SLACK * ROUNDED_ROWS**reasons * ROUNDING[dtype], errors


@dataclass(frozen=True, slots=True)
class BothHalves(FeatureMap):
    """φ(u) = (relu(u), relu(−u)), twice as long as u."""

    notation = "both_halves"
    sign = Sign.NONNEGATIVE

    def __call__(self, u):
        return torch.cat([u.relu(), (-u).relu()], -1)

    def size(self, d):
        return 2 * d

    def text(self, u):
        return f"(relu({u}), relu(−{u}))"


SPECS = [
    "linear(identity)",
    "linear(elu1)/sum",
    "linear(relu)*in/len",
    "linear(cosine)/l2",
    "linear(elu1)/layer",
    "linear(identity)*forget",
    "linear(elu1)*in*forget/sum(eps=0.01)",
    "linear(cosine)*forget/len*out",
    "linear(relu)*forget/rms*out",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("notation", SPECS)
def test_every_kind_of_spec_with_grouped_heads_and_odd_sizes(notation, dtype, device, poisoned):
    tokens, d, e = (300, 24, 40) if ON_GPU else (70, 24, 40) if dtype is torch.bfloat16 else (37, 12, 20)
    shape = Shape(batch=1, tokens=tokens, kv_heads=2, group=2, d=d, e=e)
    assert_right(notation, shape, dtype, device)


@pytest.mark.parametrize(
    "notation",
    ["linear(identity,scale=-0.5)/l2", "linear(elu1,scale=-1)/layer", "linear(relu,scale=-2)/len*out"],
)
def test_a_negative_scale_turns_rows_around_under_a_norm_too(notation, device, poisoned):
    """The program's norm left the scale out altogether."""
    assert_right(notation, Shape(batch=1, tokens=20, d=8, e=12), torch.float32, device)


def test_a_row_sum_cancels_the_sign_of_the_scale(device, poisoned):
    case = random_tensors(parse("linear(elu1)/sum/l2"), Shape(tokens=20), 0, torch.float32, device=device)
    assert_same(case.output(scale=-0.5), case.output(scale=-0.5, form="parallel"), "scale below 0")


def test_a_scale_of_zero_gives_rows_of_zeros_under_a_norm(device, poisoned):
    case = random_tensors(parse("linear(identity)/l2"), Shape(tokens=20), 0, torch.float32, device=device)
    assert not case.output(scale=0.0).any()


@pytest.mark.parametrize(
    "notation", ["linear(relu)*in/sum(eps=0.01)", "linear(cosine)/len", "linear(identity)/l2"]
)
def test_without_a_causal_mask(notation, device, poisoned):
    shape = Shape(batch=2, tokens=35, kv_heads=1, group=2, d=12, e=20)
    assert_right(notation, shape, torch.float32, device, causal=False)


@pytest.mark.parametrize("notation", ["linear(elu1)*forget/sum", "linear(identity)", "linear(relu)/l2"])
def test_segments_and_chunks_do_not_change_the_answer(notation, device, poisoned, settings):
    shape = Shape(batch=1, tokens=85, kv_heads=1, group=1, d=8, e=8)
    for chunk, walkers in ((16, 3), (32, 1)):
        settings(program, LEAST_CHUNKS=2, WALKERS=walkers)
        assert_right(notation, shape, torch.float32, device, chunk=chunk)


@pytest.mark.parametrize("notation", ["linear(both_halves)*forget/sum", "linear(both_halves)/l2"])
def test_a_feature_map_that_changes_the_size(notation, device, poisoned, monkeypatch):
    monkeypatch.setitem(part._registry["feature map"], "both_halves", BothHalves)
    shape = Shape(batch=1, tokens=37, kv_heads=1, group=2, d=12, e=20)
    assert_right(notation, shape, torch.float32, device)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    found = of_both(case.with_gradients(), in_pieces)
    for name, reference in of_both(case.map(torch.Tensor.double).with_gradients(), at_once).items():
        assert float((found[name].double() - reference).norm() / reference.norm()) < 2e-6, name


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
def test_short_texts(tokens, device, poisoned):
    shape = Shape(batch=1, tokens=tokens, kv_heads=1, group=1, d=16, e=16)
    assert_right("linear(elu1)*forget/sum", shape, torch.float32, device)


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("notation", ["linear(elu1)/sum", "linear(cosine)*forget"])
def test_every_head_size_and_length(notation, d, dtype, device, poisoned):
    for length in (63, 1000, 4097):
        shape = Shape(batch=1, tokens=length, kv_heads=2, group=1, d=d, e=64)
        assert_right(notation, shape, dtype, device, chunk=None)


@pytest.mark.parametrize(
    "notation", ["linear(elu1)*forget/sum", "linear(identity)*in/len", "linear(relu)/l2"]
)
def test_a_text_in_pieces_gives_what_the_whole_gives(notation, device, poisoned, settings):
    """State after one piece, state before the next: outputs, the last state and gradients across them."""
    settings(program, LEAST_CHUNKS=1)
    shape = Shape(batch=2, tokens=50, kv_heads=1, group=2, d=12, e=6)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    found = of_both(case.with_gradients(), in_pieces)
    gold = of_both(case.map(torch.Tensor.double).with_gradients(), at_once)
    for name, reference in gold.items():
        error = float((found[name].double() - reference).norm() / reference.norm())
        assert error < 2e-6, (name, error)


def of_both(case, run):
    """Outputs, last moments, and gradients of a function of both."""
    y, moments = run(case)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(u.shape, generator=generator, dtype=torch.float64).to(u) for u in (y, moments)]
    loss = (y * directions[0]).sum() + 0.1 * (moments * directions[1]).sum()
    return {"y": y.detach(), "moments": moments.detach(), **case.gradients(loss)}


def in_pieces(case):
    first, state = fused(case.tokens(0, 20), return_state=True)
    second, state = fused(case.tokens(20, 50), return_state=True, state=state)
    return torch.cat([first, second], 1), state.moments


def at_once(case):
    inputs = inputs_of(case)
    scale = case.spec.kernel.default_scale(inputs.q.shape[3])
    options = {"scale": scale, "causal": True, "chunk": 64, "state": None, "return_state": True}
    y, state = attend(case.spec, inputs, Form.CHUNKED, **options)
    return y, state.moments


@pytest.mark.parametrize("gated", [False, True])
def test_operator_is_registered_as_torch_wants_it(gated, device):
    q, k, v = (torch.randn(1, 20, 1, 16, device=device, requires_grad=True) for _ in range(3))
    gates = (
        (torch.rand(1, 20, 1, device=device).requires_grad_() for _ in range(2)) if gated else (None, None)
    )
    state = torch.rand(1, 1, 16, 17, device=device).requires_grad_() if gated else None
    call = ("elu1", 0.5, "sum", 0.1, 0.0, False, True, True, gated, 16, gated)
    arguments = (q, k, v, *gates, None, state, *call)
    assert set(torch.library.opcheck(first_order.traced, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("forget", [-4.0, float("-inf")])
def test_strong_forgetting(forget, device, poisoned):
    case = random_tensors(parse("linear(elu1)*forget/sum"), Shape(1, 40, 1, 1, 8, 8), 0, torch.float32)
    gates = case.tensors["log_forget"].clone()
    gates[:, ::3] = forget
    case = case.with_tensors(log_forget=gates).map(lambda u: u.to(device))
    direction = torch.randn(1, 40, 1, 8, dtype=torch.float64, device=device)
    gold = outputs_and_gradients(case.map(torch.Tensor.double), plain, direction)
    found = outputs_and_gradients(case, lambda c: fused(c)[0], direction)
    for name, reference in gold.items():
        assert float((found[name].double() - reference).norm()) < 2e-6 * max(1.0, float(reference.norm())), (
            name
        )


@pytest.mark.parametrize("name", ["k", "v"])
def test_later_tokens_do_not_change_earlier_rows(name, device):
    case = random_tensors(parse("linear(elu1)*forget/sum"), Shape(1, 40, 1, 1, 8, 8), 0, torch.float32)
    case = case.map(lambda u: u.to(device))
    changed = case.tensors[name].clone()
    changed[:, 21:] *= 1e30
    with torch.no_grad():
        y, other = fused(case)[0], fused(case.with_tensors(**{name: changed}))[0]
    assert torch.equal(y[:, :21], other[:, :21])
