"""The linear-time program for polynomials of low order, against float64 written out here, every pair once."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.programs.linear_time import linear_polynomial
from maclaurin.programs.triton import INSTALLED
from maclaurin.testing import Shape, random_tensors, relative_error
from tests.kernels.conftest import ON_GPU
from tests.kernels.judging import assert_as_right_as_plain, outputs_and_gradients, plain

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

from maclaurin.programs.triton import linear_time
from maclaurin.programs.triton.linear_time import Call, Rows

DTYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.float32, torch.float16]
LARGEST = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
COEFFICIENTS = (1.0, 0.25, 0.03, 0.004)
#: tokens, d, e, heads, key-value heads, chunk
SHAPES = [(70, 16, 16, 1, 1, 32), (50, 24, 20, 4, 2, 32), (33, 40, 16, 2, 1, 16), (1, 16, 16, 1, 1, 16),
          (200, 16, 16, 1, 1, 192)]  # fmt: skip
SMALL_HEADS = (40, 6, 8, 2, 1, 16)
#: heads of more than 64 entries, which keep three quarters of the pairs or fewer (block_layout.py)
WIDE_HEADS = [(20, 128, 24, 2, 1, 16), (37, 80, 16, 2, 1, 16), (20, 70, 72, 2, 1, 16)]


def expected(q, k, v, alpha, log_forget, call):
    """(y, D) with every pair written down."""
    group = q.shape[2] // k.shape[2]
    k, v = (u.repeat_interleave(group, 2) for u in (k, v))
    s = torch.einsum("bthd,bshd->bhts", q, k)
    w = sum(alpha[n][..., None] * s**n for n in range(call.order + 1))
    if log_forget is not None:
        totals = log_forget.cumsum(-1).repeat_interleave(group, 1)
        w = w * (totals[..., :, None] - totals[..., None, :]).clamp(max=0).exp()
    w = w.tril()
    tokens = s.shape[-1]
    count = torch.arange(1, tokens + 1, dtype=s.dtype, device=s.device).expand(s.shape[:-1])
    divisor = {"sum": w.sum(-1) + call.eps, "count": count, "one": torch.ones_like(count)}[call.divisor]
    return torch.einsum("bhts,bshe->bthe", w / divisor[..., None], v), divisor


def case(shape, order, dtype, device, *, rows, decays):
    tokens, d, e, heads, kv_heads, _ = shape
    small = 0.2 if order == 1 else 1.0  # so that sums of a linear weight do not vanish
    sizes = ((small, heads, d), (small, kv_heads, d), (1.0, kv_heads, e))
    q, k, v = ((size * torch.randn(2, tokens, h, s, device=device)).to(dtype) for size, h, s in sizes)
    alpha = torch.tensor(COEFFICIENTS[: order + 1], device=device)[:, None, None, None]
    alpha = (alpha * (1 + 0.3 * torch.rand(order + 1, 2, heads, tokens, device=device))) if rows else None
    log_forget = -0.2 * torch.rand(2, kv_heads, tokens, device=device) if decays else None
    return q, k, v, alpha, log_forget


def in_float64(q, k, v, alpha, log_forget, call):
    """Leaves, outputs and gradients for random directions; D has one only where it depends on the row."""
    plain = torch.tensor(call.coefficients, dtype=torch.float64, device=q.device)
    plain = plain[:, None, None, None].expand(call.order + 1, *q.shape[:1], q.shape[2], q.shape[1])
    named = {"q": q, "k": k, "v": v, "alpha": alpha, "log_forget": log_forget}
    leaves = {name: u.double().requires_grad_() for name, u in named.items() if u is not None}
    y, divisor = expected(
        leaves["q"], leaves["k"], leaves["v"], leaves.get("alpha", plain), leaves.get("log_forget"), call
    )
    dy, d_divisor = torch.randn_like(y).to(q.dtype), torch.randn_like(divisor).float() / divisor.shape[-1]
    loss = (y * dy.double()).sum()
    if call.by_sum:
        loss = loss + (divisor * d_divisor.double()).sum()
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    return y.detach(), divisor.detach(), dy, d_divisor, gradients


def error(value, reference, floor=1e-3):
    return float((value.double() - reference).norm() / reference.norm().clamp(min=floor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "order", "divisor", "rows", "decays"),
    [
        *itertools.product(SHAPES[:1], (1, 2), ("sum", "count"), (False,), (False, True)),
        *((shape, 2, "sum", False, False) for shape in SHAPES[1:]),
        (SHAPES[1], 2, "sum", True, False),
        (SHAPES[1], 2, "sum", True, True),
        (SHAPES[1], 1, "count", True, False),
        (SHAPES[1], 2, "one", False, True),
        *((shape, 2, "sum", False, False) for shape in WIDE_HEADS),
        (WIDE_HEADS[0], 2, "sum", True, True),
        (WIDE_HEADS[1], 2, "count", True, True),
        (SMALL_HEADS, 3, "count", False, False),
        (SMALL_HEADS, 3, "count", True, True),
    ],
)
def test_linear_time(shape, order, divisor, rows, decays, dtype, device, poisoned):
    """`narrow`: y is rounded to bf16, but what rounding took is not forgotten in the backward pass."""
    for narrow in (False, True) if order == 2 and not rows else (False,):
        _judge_linear_time(shape, order, divisor, rows, decays, narrow, dtype, device)


def _judge_linear_time(shape, order, divisor, rows, decays, narrow, dtype, device):
    by_sum = divisor == "sum"
    call = Call(COEFFICIENTS[: order + 1], divisor, 1e-3 if by_sum else 0.0, shape[-1], narrow)
    q, k, v, alpha, log_forget = case(shape, order, dtype, device, rows=rows, decays=decays)
    y, d, dy, dd, gradients = in_float64(q, k, v, alpha, log_forget, call)
    given = Rows(alpha, log_forget)
    found_y, rest, found_d, past, _ = linear_time.forward(q, k, v, given, call)
    found, _ = linear_time.backward(
        dy.float(), dd if by_sum else None, q, k, v, found_y, rest, found_d, given, past, call
    )
    whole_y = found_y if rest is None else found_y.float() + rest
    named = found._asdict()
    largest = max(float(g.norm()) for g in gradients.values())
    errors = {"y": error(whole_y, y), "D": error(found_d, d)}
    for name, reference in gradients.items():
        errors[name] = error(named[name], reference, max(1e-3, largest / 100))
    if decays:  # a difference of long sums, in any form
        errors["log_forget"] /= 4
    largest_allowed = max(LARGEST[dtype], 1e-3) if narrow else LARGEST[dtype]
    assert max(errors.values()) < largest_allowed, str(errors)
    assert {name for name, value in named.items() if value is not None} == gradients.keys()


def test_heads_of_more_than_64_entries(device, poisoned):
    _judge_linear_time((20, 70, 16, 2, 1, 16), 2, "sum", False, False, False, torch.float32, device)


@pytest.mark.parametrize("decays", [False, True])
def test_heads_of_64_entries(decays, device, poisoned):
    _judge_linear_time((40, 64, 16, 2, 1, 16), 2, "sum", False, decays, False, torch.float32, device)


@pytest.mark.exhaustive  # half a minute
def test_heads_of_64_entries_in_two_groups():
    """The layout is chosen when the library is imported, so this takes another process."""
    chosen = "heads_of_64_entries and not groups"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__, "-k", chosen]
    done = subprocess.run(
        command, env={**os.environ, "MACLAURIN_HALVES": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]


SPECS = [
    "taylor(2)/sum",
    "taylor(2)/l2",
    "taylor(1)/rms",
    "taylor(3)/l2",
    "taylor(2,about=mean)/sum",
    "taylor(1,about=mean)/sum",
    "power(2)/sum(eps=0.001)",
    "power(2)*forget/len",
    "taylor(2)*forget/sum",
    "poly(1,0.5,0.25)/len*out",
    "linear(identity)",
    "linear(relu)*in/len",
]


@pytest.mark.parametrize("notation", SPECS)
def test_every_kind_of_spec_with_grouped_heads_and_odd_sizes(notation, dtype, device, poisoned):
    small = "3" in notation
    shape = Shape(
        batch=2 if ON_GPU else 1,
        tokens=300 if ON_GPU else 70,
        kv_heads=2 if ON_GPU else 1,
        group=2,
        d=6 if small else 24,
        e=12 if small else 40,
    )
    assert_as_right_as_plain(parse(notation), shape, dtype, device, "triton", form="chunked", chunk_size=64)


@pytest.mark.parametrize(
    ("notation", "d"),
    [
        ("taylor(2)/sum", 24),
        ("taylor(2)/l2", 24),
        ("poly(1,0.5,0.25)", 24),
        ("power(2)*in/len*out", 24),
        ("taylor(3)/l2", 6),
        ("taylor(1)/rms", 16),
        ("taylor(2)/sum", 80),
    ],
)
def test_every_query_reads_the_whole_text(notation, d, dtype, device, poisoned):
    """Not causal: several chunks of moments are one state, and a text may end within a chunk."""
    shape = Shape(batch=2 if d < 64 else 1, tokens=150, kv_heads=1, group=2, d=d, e=12)
    options = {"form": "chunked", "chunk_size": 64, "causal": False}
    assert_as_right_as_plain(parse(notation), shape, dtype, device, "triton", **options)


@pytest.mark.parametrize("d", [2, 16, 17, *([32] if ON_GPU else [])])
def test_heads_of_order_3(d, device):
    """Products of four, and of two neighbouring entries in a block; heads that do not fill their tile."""
    case = random_tensors(parse("taylor(3)*forget/len"), Shape(tokens=24, kv_heads=1, group=2, d=d, e=8), 0)
    case = case.map(lambda u: u.float().to(device))
    direction = torch.randn(1, 24, 2, 8, dtype=torch.float64, device=device)
    gold = outputs_and_gradients(case.map(torch.Tensor.double), plain, direction)
    found = outputs_and_gradients(case, lambda c: c.output(form="chunked", chunk_size=16), direction)
    for name, reference in gold.items():
        assert relative_error(found[name], reference, 1e-3) < 1e-5, name


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 1024, 4097])
@pytest.mark.parametrize("d", [16, 32, 64, 128])
def test_every_length(length, d, dtype, device, poisoned):
    shape = Shape(batch=1, tokens=length, kv_heads=2, group=1, d=d, e=64)
    assert_as_right_as_plain(parse("taylor(2)/sum"), shape, dtype, device, "triton", form="chunked")


@pytest.mark.gpu  # only a full GPU lets products run on so long
@pytest.mark.parametrize(
    ("notation", "d"),
    [("taylor(2)/sum", 16), ("taylor(2)/sum", 32), ("taylor(2)/sum", 64), ("taylor(3)/l2", 16)],
)
def test_nothing_is_written_under_a_running_product(notation, d, device):
    """On a full GPU, again and again: every text of a batch must give the same, wherever it ran."""
    q, k, v, dy = (torch.randn(1, 4096, 4, s, device=device, dtype=torch.bfloat16) for s in (d, d, 64, 64))
    q, k, v = (u.repeat(8, 1, 4, 1).requires_grad_() for u in (q, k, v))
    for _ in range(5):
        y = maclaurin.attention(q, k, v, notation, form="chunked")
        for found in (y, *torch.autograd.grad(y, (q, k, v), dy.repeat(8, 1, 4, 1))):
            assert torch.equal(found, found[:1, :, :4].repeat(8, 1, 4, 1))


@pytest.mark.gpu  # minutes in the interpreter
def test_row_sums_do_not_drift_over_a_long_text(device):
    """Ones for values: every row must give exactly one, after 65,536 tokens too."""
    q, k = (torch.randn(1, 65536, 1, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    y = maclaurin.attention(q, k, torch.ones_like(k), "taylor(2)/sum", form="chunked")
    assert float((y.float() - 1).abs().max()) < 0.01


def test_operator_is_registered_as_torch_wants_it(device):
    q, k, v = (torch.randn(1, 20, 1, 16, device=device, requires_grad=True) for _ in range(3))
    alpha = torch.rand(3, 1, 1, 20, device=device, requires_grad=True)
    log_forget = (-torch.rand(1, 1, 20, device=device)).requires_grad_()
    for rows in ((None, None), (alpha, log_forget)):
        call = (
            q,
            k,
            v,
            *rows,
            None,
            [1.0, 0.25, 0.03],
            "sum",
            0.0,
            16,
            [0, 1, 2],
            False,
            rows[0] is None,
            True,
        )
        assert set(torch.library.opcheck(linear_polynomial.traced, call).values()) == {"SUCCESS"}
    call = (q, k, v, None, None, None, [1.0, 0.25, 0.03], "sum", 0.0, 16, [0, 1, 2], False, True, False)
    assert set(torch.library.opcheck(linear_polynomial.traced, call).values()) == {"SUCCESS"}
    state = torch.randn(1, 1, 153, 17, device=device, requires_grad=True)
    call = (q, k, v, None, log_forget, state, [1.0, 0.25, 0.03], "sum", 0.0, 16, [0, 1, 2], True, False, True)
    assert set(torch.library.opcheck(linear_polynomial.traced, call).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("notation", "d"),
    [
        ("taylor(2)/sum", 12),
        ("taylor(2)/sum", 80),
        ("power(2)*forget/sum(eps=0.001)", 12),
        ("power(2)*forget/sum(eps=0.001)", 128),
        ("taylor(3)/l2", 5),
        ("taylor(3)*forget/len", 5),
        ("linear(identity)/len", 12),
    ],
)
def test_a_text_in_pieces_gives_what_the_whole_gives_with_all_gradients(notation, d, device, poisoned):
    """State after one piece, state before the next: outputs, the last state and gradients across them."""
    few = d > 64 and not ON_GPU
    shape = Shape(batch=1 if few else 2, tokens=50, kv_heads=1 if few else 2, group=2, d=d, e=6)
    case = random_tensors(parse(notation), shape, 0, torch.float32, device=device)
    wide = case.map(torch.Tensor.double)
    found, expected = (read_in_pieces(c.with_gradients(), (20, 30)) for c in (case, wide))
    for name, reference in expected.items():
        assert error(found[name], reference) < 2e-5, name


def read_in_pieces(case, lengths):
    """Outputs, last moments, and gradients of a function of both."""
    state, parts, start = None, [], 0
    for length in lengths:
        piece = {name: u[:, start : start + length] for name, u in case.tensors.items()}
        q, k, v = (piece.pop(name) for name in "qkv")
        options = {"form": "chunked", "chunk_size": 64, "return_state": True, "state": state}
        y, state = maclaurin.attention(q, k, v, case.spec, **options, **piece)
        parts.append(y)
        start += length
    y, moments = torch.cat(parts, 1), state.moments
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(u.shape, generator=generator, dtype=torch.float64).to(u) for u in (y, moments)]
    loss = (y * directions[0]).sum() + 0.01 * (moments * directions[1]).sum()
    return {"y": y.detach(), "moments": moments.detach(), **case.gradients(loss)}


@pytest.mark.gpu  # torch.compile and the interpreter do not go together
def test_compiles_whole(device):
    q, k, v = (torch.randn(1, 65, 2, 32, device=device, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        return maclaurin.attention(q, k, v, "taylor(2)/sum", form="chunked")

    compiled = torch.compile(run, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


def test_gradients_that_come_in_another_layout(device, poisoned):
    tensors = [torch.randn(1, 40, 2, 16, device=device, requires_grad=True) for _ in range(3)]
    direction = torch.randn(1, 40, 16, 2, device=device)

    def gradients(form):
        turned = maclaurin.attention(*tensors, "taylor(2)/sum", form=form).transpose(2, 3).contiguous()
        return torch.autograd.grad((turned * direction).sum(), tensors)

    found, expected = gradients("chunked"), gradients("blocked")
    for value, reference in zip(found, expected, strict=True):
        assert error(value, reference.double()) < 1e-5


def test_small_gradients_in_fp16(device):
    """dy over a row sum leaves the range of fp16."""
    shape = Shape(batch=1, tokens=140, kv_heads=1, group=1, d=16, e=16)
    case = random_tensors(parse("taylor(2)/sum"), shape, 0, torch.float16, device=device)
    direction = 1e-3 * torch.randn(1, 140, 1, 16, dtype=torch.float64, device=device)
    found = outputs_and_gradients(case, lambda c: c.output(form="chunked"), direction.half())
    gold = outputs_and_gradients(case.map(torch.Tensor.double), plain, direction.half().double())
    for name, reference in gold.items():
        assert error(found[name], reference, 1e-6) < 1e-3, name
