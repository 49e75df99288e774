"""The table of programs: which one runs a call, what the others cost, and why they cannot."""

import pytest
import torch

import maclaurin
from maclaurin import InputError
from maclaurin.forms.stream import Inputs
from maclaurin.programs import triton as gpu
from maclaurin.programs.plan import PROGRAMS, find_plan
from maclaurin.programs.plan_cache import forget_plans
from maclaurin.programs.program import Call
from maclaurin.testing import Shape, assert_same, random_tensors

WINDOW = "taylor(2,about=mean)+window(64,sinks=1)/sum"
KEPT = "poly(0)+window(64,sinks=4,kept=192)/sum"
PADDED = torch.empty(2, 4096, dtype=torch.bool, device="meta")


def meta(tokens, *, batch=2, heads=16, d=64, dtype=torch.bfloat16):
    return tuple(torch.empty(batch, tokens, heads, d, dtype=dtype, device="meta") for _ in "qkv")


@pytest.mark.parametrize(
    ("spec", "tokens", "call", "chosen"),
    [
        ("exp/sum", 1024, {}, "stock softmax"),
        ("exp/len*out", 1024, {}, "stock softmax"),
        ("exp(clamp=5)/len", 1024, {}, "score mod"),
        ("exp*forget/sum", 1024, {}, "score mod"),
        ("poly(0)+window(64)/sum", 1024, {}, "score mod"),
        ("taylor(2)/sum", 1024, {}, "quadratic polynomial"),
        ("sigmoid(-6.93)", 1024, {}, "quadratic polynomial"),
        ("taylor(2)/sum", 65536, {}, "linear time"),
        ("taylor(2)/sum", 1024, {"return_state": True}, "linear time"),
        ("taylor(2)/sum", 1024, {"causal": False}, "quadratic polynomial"),
        ("taylor(2)/sum", 8192, {"causal": False}, "linear time"),
        (WINDOW, 4096, {}, "pairs about the mean"),
        (WINDOW, 65536, {}, "tail in chunks"),
        ("taylor(2,about=mean)/sum", 65536, {}, "tail in chunks"),
        ("linear(elu1)/sum", 4096, {}, "linear attention"),
        (WINDOW, 4096, {"state": True, "return_state": True}, "tail in chunks"),
        ("taylor(2)/sum", 1, {"state": True}, "state step"),
        ("power(2)*forget/sum", 1, {"state": True}, "state step"),
        (WINDOW, 1, {"state": True}, "window step"),
        ("taylor(2)/l2", 1, {"state": True}, "state step"),
        ("hermite(2)/len", 4096, {}, "balanced pairs"),
        ("hermite(2)/len", 65536, {}, "balanced chunks"),
        ("hermite(2)/len", 4096, {"return_state": True}, "plain chunked"),
        ("poly(0)+window(64,sinks=4,kept=192)/sum", 8192, {}, "kept keys"),
        ("poly(0)+window(64,sinks=4,kept=192)/sum", 8192, {"return_state": True}, "kept keys"),
        ("poly(0)+window(64,sinks=4)/sum", 8192, {"return_state": True}, "kept keys"),
        (KEPT, 4096, {"return_state": True, "key_padding_mask": PADDED}, "kept keys"),
        (KEPT, 4096, {"state": True, "return_state": True}, "kept keys"),
        (KEPT, 4096, {"state": True, "return_state": True, "key_padding_mask": PADDED}, "kept keys"),
        (KEPT, 2, {"state": True, "return_state": True}, "kept keys"),
        (KEPT, 4096, {"state": True}, "kept keys"),
        ("poly(0)+window(64,sinks=4)/rms", 512, {"state": True, "return_state": True}, "kept keys"),
        ("poly(0)+window(16,sinks=4,kept=48)/sum", 1, {"state": True}, "exact step"),
        ("poly(0)+window(512,sinks=4,kept=1536)/sum", 1, {"state": True}, "exact step"),
        ("poly(0)+window(2048,sinks=4)/sum", 1, {"state": True}, "exact step"),
        ("taylor(2,about=mean)+window(2048,sinks=1)/sum", 1, {"state": True}, "window step"),
        ("poly(0)+window(64,sinks=4)/sum", 1, {"state": True}, "exact step"),
    ],
)
@pytest.mark.skipif(not gpu.INSTALLED or gpu.INTERPRETED, reason="the table of a GPU needs triton, compiled")
def test_a_gpu_that_is_not_there_can_be_planned_for(spec, tokens, call, chosen):
    plan = maclaurin.plan(*meta(tokens), spec, device="cuda", **call)
    assert plan.program.name == chosen
    assert set(plan.costs) | set(plan.refusals) == set(PROGRAMS)
    text = str(plan)
    assert all(program.name in text for program in PROGRAMS)


