"""Packed sequences read in place: each as if it were alone, judged against float64."""

import pytest
import torch

import maclaurin
from maclaurin import parse
from maclaurin.programs.about_mean import mean_polynomial
from maclaurin.programs.quadratic_polynomial import polynomial_attention
from maclaurin.programs.score_mod import modified_softmax, modified_softmax_backward
from maclaurin.programs.triton import INSTALLED
from maclaurin.testing import Shape, random_tensors, relative_error
from tests.kernels.conftest import ON_GPU
from tests.kernels.judging import ROUNDING, outputs_and_gradients, plain, slack

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

from maclaurin.programs.triton.packed import places

#: none, one, odd, a tile, several tiles and more; empty ones at both ends
LENGTHS = [0, 1, 63, 64, 0, 65, 1000, 128, 7, 0] if ON_GPU else [0, 1, 33, 64, 0, 70, 7, 0]
ALIKE = [0, 5, 6, 0, 20]
SPECS = [
    "taylor(2)/sum",
    "taylor(4)*in/sum",
    "taylor(3)/l2",
    "power(2)/sum(eps=0.001)",
    "poly(1,0.5,0.25)/len*out",
    "sigmoid(-1)",
    "linear(relu)*in/len",
]
ABOUT_THE_MEAN = [
    "taylor(2,about=mean)/sum",
    "taylor(3,about=mean)*in/rms",
    "taylor(1,about=mean)/sum*out",
    "hermite(2)/len",
    "hermite(2)*in/l2",
]
EXP = [
    "exp/sum",
    "exp*in/sum(eps=0.1)",
    "exp/l2",
    "exp/rms*out",
    "exp/layer",
    "exp/len",
    "exp/len*out",
    "exp(clamp=0.5)/len",
    "exp(clamp=0.5)/l2",
    "poly(0)+window(9,sinks=2)/sum",
    "poly(0)+window(64)/rms",
]


def cuts_of(lengths, device, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)


def packed_case(notation, lengths, dtype, device, *, kv_heads=2, group=2, d=24, e=40):
    shape = Shape(batch=1, tokens=sum(lengths), kv_heads=kv_heads, group=group, d=d, e=e)
    return random_tensors(parse(notation), shape, 0, dtype, device=device)


