"""taylor(N) about the mean and windows beside it, in their own program: against the plain form in float64."""

import re

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.forms.attend import Form, attend
from maclaurin.programs.about_mean import (
    BalancedChunks,
    BalancedPairs,
    PairsAboutMean,
    TailInChunks,
    mean_polynomial,
)
from maclaurin.programs.program import Call
from maclaurin.programs.triton import INSTALLED
from maclaurin.testing import Shape, random_tensors
from tests.kernels.conftest import ON_GPU
from tests.kernels.judging import ROUNDED_ROWS, ROUNDING, SLACK, inputs_of, outputs_and_gradients, plain

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

from tests.kernels import interpreted_bfloat16

if not ON_GPU:
    interpreted_bfloat16.correct()

MEAN, BESIDE = "taylor(2,about=mean)/sum", "taylor(2,about=mean)+window(20,sinks=3)/sum"
HERMITE = "hermite(2)/len"


def fused(case, *, chunk=0, state=None, return_state=False):
    """y, and the state after it."""
    programs = (BalancedPairs(), BalancedChunks()) if balanced(case) else (PairsAboutMean(), TailInChunks())
    inputs, program = inputs_of(case), programs[chunk > 0]
    scale = case.spec.kernel.default_scale(inputs.q.shape[3])
    options = {"chunk_size": chunk or None, "state": state, "return_state": return_state}
    call = Call(case.spec, inputs, scale, inputs.q.device, **options)
    assert program.refuses(call) is None, program.refuses(call)
    return program.run(call)


def balanced(case):
    return case.spec.kernel.weights_count_keys


def assert_right(notation, shape, dtype, device, *, chunk=0, offset=0.0):
    """`offset`: the size of what all keys have in common."""
    case = random_tensors(parse(notation), shape, 0, dtype, device=device)
    common = offset * torch.randn(shape.d, generator=torch.Generator().manual_seed(0)).to(device)
    case = case.with_tensors(k=(case.tensors["k"] + common).to(dtype))
    direction = torch.randn(*case.tensors["q"].shape[:3], shape.e, dtype=torch.float64, device=device)
    gold = outputs_and_gradients(case.map(torch.Tensor.double), plain, direction)
    found = outputs_and_gradients(case, lambda c: fused(c, chunk=chunk)[0], direction)
    largest = max(float(g.norm()) for name, g in gold.items() if name != "output")
    errors = {
        name: float((found[name].double() - reference).norm())
        / max(float(reference.norm()), 1e-3 if name == "output" else largest / 10)
        for name, reference in gold.items()
    }
    rounded = ROUNDED_ROWS if case.spec.value_gates and dtype != torch.float32 else 1  # docs/gpu.md
    assert max(errors.values()) < SLACK * rounded * ROUNDING[dtype], errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "notation",
    [
        MEAN,
        "taylor(4,about=mean)*in/sum",
        "taylor(1,about=mean)/sum",
        "taylor(2,about=mean)/l2",
        "taylor(3,about=mean)/rms",
        BESIDE,
        "taylor(2)+window(9)/sum*out",
        HERMITE,
        "hermite(2)*in/sum*out",
        "hermite(2)/l2",
    ],
)
def test_every_pair(notation, dtype, device, poisoned):
    shape = Shape(batch=1, tokens=300 if ON_GPU else 70, kv_heads=2, group=2, d=24, e=40)
    assert_right(notation, shape, dtype, device)


@pytest.mark.parametrize(
    "notation", [MEAN, "taylor(1,about=mean)/sum", BESIDE, "taylor(2)+window(9,sinks=1)/sum", HERMITE]
)
def test_chunks(notation, device, poisoned):
    shape = Shape(batch=1, tokens=140, kv_heads=1, group=2, d=5, e=6)
    assert_right(notation, shape, torch.float32, device, chunk=64)


@pytest.mark.parametrize("notation", [MEAN, BESIDE])
@pytest.mark.parametrize("d", [72, 128])
@pytest.mark.exhaustive  # a minute in the interpreter
def test_chunks_of_wide_heads(notation, d, device, poisoned):
    """Heads of more than 64 entries keep each pair of their halves once."""
    shape = Shape(batch=1, tokens=100, kv_heads=1, group=2, d=d, e=6)
    assert_right(notation, shape, torch.float32, device, chunk=64)


@pytest.mark.parametrize("tokens", [1, 4, 24, 25])
@pytest.mark.parametrize("window", ["", "+window(20,sinks=3)", "+window(100)"])
def test_short_texts(tokens, window, device, poisoned):
    shape = Shape(batch=1, tokens=tokens, kv_heads=1, group=1, d=16, e=16)
    assert_right(f"taylor(2,about=mean){window}/sum", shape, torch.float32, device)


@pytest.mark.parametrize("tokens", [1, 2, 63, 65])
def test_short_balanced_texts(tokens, device, poisoned):
    shape = Shape(batch=2, tokens=tokens, kv_heads=1, group=1, d=16, e=16)
    assert_right(HERMITE, shape, torch.float32, device)


@pytest.mark.parametrize("chunk", [0, 64])
def test_values_that_are_all_alike_come_out_as_they_are(chunk, device):
    """Balanced weights sum to the number of keys: a constant value is its own mean, whatever the scores."""
    case = random_tensors(parse(HERMITE), Shape(1, 140, 1, 2, 6, 8), 0, torch.float32, device=device)
    alike = torch.linspace(-2, 2, 8, device=device).expand(1, 140, 1, 8).contiguous()
    with torch.no_grad():
        y, _ = fused(case.with_tensors(v=alike), chunk=chunk)
    torch.testing.assert_close(y, alike.expand(1, 140, 2, 8), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [0, 64])