@pytest.mark.parametrize(
    ("spec", "tokens", "options", "chosen", "copies"),
    [
        ("taylor(2)/sum", 32768, {}, "quadratic polynomial", False),
        ("taylor(2)/sum", 32768, {"max_seqlen": 32768}, "quadratic polynomial", False),
        ("taylor(2)/sum", 1 << 19, {"max_seqlen": 1 << 16}, "linear time", True),
        ("taylor(2)/sum", 1 << 19, {}, "linear time", True),
        ("taylor(2)/sum", 1 << 19, {"form": "parallel"}, "quadratic polynomial", False),
        ("taylor(2)/sum", 1 << 19, {"max_seqlen": 1024}, "quadratic polynomial", False),
        ("exp/sum", 32768, {}, "score mod", False),
        ("exp/l2", 32768, {}, "score mod", False),
        ("exp/len*out", 1 << 19, {}, "score mod", False),
        ("exp/l2", 32768, {"max_seqlen": 4096}, "score mod", False),
        ("exp/l2", 1 << 20, {"max_seqlen": 1 << 16}, "stock softmax", True),
        ("exp(clamp=5)/len", 32768, {}, "score mod", False),
        ("exp*forget/sum", 32768, {}, "score mod", True),
        ("exp/running", 32768, {}, "stock softmax", True),
        ("power(2)*forget/sum", 32768, {}, "quadratic polynomial", True),
    ],
)
@pytest.mark.skipif(not gpu.INSTALLED or gpu.INTERPRETED, reason="the table of a GPU needs triton, compiled")
def test_packed_sequences_are_read_in_place_unless_they_are_long(spec, tokens, options, chosen, copies):
    """By the longest, if that is known, or their mean: what the cuts are is not looked at.

    Rows are as long as the longest, if known: the copies are worth it for long rows with little padding.
    """
    cuts = torch.empty(17, dtype=torch.int32, device="meta")
    plan = maclaurin.plan(*meta(tokens, batch=1, heads=4), spec, device="cuda", cu_seqlens=cuts, **options)
    assert (plan.program.name, plan.copies) == (chosen, copies), plan
    assert "packed sequences copied to rows (" in str(plan)
    line = next(line for line in str(plan).splitlines() if line.startswith(" →"))
    assert ("packed sequences read in place" in line) is not copies
    assert set(plan.costs) | set(plan.refusals) == set(PROGRAMS)


@pytest.mark.skipif(not gpu.INSTALLED or gpu.INTERPRETED, reason="the table of a GPU needs triton, compiled")
def test_a_plan_says_why_packed_sequences_are_not_read_in_place():
    cuts = torch.empty(17, dtype=torch.int32, device="meta")
    plan = maclaurin.plan(*meta(4096, batch=1), "exp/running", device="cuda", cu_seqlens=cuts)
    assert "score mod             no: running adds up along a row" in str(plan)


def test_every_refusal_is_a_reason():
    plan = maclaurin.plan(*meta(64), "exp/sum", device="cpu")
    assert all(len(why) > 10 for why in plan.refusals.values())
    assert "no: it runs only on a GPU" in str(maclaurin.plan(*meta(64), "taylor(2)/sum", device="cpu"))


def test_the_plan_is_the_program_that_runs(monkeypatch):
    """attention runs the object that plan names."""
    forget_plans()
    case = random_tensors(maclaurin.parse("taylor(2)/sum"), Shape(), 0)
    q, k, v = (case.tensors[name] for name in "qkv")
    chosen = maclaurin.plan(q, k, v, "taylor(2)/sum").program
    ran = []
    real = type(chosen).run
    monkeypatch.setattr(type(chosen), "run", lambda self, call: ran.append(self) or real(self, call))
    case.output()
    assert ran == [chosen]


