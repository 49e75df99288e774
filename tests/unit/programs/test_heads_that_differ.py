"""`attention` and `plan` of heads that differ: each group of heads gets what it would get alone."""

import pytest
import torch

import maclaurin
from maclaurin import InputError, attention
from maclaurin.models.recorded_step import step_has_fixed_work
from maclaurin.programs import triton as gpu
from maclaurin.spec.head_groups import HeadGroup, LayerAttention
from maclaurin.testing import assert_same

KEPT = "poly(0)+window(3,sinks=1,kept=4)/sum"
MIXED = f"1: taylor(2)*in/sum; 0,3: {KEPT}; 2: power(2)*forget*in/l2"
needs_gpu_table = pytest.mark.skipif(
    not gpu.INSTALLED or gpu.INTERPRETED, reason="the table of a GPU needs triton, compiled"
)


def tensors(tokens=9, heads=8, kv_heads=4, d=4, **options):
    return [torch.randn(2, tokens, n, d, **options) for n in (heads, kv_heads, kv_heads)]


def gates(tokens=9):
    return {"input_gate": torch.rand(2, tokens, 4), "log_forget": -torch.rand(2, tokens, 4)}


def alone(group, q, k, v, given, **options):
    queries = [2 * head + i for head in group.heads for i in range(2)]
    own = {name: gate[:, :, list(group.heads)] for name, gate in given.items() if name in group.spec.gates}
    heads = list(group.heads)
    found = attention(q[:, :, queries], k[:, :, heads], v[:, :, heads], group.spec, gates=own, **options)
    return queries, found


@pytest.mark.parametrize("as_text", [True, False], ids=["notation", "LayerAttention"])
def test_each_group_gets_what_it_gets_alone(as_text):
    torch.manual_seed(0)
    (q, k, v), given = tensors(), gates()
    layer = LayerAttention.read(MIXED, 4)
    y, states = attention(q, k, v, MIXED if as_text else layer, gates=given, return_state=True)
    assert_same(attention(q, k, v, layer, gates=given), y, "without states")
    (q2, k2, v2), later = tensors(2), gates(2)
    y2, after = attention(q2, k2, v2, layer, state=states, return_state=True, gates=later)
    for number, group in enumerate(layer.groups):
        queries, (expected, state) = alone(group, q, k, v, given, return_state=True)
        assert_same(y[:, :, queries], expected, str(group.spec))
        assert states[number].spec == group.spec
        queries, (expected, state) = alone(group, q2, k2, v2, later, state=state, return_state=True)
        assert_same(y2[:, :, queries], expected, f"{group.spec} continued")
        for name, tensor in state.tensors().items():
            torch.testing.assert_close(after[number].tensors()[name], tensor, msg=name)


def test_padding_packing_and_layout_are_those_of_each_group():
    (q, k, v), given = tensors(), gates()
    layer = LayerAttention.read(MIXED, 4)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    y = attention(q, k, v, layer, gates=given, key_padding_mask=mask)
    first = {name: gate[:1] for name, gate in given.items()}
    cuts = torch.tensor([0, 4, 9])
    packed = attention(q[:1], k[:1], v[:1], layer, gates=first, cu_seqlens=cuts)
    flipped = {name: gate.transpose(1, 2) for name, gate in given.items()}
    heads_first = attention(
        *(u.transpose(1, 2) for u in (q, k, v)), layer, gates=flipped, layout="bhtd", key_padding_mask=mask
    )
    assert_same(heads_first.transpose(1, 2), y, "heads first")
    for group in layer.groups:
        queries, expected = alone(group, q, k, v, given, key_padding_mask=mask)
        assert_same(y[:, :, queries], expected, f"{group.spec} padded")
        queries, expected = alone(group, q[:1], k[:1], v[:1], first, cu_seqlens=cuts)
        assert_same(packed[:, :, queries], expected, f"{group.spec} packed")


def test_a_call_that_no_group_can_run_is_refused():
    q, k, v = tensors()
    with pytest.raises(InputError, match=r"heads 0, 1, but k has 4 heads: name each of 0 to 3 once"):
        attention(q, k, v, LayerAttention((HeadGroup((0, 1), maclaurin.parse("exp/sum")),)))
    with pytest.raises(InputError, match="log_forget was given"):
        attention(q, k, v, f"0: exp/sum; *: {KEPT}", log_forget=torch.zeros(2, 9, 4))
    layer = LayerAttention.read(f"0: taylor(2)/sum; *: {KEPT}", 4)
    _, states = attention(q, k, v, layer, return_state=True)
    with pytest.raises(InputError, match=r"2 groups of heads, so state must be as many states.*got 1 states"):
        attention(q, k, v, layer, state=states[:1])
    with pytest.raises(InputError, match="got State"):
        attention(q, k, v, layer, state=states[0])
    over_heads = LayerAttention(
        (HeadGroup((0, 1), maclaurin.parse("exp/rms(heads)")), HeadGroup((2, 3), maclaurin.parse(KEPT)))
    )
    with pytest.raises(InputError, match="is over all heads"):
        attention(q, k, v, over_heads)
    with pytest.raises(InputError, match="k must be a tensor"):
        attention(q, None, v, MIXED)


