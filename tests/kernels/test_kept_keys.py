"""Windows with kept keys on the fused program, against the plain form and float64 written out here."""

import dataclasses
import itertools

import pytest
import torch

from maclaurin import attention, parse, plan
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.programs.kept_keys import (
    ExactStep,
    KeptKeys,
    attention_while_seen,
    attention_while_seen_backward,
    key_lifetimes,
)
from maclaurin.programs.plan_cache import forget_plans
from maclaurin.programs.triton import INSTALLED
from maclaurin.spec.head_groups import HeadGroup, LayerAttention
from maclaurin.testing import Shape, random_tensors
from tests.kernels import interpreted_bfloat16
from tests.kernels.conftest import INTERPRETED, ON_GPU
from tests.kernels.judging import assert_as_right_as_plain

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

from maclaurin.programs.triton import kept_keys

if INTERPRETED:
    interpreted_bfloat16.correct()

KEPT = "poly(0)+window(9,sinks=3,kept=12)/sum"


def lifetimes_by_hand(q, k, scale, window, sinks, kept):
    """until and scores in float64, token by token: who is thrown out when."""
    q, k = q.double(), k.double()
    batch, heads, tokens, _ = q.shape
    group = heads // k.shape[1]
    x = q @ k.repeat_interleave(group, 1).mT * scale
    t, s = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    near = (s <= t) & ((s > t - window) | (s < sinks))
    p = x.cpu().masked_fill(~near, -torch.inf).softmax(-1)
    p = p.masked_fill(~((s <= t) & (s > t - window)), 0.0).unflatten(1, (k.shape[1], group)).mean(2)
    score = p.sum(-2)
    score[..., :sinks] = 0.0
    until = torch.full(score.shape, 1 << 30, dtype=torch.int64)
    for b in range(batch):
        for h in range(k.shape[1]):
            slots = []
            for now in range(window, tokens):
                key = now - window  # leaves the window as token `now` comes
                if key < sinks:
                    continue
                slots.append((float(score[b, h, key]), key))
                if len(slots) > kept:
                    worst = min(slots)
                    slots.remove(worst)
                    until[b, h, worst[1]] = now
    return until, score


@pytest.mark.parametrize(
    ("tokens", "window", "sinks", "kept"),
    [
        (90, 20, 2, 10),
        (200, 16, 4, 40),
        (130, 7, 0, 3),
        (70, 64, 1, 100),
        (33, 50, 2, 5),
        (150, 1, 3, 64),
        (430, 250, 3, 30),
    ],
)
def test_lifetimes(tokens, window, sinks, kept, device, poisoned):
    q, k = (torch.randn(2, h, tokens, 16, device=device) for h in (4, 2))
    until, score = (u.cpu() for u in key_lifetimes(q, k, 0.5, [window, sinks, kept] * 2))
    expected, exact_score = lifetimes_by_hand(q, k, 0.5, window, sinks, kept)
    torch.testing.assert_close(score.double(), exact_score, rtol=2e-5, atol=1e-6)
    # of a key that is still seen at the end, the end is not known by hand
    same = torch.where(until >= tokens, 1 << 30, until.long())
    assert torch.equal(same, expected)