def test_a_plan_is_found_once_per_kind_of_call(monkeypatch):
    found = []
    monkeypatch.setattr(
        "maclaurin.programs.spec_call.find_plan", lambda call: found.append(call) or find_plan(call)
    )
    forget_plans()
    case = random_tensors(maclaurin.parse("taylor(2)*in/sum"), Shape(), 0)
    for _ in range(3):
        case.output()
    assert len(found) == 1
    case.tokens(0, 5).output()
    case.map(torch.Tensor.float).output()
    case.with_gradients().output()
    case.output(causal=False)
    assert len(found) == 5


@pytest.mark.parametrize("spec", ["taylor(2)/sum", "exp/sum", "poly(0)+window(3)/sum"])
def test_a_plan_is_found_once_for_padded_and_packed_calls(spec, monkeypatch):
    """Whatever the mask says; packed sequences are copied to rows, which have a plan for each shape."""
    found, checked = [], []
    monkeypatch.setattr(
        "maclaurin.programs.spec_call.find_plan", lambda call: found.append(call) or find_plan(call)
    )
    forget_plans()
    q, k, v = (torch.randn(2, 8, 2, 4) for _ in range(3))
    packed = [u.flatten(0, 1)[None] for u in (q, k, v)]
    cuts = torch.tensor([0, 3, 16])
    masks = [torch.arange(8) < torch.tensor([[8], [n]]) for n in (5, 3, 7)]

    def calls(mask):
        maclaurin.attention(q, k, v, spec, key_padding_mask=mask)
        maclaurin.attention(q[:, -2:], k, v, spec, key_padding_mask=mask)
        maclaurin.attention(*packed, spec, cu_seqlens=cuts)

    calls(masks[0])
    number = len(found)
    monkeypatch.setattr("maclaurin.programs.request.check_tensors", lambda *_: checked.append(1))
    for mask in masks:
        calls(mask)
    assert len(found) == number
    assert len(checked) == len(masks), "the cuts of packed sequences are checked each time"
    y = maclaurin.attention(q, k, v, spec, key_padding_mask=masks[1])
    assert_same(y[1:, :3], maclaurin.attention(q[1:, :3], k[1:, :3], v[1:, :3], spec), "the second row")
    with pytest.raises(InputError, match="key_padding_mask must be bool"):
        maclaurin.attention(q, k, v, spec, key_padding_mask=masks[0].int())


def test_what_a_program_prepares_is_kept_with_its_plan(monkeypatch):
    """Also for another scale, which no plan depends on."""
    forget_plans()
    case = random_tensors(maclaurin.parse("exp/len"), Shape(), 0)
    q, k, v = (case.tensors[name] for name in "qkv")
    chosen = maclaurin.plan(q, k, v, "exp/len").program
    prepared, real = [], type(chosen).prepared
    monkeypatch.setattr(
        type(chosen), "prepared", lambda self, call: prepared.append(call) or real(self, call)
    )
    for scale in (None, 0.25, 0.25, 1):
        y = maclaurin.attention(q, k, v, "exp/len", scale=scale)
        assert_same(y, maclaurin.attention(q, k, v, "exp/len", scale=scale, form="blocked"), str(scale))
    assert len(prepared) == 1


def test_a_remembered_plan_does_not_skip_checks():
    """A call that differs in anything that could be wrong is checked."""
    q = torch.randn(1, 6, 2, 4)
    maclaurin.attention(q, q, q, "exp/sum")
    with pytest.raises(InputError, match="dtype"):
        maclaurin.attention(q, q.double(), q, "exp/sum")
    with pytest.raises(InputError, match="no argument 'ouput_gate'"):
        maclaurin.attention(q, q, q, "exp/sum", ouput_gate=q[..., 0])
    with pytest.raises(InputError, match="Did you mean return_state"):
        maclaurin.attention(q, q, q, "exp/sum", return_stat=True)