def alone(case, lengths, *, causal=True):
    """Each sequence by itself in the plain form."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    pieces = [case.tokens(b - n, b) for n, b in zip(lengths, ends, strict=True) if n]
    return torch.cat([plain(piece, causal=causal) for piece in pieces], 1)


def in_place(case, lengths, **options):
    """Packed, by a program that copies nothing."""
    cuts = cuts_of(lengths, case.tensors["q"].device, options.pop("cuts_dtype", torch.int32))
    q, k, v = (case.tensors[name] for name in "qkv")
    chosen = maclaurin.plan(q, k, v, case.spec, cu_seqlens=cuts, form="parallel", **options)
    assert chosen.backend == "triton", chosen
    assert not chosen.copies, chosen
    return case.output(cu_seqlens=cuts, form="parallel", **options)


def assert_right(notation, lengths, dtype, device, *, causal=True, **sizes):
    case = packed_case(notation, lengths, dtype, device, **sizes)
    heads, e = case.tensors["q"].shape[2], case.tensors["v"].shape[3]
    direction = torch.randn(1, sum(lengths), heads, e, dtype=torch.float64, device=device)
    wide = case.map(torch.Tensor.double)
    gold = outputs_and_gradients(wide, lambda c: alone(c, lengths, causal=causal), direction)
    known = outputs_and_gradients(case, lambda c: alone(c, lengths, causal=causal), direction)
    found = outputs_and_gradients(case, lambda c: in_place(c, lengths, causal=causal), direction)
    largest = max(float(g.norm()) for name, g in gold.items() if name != "output")
    allowed = slack(case.spec, Shape(tokens=min(n for n in lengths if n)))
    for name, reference in gold.items():
        floor = 1e-3 if name == "output" else max(1e-3, largest / 10)
        limit = allowed * max(relative_error(known[name], reference, floor), ROUNDING[dtype])
        assert relative_error(found[name], reference, floor) <= limit, name


@pytest.mark.parametrize("notation", SPECS)
def test_every_sequence_is_as_if_alone(notation, dtype, device, poisoned):
    assert_right(notation, LENGTHS, dtype, device)


@pytest.mark.parametrize("notation", ABOUT_THE_MEAN)
def test_every_sequence_about_the_mean(notation, dtype, device, poisoned):
    assert_right(notation, LENGTHS, dtype, device)


@pytest.mark.parametrize("notation", EXP)
def test_every_sequence_of_exp(notation, dtype, device, poisoned):
    assert_right(notation, LENGTHS, dtype, device)


@pytest.mark.parametrize(
    "notation",
    ["taylor(2)/sum", "taylor(2,about=mean)/sum", "hermite(2)/len", "exp/sum", "exp/l2", "exp(clamp=5)/len"],
)
@pytest.mark.parametrize("lengths", [ALIKE, [1], [1, 1, 1], [64, 64], [65], [0, 130]])
def test_other_lengths(notation, lengths, device, poisoned):
    assert_right(notation, lengths, torch.float32, device, kv_heads=1, group=1, d=16, e=16)


def test_without_a_causal_mask(dtype, device, poisoned):
    for notation in ("taylor(2)/sum", "poly(1,0.5,0.25)/len", "exp/sum", "exp/l2", "exp/len"):
        assert_right(notation, LENGTHS, dtype, device, causal=False, kv_heads=1, d=16, e=8)


@pytest.mark.parametrize("notation", ["taylor(2)/sum", "exp/len"])
def test_cuts_in_64_bits(notation, device):
    case = packed_case(notation, ALIKE, torch.float32, device)
    assert torch.equal(in_place(case, ALIKE), in_place(case, ALIKE, cuts_dtype=torch.int64))


def test_cuts_with_gaps_in_memory(device):
    q, k, v = (torch.randn(1, 12, 2, 16, device=device) for _ in range(3))
    cuts = torch.tensor([[0, 9], [5, 9], [12, 9]], device=device)[:, 0]
    for notation in ("taylor(2)/sum", "exp/sum"):
        found, expected = (
            maclaurin.attention(q, k, v, notation, form="parallel", cu_seqlens=given)
            for given in (cuts, cuts.contiguous())
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "notation",
    [
        "taylor(2)/sum",
        "exp/l2",
        "exp/len*out",
        "poly(0)+window(9,sinks=2)/sum",
        "taylor(2,about=mean)/sum",
        "poly(1,0.5,0.25)/len",
        "hermite(2)/len",
        "exp/sum",
        "exp/layer",
        "exp(clamp=0.5)/len",
    ],
)
def test_no_value_of_a_sequence_reaches_another(notation, device, poisoned):
    """The others are the same to the last bit, in outputs and gradients, when one is all NaN."""
    lengths = [20, 37, 0, 70, 3]
    case = packed_case(notation, lengths, torch.float32, device)
    direction = torch.randn(1, sum(lengths), 4, 40, device=device)
    known = outputs_and_gradients(case, lambda c: in_place(c, lengths), direction)
    broken = torch.zeros(sum(lengths), dtype=torch.bool, device=device)
    broken[20:57] = True

    def with_nan(u):
        return torch.where(broken.view(1, -1, *[1] * (u.dim() - 2)), torch.nan, u)

    found = outputs_and_gradients(case.map(with_nan), lambda c: in_place(c, lengths), with_nan(direction))
    for name, reference in known.items():
        assert torch.equal(found[name][:, ~broken], reference[:, ~broken]), name
        assert found[name][:, broken].isnan().all(), name


@pytest.mark.parametrize(
    ("notation", "why"),
    [
        ("power(2)*forget/sum", "packed sequences with a decay gate are not supported"),
        ("taylor(2)/running", "counted along a row"),
        ("taylor(2,about=mean)+window(4)/sum", "beside a window"),
        ("exp*forget/sum", "packed sequences with a decay gate are not supported"),
        ("exp(clamp=2)/running", "adds up along a row"),
    ],
)
def test_row_wise_sums_need_copied_rows(notation, why, device):
    case = packed_case(notation, ALIKE, torch.float32, device)
    cuts, (q, k, v) = cuts_of(ALIKE, device), (case.tensors[name] for name in "qkv")
    chosen = maclaurin.plan(q, k, v, notation, cu_seqlens=cuts)
    assert chosen.copies
    assert why in str(chosen)
    y = case.output(cu_seqlens=cuts, form="parallel")
    torch.testing.assert_close(y, alone(case, ALIKE), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("sequences", [1, 5, 300])
def test_every_tile_has_a_place_of_its_own(tile, sequences, device):
    generator = torch.Generator().manual_seed(sequences)
    lengths = (torch.randint(0, 5, (sequences,), generator=generator) * 17).tolist()
    lengths[-1] += 1
    cuts = cuts_of(lengths, device, torch.int64)
    found = places(cuts, sum(lengths), tile).T.tolist()
    expected = [
        (begin, length, i, s)
        for s, (begin, length) in enumerate(zip(cuts.tolist()[:-1], lengths, strict=True))
        for i in range(-(-length // tile))
    ]
    assert sorted(tuple(row) for row in found if row[1]) == expected
    assert all(row[2] == 0 for row in found if not row[1])


def test_operator_is_registered_as_torch_wants_it(device):
    q, k, v = (torch.randn(1, 9, 2, 16, device=device, requires_grad=True) for _ in range(3))
    cuts = cuts_of([4, 0, 5], device)
    call = (q, k, v, None, cuts, [1.0, 0.25, 0.03], "sum", 0.0, True, False, False)
    assert set(torch.library.opcheck(polynomial_attention.traced, call).values()) == {"SUCCESS"}
    for divisor in ("sum", "balanced"):
        call = (q, k, v, None, None, cuts, 0.25, [1.0, 1.0, 0.5], True, 0, 0, 0, False, divisor, False)
        assert set(torch.library.opcheck(mean_polynomial.traced, call).values()) == {"SUCCESS"}
    call = (q, k, v, None, cuts, 0.25, True, None, None, 0)
    assert set(torch.library.opcheck(modified_softmax.traced, call).values()) == {"SUCCESS"}
    with torch.no_grad():
        o, lse = modified_softmax(*call)
        back = (o, *(u.detach() for u in (q, k, v)), None, cuts, lse, o, None, *call[5:])
        assert set(torch.library.opcheck(modified_softmax_backward.traced, back).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("notation", "operator"),
    [
        ("taylor(2)/sum", "polynomial"),
        ("hermite(2)/len", "polynomial"),
        ("exp/l2", "modified_softmax"),
        ("exp/len", "modified_softmax"),
    ],
)
def test_a_compiled_call_reads_them_in_place(notation, operator, device):
    q, k, v = (torch.randn(1, 31, 2, 16, device=device) for _ in range(3))
    cuts, graphs = cuts_of(ALIKE, device), []

    def attention(q, k, v, cuts):
        return maclaurin.attention(q, k, v, notation, form="parallel", cu_seqlens=cuts)

    compiled = torch.compile(
        attention, fullgraph=True, backend=lambda graph, _: graphs.append(graph.code) or graph
    )
    torch.testing.assert_close(compiled(q, k, v, cuts), attention(q, k, v, cuts))
    assert operator in graphs[0]
    assert "index_put" not in graphs[0]