@pytest.mark.parametrize(
    "notation",
    [
        "poly(0)+window(9,sinks=2,kept=7)/sum",
        "poly(0)+window(20,kept=5)/rms",
        "poly(0)+window(4,sinks=1,kept=60)*in/sum*out",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_kind_of_spec_with_grouped_heads_and_odd_sizes(notation, dtype, device, poisoned):
    shape = Shape(batch=2, tokens=130 if ON_GPU else 90, kv_heads=2, group=3, d=24, e=40)
    assert_as_right_as_plain(parse(notation), shape, dtype, device, "triton", form="chunked")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tiles_of_keys_that_need_no_mask(dtype, device, poisoned):
    """Windows and slots of several tiles: most tiles of keys are seen by all queries of a tile."""
    spec = parse("poly(0)+window(170,sinks=2,kept=90)/sum")
    shape = Shape(batch=1, tokens=400, kv_heads=1, group=2, d=16, e=24)
    assert_as_right_as_plain(spec, shape, dtype, device, "triton", form="chunked")


@pytest.mark.parametrize(
    ("notation", "tokens", "more"),
    [
        (KEPT, 90, 13),
        (KEPT, 5, 40),
        (KEPT, 2, 3),
        (KEPT, 37, 1),
        ("poly(0)+window(9,sinks=3)/sum", 70, 20),
        ("poly(0)+window(9,sinks=3)/sum", 2, 20),
    ],
)
def test_a_text_goes_on_from_its_state(notation, tokens, more, device, poisoned):
    spec = parse(notation)
    case = random_tensors(spec, Shape(batch=2, tokens=tokens + more, kv_heads=2, group=2, d=16, e=16), 0)
    q, k, v = (case.tensors[name].float().to(device) for name in "qkv")
    whole = attention(q.double(), k.double(), v.double(), spec, form="parallel")
    first = plan(q[:, :tokens], k[:, :tokens], v[:, :tokens], spec, return_state=True)
    assert first.program.name == "kept keys", str(first)
    y, state = attention(*(u[:, :tokens] for u in (q, k, v)), spec, return_state=True)
    rest, _ = attention(*(u[:, tokens:] for u in (q, k, v)), spec, state=state, return_state=True)
    torch.testing.assert_close(torch.cat([y, rest], 1).double(), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("notation", [KEPT, "poly(0)+window(9,sinks=3)/sum", "poly(0)+window(9,kept=80)/rms"])
def test_its_state_is_that_of_the_plain_form(notation, device, poisoned):
    spec = parse(notation)
    case = random_tensors(spec, Shape(batch=2, tokens=70, kv_heads=2, group=2, d=16, e=16), 0)
    case = case.map(lambda u: u.float().to(device))
    _, found = case(return_state=True)
    _, plain = case(return_state=True, form="recurrent")
    assert found.nbytes == plain.nbytes
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=1e-4, atol=1e-5)


#: how close outputs must be, by dtype
NEAR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXACT = ["9,sinks=3,kept=12", "70,sinks=2,kept=40", "9,sinks=3", "20,kept=5", "4,sinks=1,kept=60"]


def assert_same_state(found, expected, near=1e-5):
    """Numbers, dtypes and bytes of two states."""
    assert found.nbytes == expected.nbytes
    for name, tensor in expected.tensors().items():
        assert found.tensors()[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=near, atol=near, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("dtype", NEAR)
def test_states_of_padded_rows_are_those_of_each_row_alone(exact, dtype, device, poisoned):
    """Texts that are shorter than sinks, window and slots too; padding on either side, or none at all."""
    spec = parse(f"poly(0)+window({exact})/sum")
    lengths = [0, 1, 2, 7, 31, 100, 130]
    case = random_tensors(spec, Shape(len(lengths), 130, 2, 3, d=24, e=40), 0, dtype, device=device)
    q, k, v = (case.tensors[name] for name in "qkv")
    mask = torch.zeros(len(lengths), 130, dtype=torch.bool, device=device)
    for row, length in enumerate(lengths):
        mask[row, : length if row % 2 else None] = True
        mask[row, : 0 if row % 2 else 130 - length] = False
    call = {"key_padding_mask": mask, "return_state": True}
    assert plan(q, k, v, spec, **call).program.name == "kept keys"
    y, state = attention(q, k, v, spec, **call)
    assert state.count.tolist() == lengths
    for row, length in enumerate(lengths):
        assert not y[row][~mask[row]].any()
        if length == 0:
            empty = state[row].exact
            assert not any(getattr(empty, f"{name}_k").any() for name in ("recent", "sink"))
            continue
        own = [u[row, mask[row]][None] for u in (q, k, v)]
        near = NEAR[dtype]
        expected, alone = attention(*own, spec, return_state=True)
        torch.testing.assert_close(y[row, mask[row]][None], expected, rtol=near, atol=near)
        assert_same_state(state[row], alone)
    _, plain = attention(q, k, v, spec, **call, form="recurrent")
    assert_same_state(state, plain, 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("cuts", [(0, 90, 103, 140), (0, 2, 5, 75, 140), (0, 37, 101, 103, 140)])
def test_a_text_in_pieces_is_the_whole_text(exact, cuts, device, poisoned):
    spec = parse(f"poly(0)+window({exact})/sum")
    case = random_tensors(spec, Shape(batch=2, tokens=140, kv_heads=2, group=3, d=24, e=40), 0)
    case = case.map(lambda u: u.float().to(device))
    rows, state = [], None
    for start, stop in itertools.pairwise(cuts):
        piece = case.map(lambda u, a=start, b=stop: u[:, a:b])
        q, k, v = (piece.tensors[name] for name in "qkv")
        found = plan(q, k, v, spec, state=state, return_state=True)
        assert found.program.name == "kept keys", str(found)
        y, state = piece(state=state, return_state=True)
        rows.append(y)
    whole = case.map(lambda u: u.double())(form="parallel")
    torch.testing.assert_close(torch.cat(rows, 1).double(), whole, rtol=1e-4, atol=1e-5)
    _, plain = case(return_state=True, form="recurrent")
    assert_same_state(state, plain, 1e-4)
    again = piece(state=state)
    torch.testing.assert_close(again, piece(state=state, form="recurrent"), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_piece_after_many_exact_keys(device, poisoned, settings):
    """Keys of state and text are in several blocks of the lists, and most tiles need no mask."""
    settings(kept_keys, _LISTED=64)
    forget_plans()
    spec = parse("poly(0)+window(150,sinks=3,kept=170)/sum")
    case = random_tensors(spec, Shape(batch=2, tokens=560, kv_heads=1, group=2, d=16, e=16), 0)
    case = case.map(lambda u: u.float().to(device))
    before, piece = case.map(lambda u: u[:, :400]), case.map(lambda u: u[:, 400:])
    lengths = torch.tensor([400, 290], device=device)
    _, state = before(key_padding_mask=torch.arange(400, device=device) < lengths[:, None], return_state=True)
    y, found = piece(state=state, return_state=True)
    expected, plain = piece(state=state, return_state=True, form="recurrent")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert_same_state(found, plain, 1e-4)
    whole = case.map(lambda u: u[:1].double())(form="parallel")
    torch.testing.assert_close(y[:1].double(), whole[:, 400:], rtol=1e-4, atol=1e-5)
    forget_plans()


@torch.no_grad()
@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize("dtype", NEAR)
def test_padded_pieces_continue_from_texts_of_different_lengths(exact, dtype, device, poisoned):
    """Rows differ in how much of their windows and slots is filled, and in how many tokens follow."""
    spec = parse(f"poly(0)+window({exact})/sum*out")
    before, after = [0, 1, 2, 12, 40, 110], [5, 70, 0, 1, 66, 30]
    case = random_tensors(spec, Shape(6, 180, 2, 2, d=16, e=24), 0, dtype, device=device)
    t = torch.arange(110, device=device)
    first = case.map(lambda u: u[:, :110])
    _, state = first(key_padding_mask=t < torch.tensor(before, device=device)[:, None], return_state=True)
    piece, mask = case.map(lambda u: u[:, 110:]), t[:70] < torch.tensor(after, device=device)[:, None]
    q, k, v = (piece.tensors[name] for name in "qkv")
    call = {"key_padding_mask": mask, "state": state, "return_state": True}
    assert plan(q, k, v, spec, **call).program.name == "kept keys"
    y, found = piece(**call)
    assert found.count.tolist() == [a + b for a, b in zip(before, after, strict=True)]
    expected, plain = piece(**call, form="recurrent")
    near = NEAR[dtype]
    torch.testing.assert_close(y, expected, rtol=near, atol=near)
    assert_same_state(found, plain, 1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "name"), [(30, "kept keys"), (1, "exact step")])
def test_a_state_of_another_dtype_is_left_to_the_plain_form(tokens, name, device):
    """Also after a call of the same shapes, whose plan is cached, with a state in the dtype of q."""
    q, k, v = (torch.randn(1, 30, 2, 16, device=device, dtype=torch.float16) for _ in "qkv")
    _, state = attention(q, k, v, KEPT, return_state=True)
    assert state.exact is not None
    wide = dataclasses.replace(state, exact=state.exact.map(torch.Tensor.float))
    piece = [u[:, :tokens] for u in (q, k, v)]
    assert plan(*piece, KEPT, state=state).program.name == name
    assert "it needs exact keys in the dtype of q" in str(plan(*piece, KEPT, state=wide))
    assert state.signature() != wide.signature()
    expected = attention(*piece, KEPT, state=state)
    torch.testing.assert_close(attention(*piece, KEPT, state=wide), expected, rtol=2e-3, atol=2e-3)


def test_a_state_with_a_gradient_is_left_to_the_plain_form(device):
    q, k, v = (torch.randn(1, 30, 2, 16, device=device) for _ in "qkv")
    _, state = attention(q, k, v, KEPT, return_state=True)
    found = plan(q.requires_grad_(), k, v, KEPT, state=state, return_state=True)
    assert "it has no backward pass with a state" in str(found)
    assert found.backend == "torch"


def test_operators_are_registered_as_torch_wants_them(device):
    q, k, v = (torch.randn(1, h, 40, 16, device=device, requires_grad=True) for h in (4, 2, 2))
    exact = [8, 2, 6, 5, 0, 0]
    call = (q.detach(), k.detach(), 0.25, exact)
    assert set(torch.library.opcheck(key_lifetimes.traced, call).values()) == {"SUCCESS"}
    until, _ = key_lifetimes(*call)
    call = (q, k, v, until, 0.25, exact)
    assert set(torch.library.opcheck(attention_while_seen.traced, call).values()) == {"SUCCESS"}
    with torch.no_grad():
        o, lse = attention_while_seen(*call)
    back = (o, *(u.detach() for u in (q, k, v)), until, o, lse, 0.25, exact)
    assert set(torch.library.opcheck(attention_while_seen_backward.traced, back).values()) == {"SUCCESS"}


@pytest.fixture
def small_tiles(monkeypatch):
    """A step has several tiles and stretches of keys."""
    monkeypatch.setattr("maclaurin.programs.triton.exact_step.KEYS", 16)
    monkeypatch.setattr("maclaurin.programs.triton.exact_step.SCORES", 16)
    forget_plans()
    yield
    forget_plans()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "notation",
    [
        KEPT,
        "poly(0)+window(5,kept=3)/rms",
        "poly(0)+window(18,sinks=1,kept=20)/sum*out",
        "poly(0)+window(20,sinks=2)/sum",
    ],
)
def test_token_by_token_from_the_first(notation, device, poisoned):
    """The third one in several tiles of keys."""
    spec = parse(notation)
    tokens = 50 if spec.window.size > 9 else 30
    case = random_tensors(spec, Shape(batch=2, tokens=tokens, kv_heads=2, group=3, d=24, e=40), 0)
    case = case.map(lambda u: u.float().to(device))
    whole = case.map(lambda u: u.double())(form="parallel")
    y, state = case.map(lambda u: u[:, :1])(return_state=True)
    rows = [y]
    for t in range(1, tokens):
        token = case.map(lambda u, t=t: u[:, t : t + 1])
        if t == 1:
            q, k, v = (token.tensors[name] for name in "qkv")
            assert plan(q, k, v, spec, state=state, return_state=True).program.name == "exact step"
        y, state = token(state=state, return_state=True)
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1).double(), whole, rtol=1e-4, atol=1e-5)
    _, plain = case(return_state=True, form="chunked")
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(state.tensors()[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("programs", [264, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("exact", ["19,sinks=2,kept=37", "16,kept=16", "40,sinks=2", "33,kept=5"])
def test_a_step_is_the_plain_one(exact, dtype, programs, device, poisoned, monkeypatch):
    """The same state after it, for texts of different lengths; `programs` limits the number of stretches."""
    spec = parse(f"poly(0)+window({exact})/sum")
    monkeypatch.setattr("maclaurin.programs.triton.one_query._PROGRAMS", programs)
    shape = Shape(batch=1, tokens=150, kv_heads=2, group=3, d=24, e=40)
    case = random_tensors(spec, shape, 0, dtype, device=device)
    cuts = torch.tensor([0, 1, 3, 20, 60, 150], device=device)
    q, k, v = (case.tensors[name] for name in "qkv")
    with torch.no_grad():
        _, state = attention(q, k, v, spec, cu_seqlens=cuts, return_state=True)
        tokens = [[2 * u[:, n : n + 5].transpose(0, 1) for u in (q, k, v)] for n in range(4)]
        assert plan(*tokens[0], spec, state=state, return_state=True).program.name == "exact step"
        found = _after_each(tokens, spec, state)
        monkeypatch.setattr(ExactStep, "cannot", lambda *_: "off")
        forget_plans()
        assert plan(*tokens[0], spec, state=state, return_state=True).program.name == "token step"
        expected = _after_each(tokens, spec, state)
    near = 1e-5 if dtype is torch.float32 else 2e-3
    for (y, after), (rows, plain) in zip(found, expected, strict=True):
        torch.testing.assert_close(y, rows, rtol=near, atol=near)
        for name, tensor in plain.tensors().items():
            assert after.tensors()[name].dtype == tensor.dtype, name
            torch.testing.assert_close(after.tensors()[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def _after_each(tokens, spec, state):
    """Output and state after each token."""
    found = []
    for token in tokens:
        y, state = attention(*token, spec, state=state, return_state=True)
        found.append((y, state))
    return found


GROUPS = [parse(f"poly(0)+window({size})/sum") for size in ("9,sinks=3,kept=12", "20,sinks=1", "5,kept=40")]


HEADS = (2, 1, 1)
LAYER = LayerAttention(
    tuple(HeadGroup(heads, spec) for heads, spec in zip(((0, 1), (2,), (3,)), GROUPS, strict=True))
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_groups_of_heads_together_are_what_they_are_alone(dtype, device, poisoned):
    group = 2
    q, k, v = (
        torch.randn(2, 70, sum(HEADS) * n, 16, device=device, dtype=dtype).requires_grad_()
        for n in (group, 1, 1)
    )
    (found,) = plan(q, k, v, LAYER).plans
    assert found.program.name == "kept keys"
    y = attention(q, k, v, LAYER)
    direction = torch.randn_like(y)
    gradients = torch.autograd.grad(y, (q, k, v), direction)
    parts = [
        attention(*own, spec, form="chunked")
        for spec, *own in zip(
            GROUPS, q.split([n * group for n in HEADS], 2), k.split(HEADS, 2), v.split(HEADS, 2), strict=True
        )
    ]
    alone = torch.cat(parts, 2)
    torch.testing.assert_close(y, alone, rtol=0, atol=0)
    for found, expected in zip(gradients, torch.autograd.grad(alone, (q, k, v), direction), strict=True):
        torch.testing.assert_close(found, expected)  # keys are added up in another order


@torch.no_grad()
def test_states_of_groups_together_are_those_of_each(device, poisoned):
    q, k, v = (torch.randn(2, 70, n, 16, device=device) for n in (8, 4, 4))
    _, states = attention(q, k, v, LAYER, return_state=True)
    of_groups = zip(GROUPS, states, q.split([4, 2, 2], 2), k.split(HEADS, 2), v.split(HEADS, 2), strict=True)
    for spec, state, *own in of_groups:
        _, alone = attention(*own, spec, return_state=True, form="chunked")
        assert state.spec == spec
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(state.tensors()[name], tensor, rtol=0, atol=0)


@torch.no_grad()
def test_groups_continue_together_from_their_states_with_padding(device, poisoned, monkeypatch):
    """Texts of different lengths in three padded pieces; a step after them is each group's own."""
    q, k, v = (torch.randn(3, 131, n, 16, device=device) for n in (8, 4, 4))
    lengths = torch.tensor([[70, 1, 9], [0, 33, 40], [12, 20, 2]], device=device)
    calls, run_groups = [], KeptKeys.run_groups
    monkeypatch.setattr(
        KeptKeys, "run_groups", lambda self, call: calls.append(len(call.groups)) or run_groups(self, call)
    )
    states, alone, start = None, [None] * len(GROUPS), 0
    for real in lengths:
        stop = start + int(real.max())
        own = [u[:, start:stop] for u in (q, k, v)]
        call = {
            "key_padding_mask": torch.arange(stop - start, device=device) < real[:, None],
            "return_state": True,
        }
        (found,) = plan(*own, LAYER, state=states, **call).plans
        assert found.program.name == "kept keys"
        y, states = attention(*own, LAYER, state=states, **call)
        rows = []
        for number, (spec, heads) in enumerate(zip(GROUPS, ((0, 1), (2,), (3,)), strict=True)):
            queries = [2 * head + i for head in heads for i in range(2)]
            mine = [u[:, :, which] for u, which in zip(own, (queries, heads, heads), strict=True)]
            each, alone[number] = attention(*mine, spec, state=alone[number], **call, form="recurrent")
            rows.append(each)
            assert_same_state(states[number], alone[number], 1e-4)
        torch.testing.assert_close(y, torch.cat(rows, 2), rtol=1e-4, atol=1e-5)
        start = stop
    assert calls == [3, 3, 3]
    last = [u[:, -1:] for u in (q, k, v)]
    assert {each.program.name for each in plan(*last, LAYER, state=states).plans} == {"exact step"}
    attention(*last, LAYER, state=states, return_state=True)
    assert calls == [3, 3, 3]


def test_gates_of_groups_together_are_those_of_their_heads(device, poisoned):
    text = "0,2: poly(0)+window(9,kept=4)/sum*out; 1: poly(0)+window(5,sinks=2)/sum*out"
    q, k, v = (torch.randn(1, 40, n, 16, device=device) for n in (6, 3, 3))
    gate = torch.rand(1, 40, 6, device=device)
    assert len(plan(q, k, v, text).plans) == 1
    y = attention(q, k, v, text, output_gate=gate)
    for heads, spec in (([0, 2], GATED[0]), ([1], GATED[1])):
        queries = [2 * head + i for head in heads for i in range(2)]
        own = q[:, :, queries], k[:, :, heads], v[:, :, heads]
        expected = attention(*own, spec, output_gate=gate[:, :, queries], form="parallel")
        torch.testing.assert_close(y[:, :, queries], expected, rtol=1e-4, atol=1e-5)


GATED = ("poly(0)+window(9,kept=4)/sum*out", "poly(0)+window(5,sinks=2)/sum*out")


@torch.no_grad()
def test_a_model_reads_a_prompt_with_groups_together(device, monkeypatch):
    """Outputs and memories are those of one call per group; whole heads and heads with a tail stay apart."""
    layers = [
        "0: exp/sum; 1: poly(0)+window(8,sinks=1,kept=9)/sum; 2: poly(0)+window(12)/sum; "
        "3: taylor(1,about=mean)+window(4)/sum",
        "0,2: poly(0)+window(8,kept=4)/sum; *: poly(0)+window(6,sinks=2)/sum",
    ]
    torch.manual_seed(0)
    config = MaclaurinConfig(
        attention=layers, vocab_size=31, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    model = MaclaurinForCausalLM(config).to(device).eval()
    tokens = torch.randint(0, 31, (2, 24), device=device)
    found, calls, run_groups = {}, [], KeptKeys.run_groups
    monkeypatch.setattr(
        KeptKeys, "run_groups", lambda self, call: calls.append(len(call.groups)) or run_groups(self, call)
    )
    for name in ("together", "alone"):
        if name == "alone":
            monkeypatch.setattr(KeptKeys, "takes_groups", False)
        forget_plans()
        calls.clear()
        cache = MaclaurinCache(model.config, rollback=3)
        logits = model(tokens[:, :-1], past_key_values=cache).logits
        later = model(tokens[:, -1:], past_key_values=cache).logits
        found[name] = (logits, later, model(tokens, use_cache=False).logits, *cache.tensors().values())
        assert calls[:2] == ([2, 2] if name == "together" else [])
    forget_plans()
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_a_model_reads_prompts_of_uneven_length_and_more_of_them(device, monkeypatch):
    """Padded prompts, then padded turns after them, as each text alone."""
    layer = "0: exp/sum; 1: poly(0)+window(4,sinks=1,kept=9)/sum; 2,3: poly(0)+window(7)/sum"
    torch.manual_seed(0)
    config = MaclaurinConfig(
        attention=[layer], vocab_size=31, hidden_size=64, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    model = MaclaurinForCausalLM(config).to(device).eval()
    texts = [torch.randint(0, 31, (n,), device=device) for n in (40, 12, 27)]
    cuts = [(0, 25, 40), (0, 3, 12), (0, 20, 27)]
    calls, run_groups = [], KeptKeys.run_groups
    monkeypatch.setattr(
        KeptKeys, "run_groups", lambda self, call: calls.append(len(call.groups)) or run_groups(self, call)
    )
    cache, rows, seen = MaclaurinCache(model.config), [[] for _ in texts], []
    for turn in range(2):
        pieces = [text[cut[turn] : cut[turn + 1]] for text, cut in zip(texts, cuts, strict=True)]
        longest = max(map(len, pieces))
        tokens = torch.stack([torch.nn.functional.pad(u, (longest - len(u), 0)) for u in pieces])
        lengths = torch.tensor([len(u) for u in pieces], device=device)
        seen.append(torch.arange(longest, device=device) >= longest - lengths[:, None])
        logits = model(tokens, attention_mask=torch.cat(seen, 1).long(), past_key_values=cache).logits
        for row, piece in enumerate(pieces):
            rows[row].append(logits[row, longest - len(piece) :])
    assert calls == [2, 2]
    for text, found in zip(texts, rows, strict=True):
        alone = model(text[None], use_cache=False).logits[0]
        torch.testing.assert_close(torch.cat(found), alone, rtol=1e-4, atol=1e-4)