def test_a_remembered_plan_does_not_skip_the_check_of_the_exact_keys():
    """bf16 keys of a state, after a step on a state with fp32 keys and the same shapes."""

    def tensors(tokens, dtype):
        return [torch.randn(1, tokens, 2, 8, dtype=dtype) for _ in range(3)]

    states = [
        maclaurin.attention(*tensors(6, dtype), WINDOW, return_state=True)[1]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    maclaurin.attention(*tensors(1, torch.float32), WINDOW, state=states[0])
    with pytest.raises(InputError, match="keeps keys in torch"):
        maclaurin.attention(*tensors(1, torch.float32), WINDOW, state=states[1])


@pytest.mark.parametrize(
    "spec",
    ["taylor(2)/sum", "exp(clamp=5)/len", "linear(elu1)/sum", "poly(0)+window(64,kept=192)/sum", WINDOW],
)
@pytest.mark.skipif(not gpu.INSTALLED or gpu.INTERPRETED, reason="the table of a GPU needs triton, compiled")
def test_fused_programs_refuse_texts_beyond_32_bit_addresses(spec):
    """T·H·e = 2³¹: offsets within one text do not fit in 32 bits, which these programs compute with."""
    long, short = (maclaurin.plan(*meta(t, batch=1), spec, device="cuda") for t in (1 << 21, 1 << 12))
    fused = [program for program in short.costs if program.backend == "triton"]
    assert fused
    assert all("32-bit addresses" in long.refusals[program] for program in fused)
    assert long.program.backend == "torch"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("spec", ["power(2)*forget/sum", "exp*forget/sum", "linear(elu1)*forget/sum", WINDOW])
def test_decay_and_windows_need_causal_attention_on_every_device(spec, device):
    with pytest.raises(InputError, match="undefined for causal=False"):
        maclaurin.plan(*meta(256), spec, device=device, causal=False)
    q, k, v = meta(256)
    call = Call(maclaurin.parse(spec), Inputs(q, k, v, {}), 1.0, torch.device(device), causal=False)
    assert all("undefined for causal=False" in (program.refuses(call) or "") for program in PROGRAMS)


@pytest.mark.parametrize(
    ("properties", "hip", "words"),
    [
        ({"major": 8, "shared_memory_per_block_optin": 166912}, None, "this GPU is A100"),
        ({"major": 12, "shared_memory_per_block_optin": 101376}, None, "this GPU is A100"),
        ({"major": 9, "shared_memory_per_block_optin": 65536}, "6.3", "NVIDIA"),
        ({"major": 9, "shared_memory_per_block_optin": 232448}, None, None),
    ],
)
@pytest.mark.skipif(not gpu.INSTALLED or gpu.INTERPRETED, reason="needs triton, compiled")
def test_other_gpus_get_plain_programs_and_a_reason(monkeypatch, properties, hip, words):
    """An A100 has too little shared memory for the tiles; MI300 counts its capability from 9 as well."""
    from types import SimpleNamespace

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = SimpleNamespace(name="A100", **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    gpu._why_not_on_gpu.cache_clear()
    try:
        why = gpu.why_not_on(torch.device("cuda"))
        assert why is None if words is None else words in why
        for spec in ("taylor(2)/sum", "exp(clamp=5)/len", "linear(elu1)/sum"):
            plan = maclaurin.plan(*meta(1024), spec, device="cuda")
            assert plan.backend == ("triton" if words is None else "torch")
            assert words is None or words in str(plan)
    finally:
        gpu._why_not_on_gpu.cache_clear()


@pytest.mark.parametrize(
    "spec",
    [
        *("exp/sum", "exp/l2", "exp/len", "taylor(2)/len", "sigmoid(-1)", "exp/running"),
        *("poly(0)+window(3,sinks=1)/sum", "taylor(2,about=mean)+window(2,sinks=2)/sum"),
    ],
)
def test_the_last_tokens_of_padded_keys(spec):
    """Fewer queries than keys, with padding anywhere: as the real tokens alone."""
    case = random_tensors(maclaurin.parse(spec), Shape(batch=2, tokens=9), 0)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 1, 1]]).bool()
    queries = {"q": case.tensors["q"][:, -2:]}
    garbage = {
        name: torch.where(mask.reshape(2, 9, *[1] * (t.dim() - 2)), t, torch.nan)
        for name, t in case.tensors.items()
        if name != "q"
    }
    y = maclaurin.attention(**queries, **garbage, spec=case.spec, key_padding_mask=mask)
    for row in range(2):
        alone = case.map(lambda t, row=row: t[row : row + 1, mask[row]]).output(form="parallel")
        assert_same(y[row : row + 1], alone[:, -2:], spec)