@pytest.mark.parametrize("notation", [MEAN, HERMITE])
def test_large_mean_scores_do_not_cancel(notation, chunk, device):
    """Mean scores near 20: only differences count."""
    shape = Shape(batch=1, tokens=140, kv_heads=1, group=1, d=6, e=8)
    assert_right(notation, shape, torch.float32, device, chunk=chunk, offset=8.0)


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [16, 64, 128])
@pytest.mark.parametrize("notation", [MEAN, "taylor(2,about=mean)+window(64,sinks=1)/sum", HERMITE])
@pytest.mark.parametrize("chunk", [0, 1024])
def test_every_head_size_and_length(notation, d, chunk, dtype, device, poisoned):
    for length in (65, 1000, 4097):
        shape = Shape(batch=1, tokens=length, kv_heads=2, group=1, d=d, e=64)
        assert_right(notation, shape, dtype, device, chunk=chunk, offset=0.5)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("chunk", [0, 64])
@pytest.mark.parametrize("notation", [MEAN, BESIDE, HERMITE])
def test_later_tokens_do_not_change_earlier_rows(notation, chunk, name, device):
    case = random_tensors(parse(notation), Shape(1, 140, 1, 1, 6, 8), 0, torch.float32, device=device)
    changed = case.tensors[name].clone()
    changed[:, 100:] *= 1e6
    with torch.no_grad():
        y, other = (fused(c, chunk=chunk)[0] for c in (case, case.with_tensors(**{name: changed})))
    assert torch.equal(y[:, :100], other[:, :100])


@pytest.mark.parametrize("notation", [MEAN, "taylor(2,about=mean)+window(5,sinks=2)/sum"])
def test_a_text_in_pieces_gives_what_the_whole_gives(notation, device, poisoned):
    shape = Shape(batch=1, tokens=50, kv_heads=1, group=2, d=6, e=4)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    found = of_both(case.with_gradients(), in_pieces)
    gold = of_both(case.map(torch.Tensor.double).with_gradients(), at_once)
    for name, reference in gold.items():
        error = float((found[name].double() - reference).norm() / reference.norm())
        assert error < 1e-5, (name, error)


def of_both(case, run):
    """Outputs, last moments, and gradients of a function of both."""
    y, moments = run(case)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(u.shape, generator=generator, dtype=torch.float64).to(u) for u in (y, moments)]
    loss = (y * directions[0]).sum() + 0.01 * (moments * directions[1]).sum()
    return {"y": y.detach(), "moments": moments.detach(), **case.gradients(loss)}


def in_pieces(case):
    first, state = fused(case.tokens(0, 20), chunk=64, return_state=True)
    second, state = fused(case.tokens(20, 50), chunk=64, return_state=True, state=state)
    return torch.cat([first, second], 1), state.moments


def at_once(case):
    inputs = inputs_of(case)
    scale = case.spec.kernel.default_scale(inputs.q.shape[3])
    options = {"scale": scale, "causal": True, "chunk": 64, "state": None, "return_state": True}
    y, state = attend(case.spec, inputs, Form.CHUNKED, **options)
    return y, state.moments


@pytest.mark.parametrize("chunk", [0, 64])
def test_operator_is_registered_as_torch_wants_it(chunk, device):
    q, k, v = (torch.randn(1, 30, 1, 16, device=device, requires_grad=True) for _ in range(3))
    call = (q, k, v, None, None, None, 0.25, [1.0, 1.0, 0.5], True, 4, 1, chunk, True, "sum", chunk > 0)
    assert set(torch.library.opcheck(mean_polynomial.traced, call).values()) == {"SUCCESS"}
    call = (q, k, v, None, None, None, 0.25, [1.0, 1.0, 0.5], True, 0, 0, chunk, True, "balanced", False)
    assert set(torch.library.opcheck(mean_polynomial.traced, call).values()) == {"SUCCESS"}
    if chunk:
        state, offset = (
            torch.rand(1, 1, 153, 17, device=device).requires_grad_(),
            torch.rand(1, 1, 16, device=device),
        )
        call = (q, k, v, state, offset, None, 0.25, [1.0, 1.0, 0.5], True, 0, 0, chunk, False, "sum", True)
        assert set(torch.library.opcheck(mean_polynomial.traced, call).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("notation", "why"),
    [
        ("hermite(3)/len", "1 \\+ c"),
        ("taylor(2,about=mean)/sum", "1 \\+ c"),
        ("hermite(2)*forget/len", "decay gate"),
        ("hermite(2)", "number of their keys"),
        ("hermite(2)/sum(eps=1)", "number of their keys"),
        ("hermite(2)+window(3)/sum", "window"),
    ],
)
def test_balanced_programs_say_what_they_do_not_compute(notation, why, device):
    case = random_tensors(parse(notation), Shape(1, 9, 1, 1, 16, 16), 0, torch.float32, device=device)
    inputs = inputs_of(case)
    for program in (BalancedPairs(), BalancedChunks()):
        assert re.search(why, program.refuses(Call(case.spec, inputs, 0.25, inputs.q.device)) or "")


def test_a_compiled_call_takes_the_balanced_program(device):
    q, k, v = (torch.randn(1, 40, 2, 16, device=device) for _ in range(3))
    graphs = []

    def attention(*tensors):
        return maclaurin.attention(*tensors, HERMITE, form="parallel")

    compiled = torch.compile(
        attention, fullgraph=True, backend=lambda graph, _: graphs.append(graph.code) or graph
    )
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    assert "mean_polynomial" in graphs[0]