def test_a_plan_names_the_heads_of_each_call():
    q, k, v = tensors()
    found = maclaurin.plan(q, k, v, MIXED)
    assert len(found.plans) == 3
    text = str(found)
    assert "heads 1: taylor(2)*in/sum on cpu: " in text
    assert f"heads 0,3: {KEPT} on cpu: " in text
    step = maclaurin.plan(*(u[:, :1] for u in (q, k, v)), MIXED, state=True)
    assert {plan.program.name for plan in step.plans} == {"token step"}
    assert step.has_fixed_work


@needs_gpu_table
@pytest.mark.parametrize("options", [{}, {"return_state": True}], ids=["y", "state"])
def test_groups_that_differ_in_their_window_are_one_call_on_a_gpu(options):
    q, k, v = (torch.empty(1, 4096, n, 64, dtype=torch.bfloat16, device="meta") for n in (12, 4, 4))
    text = (
        "0: taylor(2)/sum; 1,3: poly(0)+window(64,sinks=1,kept=256)/sum; 2: poly(0)+window(128,kept=64)/sum"
    )
    found = maclaurin.plan(q, k, v, text, device="cuda", **options)
    together, other = found.parts
    assert [group.heads for group in together[0]] == [(1, 3), (2,)]
    assert together[1].program.name == "kept keys"
    assert [group.heads for group in other[0]] == [(0,)]
    assert "heads 1,3 and 2, together: 1,3: poly(0)" in str(found)
    assert "no: it computes one spec for all heads" in str(found)
    step = maclaurin.plan(q[:, :1], k[:, :1], v[:, :1], text, device="cuda", state=True)
    assert [plan.program.name for plan in step.plans] == ["state step", "exact step", "exact step"]
    mask = torch.empty(1, 4096, dtype=torch.bool, device="meta")
    for given in ({"state": True}, {"key_padding_mask": mask}, {"state": True, "key_padding_mask": mask}):
        found = maclaurin.plan(q, k, v, text, device="cuda", **given, **options)
        assert [len(groups) for groups, _ in found.parts] == [2, 1], found
        assert found.parts[0][1].program.name == "kept keys"


@needs_gpu_table
def test_groups_run_together_only_if_that_is_cheaper():
    """Plain windows alone have a program of their own, which is faster for a short text."""
    q, k, v = (torch.empty(1, 256, n, 64, dtype=torch.bfloat16, device="meta") for n in (4, 2, 2))
    found = maclaurin.plan(q, k, v, "0: poly(0)+window(8)/sum; 1: poly(0)+window(9)/sum", device="cuda")
    alone = sum(plan.seconds(plan.program) for plan in found.plans)
    together = [plan for plan in found.plans if isinstance(plan.spec, LayerAttention)]
    assert [plan.program.name for plan in found.plans] == ["score mod", "score mod"], (alone, together)


@needs_gpu_table
@pytest.mark.parametrize(
    ("spec", "dtype", "head", "fixed"),
    [
        ("taylor(2)/sum", torch.bfloat16, 64, True),
        ("taylor(3)*forget/l2", torch.bfloat16, 16, True),
        ("poly(0)+window(64,kept=64)/sum", torch.bfloat16, 64, True),
        ("hermite(2)/len", torch.float64, 16, True),
        ("taylor(6)/sum", torch.bfloat16, 24, True),
        ("taylor(6)/sum", torch.float64, 24, False),
        ("exp/sum", torch.bfloat16, 64, True),
        ("exp/sum", torch.bfloat16, 256, True),
        ("exp/l2", torch.float64, 64, True),
        ("exp/len", torch.bfloat16, 64, False),
        ("exp(clamp=5)/sum", torch.bfloat16, 64, False),
        ("exp*forget/sum", torch.bfloat16, 64, False),
    ],
)
def test_the_plan_of_a_step_says_whether_it_can_be_recorded(spec, dtype, head, fixed):
    found = step_has_fixed_work(maclaurin.parse(spec), 2, 2, head, head, dtype, torch.device("cuda"))
    assert found is fixed
