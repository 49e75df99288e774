"""`plan` describes what `attention` does, and a cached plan skips no check."""

import re

import pytest
import torch

import maclaurin
from maclaurin import attention
from maclaurin.errors import InputError, MaclaurinError
from maclaurin.programs.series import SeriesNotice


def some(tokens=6, heads=2, **options):
    return [torch.randn(1, tokens, heads, 4, **options) for _ in range(3)]


@pytest.mark.filterwarnings(f"ignore::{SeriesNotice.__module__}.SeriesNotice")
def test_exp_with_a_state_is_planned_as_its_series():
    torch.manual_seed(0)
    q, k, v = (u / 4 for u in some())
    _, state = attention(q, k, v, "exp/sum", return_state=True)
    asked = [{"return_state": True}, {"form": "recurrent"}, {"state": True}, {"state": state}]
    for options in asked:
        plan = maclaurin.plan(q, k, v, "exp/sum", **options)
        assert "runs as its series taylor(" in str(plan)
        assert plan.program.name != "stock softmax"
    assert plan.spec == state.spec
    step = maclaurin.plan(q[:, :1], k[:, :1], v[:, :1], "exp/sum", state=state, return_state=True)
    assert step.program.name == "token step"


def test_the_series_of_tensors_without_values_needs_a_bound():
    tensors = some(device="meta")
    with pytest.raises(InputError, match="pass score_bound"):
        maclaurin.plan(*tensors, "exp/sum", return_state=True)
    assert "taylor(" in str(maclaurin.plan(*tensors, "exp/sum", state=True, score_bound=2.0, device="cpu"))


def test_what_attention_refuses_has_no_plan():
    q, k, v = some()
    with pytest.raises(InputError, match="6 queries and 3 keys"):
        maclaurin.plan(q, k[:, :3], v[:, :3], "taylor(2)/sum")
    with pytest.raises(InputError, match="log_forget must be"):
        maclaurin.plan(q, k, v, "taylor(2)*forget/sum", log_forget=torch.zeros(1, 5, 2))
    with pytest.raises(InputError, match=r"has no \*in"):
        maclaurin.plan(q, k, v, "taylor(2)/sum", gates={"input_gate": torch.zeros(1, 6, 2)})
    with pytest.raises(InputError, match="key_padding_mask must be bool"):
        maclaurin.plan(q, k, v, "taylor(2)/sum", key_padding_mask=torch.ones(1, 5))
    assert maclaurin.plan(q, k, v, "taylor(2)/sum", key_padding_mask=torch.ones(1, 6).bool()).program


def test_kept_keys_with_old_keys_are_refused_without_circular_advice():
    q, k, v = some(5)
    for form in ("chunked", "parallel", "recurrent"):
        with pytest.raises(InputError, match="pass a state instead of old keys") as problem:
            attention(q[:, -2:], k, v, "taylor(2)+window(2,kept=1)/sum", form=form)
        assert "form='parallel'" not in str(problem.value)


def test_axes_that_look_swapped_are_reported_also_after_a_call_that_names_its_layout():
    q = torch.randn(1, 4, 128, 8)
    attention(q, q, q, "exp/sum", layout="bthd")
    with pytest.raises(InputError, match="layout"):
        attention(q, q, q, "exp/sum")


def test_the_second_call_checks_options_like_the_first():
    q, k, v = some()
    scale = torch.tensor(0.3)
    first, second = (attention(q, k, v, "exp/sum", scale=scale) for _ in range(2))
    torch.testing.assert_close(first, second)
    attention(q, k, v, "taylor(2)/sum", form="chunked", chunk_size=2)
    with pytest.raises(InputError, match="chunk_size must be a whole number"):
        attention(q, k, v, "taylor(2)/sum", form="chunked", chunk_size=2.0)
    with pytest.raises(InputError, match="there is no form"):
        attention(q, k, v, "taylor(2)/sum", form=["chunked"])
    with pytest.raises(InputError, match="cu_seqlens"):
        attention(q, k, v, "taylor(2)/sum", cu_seqlens=[0, 6])


@pytest.mark.parametrize("window", ["window(3)", "window(2,kept=2)", "window(3,sinks=1)"])
def test_a_large_later_forget_gate_does_not_reach_earlier_rows(window):
    torch.manual_seed(0)
    q, k, v = some(12)
    gate = torch.full((1, 12, 2), -0.1)
    later = gate.clone()
    later[:, 5:] = 50
    for form in ("parallel", "chunked", "recurrent"):
        options = {"form": form, "chunk_size": 4}
        before, after = (
            attention(q, k, v, f"taylor(2)+{window}*forget/sum", log_forget=f, **options)[:, :5]
            for f in (gate, later)
        )
        torch.testing.assert_close(after, before)


@pytest.mark.slow
@pytest.mark.filterwarnings(f"ignore::{SeriesNotice.__module__}.SeriesNotice")
def test_the_series_of_exp_runs_between_graphs_and_says_why_not_in_one():
    torch.manual_seed(0)
    q, k, v = (u / 4 for u in some())
    options = {"return_state": True, "score_bound": 3.0}
    _, state = attention(q, k, v, "exp/sum", **options)
    token = [u[:, :1] for u in (q, k, v)]

    def step(q, k, v):
        return attention(q, k, v, "exp/sum", state=state, **options)[0]

    torch.testing.assert_close(torch.compile(step, backend="eager")(*token), step(*token))
    torch.compiler.reset()
    with pytest.raises(Exception, match="whose order is read from the scores, so one graph cannot hold it"):
        torch.compile(step, backend="eager", fullgraph=True)(*token)


# ------------------------------------------------------------------------- advice in refusals


@pytest.mark.parametrize("form", ["parallel", "blocked", "chunked", "recurrent"])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"return_state": True}], ids=str)
@pytest.mark.parametrize("queries", [6, 1], ids=["as many queries", "fewer queries"])
@pytest.mark.parametrize(
    "spec", ["taylor(2)/sum", "taylor(2)+window(2,kept=1)/sum", "exp*forget/sum", "hermite(2)/len"]
)
def test_advice_is_never_refused(spec, queries, options, form):
    q, k, v = some()
    gates = {"log_forget": -torch.rand(1, 6, 2)} if "forget" in spec else {}
    call = {**options, "gates": gates}
    try:
        attention(q[:, -queries:], k, v, spec, form=form, **call)
    except InputError as problem:
        for other in re.findall(r"'(\w+)'", str(problem)) if "use form=" in str(problem) else []:
            attention(q[:, -queries:], k, v, spec, form=other, **call)


@pytest.mark.parametrize("options", [{"return_state": True}, {"form": "recurrent"}], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("queries", [6, 1], ids=["as many queries", "fewer queries"])
@pytest.mark.parametrize("spec", ["exp*forget/sum", "exp(clamp=5)*forget/sum", "exp(clamp=5)/sum"])
def test_advice_to_do_without_a_state_is_never_refused(spec, queries, causal, options):
    torch.manual_seed(0)
    q, k, v = (8 * u for u in some())
    gates = {"log_forget": -torch.rand(1, 6, 2)} if "forget" in spec else {}
    call = {"gates": gates, "causal": causal}
    with pytest.raises(MaclaurinError) as problem:
        attention(q[:, -queries:], k, v, spec, **options, **call)
    if "form=" not in str(problem.value):
        assert "undefined for causal=False" in str(problem.value)
        return
    for form in re.findall(r"'(\w+)'", str(problem.value)):
        attention(q[:, -queries:], k, v, spec, form=form, **call)


def test_advice_names_the_forms_that_run():
    q, k, v = some()
    with pytest.raises(InputError, match=r"it is causal: use form='chunked'\.$"):
        attention(q, k, v, "taylor(2)/sum", causal=False, return_state=True, form="recurrent")
    with pytest.raises(InputError, match=r"it is causal: use form='parallel' or 'blocked' or 'chunked'\.$"):
        attention(q, k, v, "taylor(2)/sum", causal=False, form="recurrent")
    for form in ("parallel", "blocked"):
        with pytest.raises(
            InputError, match=r"carries no state \(got 1 queries and 6 keys\): pass a state inst"
        ):
            attention(q[:, -1:], k, v, "taylor(2)/sum", return_state=True, form=form)
        with pytest.raises(InputError, match=r"carries no state: use form='chunked' or 'recurrent'\.$"):
            attention(q, k, v, "taylor(2)/sum", return_state=True, form=form)


def test_a_mask_of_keys_is_not_applied_to_fewer_queries():
    """exp with a state needs one query per key; with a mask, the error must say that too."""
    q, k, v = some()
    mask = torch.ones(1, 6, dtype=torch.bool)
    for call in (attention, maclaurin.plan):
        with pytest.raises(InputError, match=r"needs one query per key \(got 1 queries and 6 keys\)"):
            call(q[:, -1:], k, v, "exp/sum", return_state=True, key_padding_mask=mask)


@pytest.mark.parametrize(
    "spec", ["exp/sum", "exp/l2", "exp/sum(eps=1)", "exp/sum(floor=0.1)", "exp/sum(detach)"]
)
@pytest.mark.parametrize(("heads", "d", "e"), [(1, 8, 8), (2, 8, 8), (1, 3, 4)])
@pytest.mark.parametrize("scaled", ["q", "k"])
def test_huge_scores_of_later_tokens_leave_earlier_gradients_alone(spec, heads, d, e, scaled):
    """torch's backward computes weights anew: these overflow, and rows without gradients give NaN."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, h, n).requires_grad_() for h, n in ((heads, d), (1, d), (1, e)))
    gradients = []
    for factor in (1.0, 1e9):
        large = {"q": q, "k": k}
        large[scaled] = torch.cat([large[scaled][:, :20], large[scaled][:, 20:] * factor], 1)
        y = attention(large["q"], large["k"], v, spec)
        assert y.isfinite().all()
        gradients.append(torch.autograd.grad(y[:, :20].square().sum(), (q, k, v)))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found[:, :20], expected[:, :20])
        assert not found[:, 20:].any()


# ---------------------------------------------------------------------------------- wrong options


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "cached plan"])
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"scale": "a"}, "scale must be a number, got 'a'"),
        ({"scale": torch.ones(2)}, r"scale must be a number, got a tensor \[2\]"),
        ({"gates": 3}, "gates must be a dict of tensors by name.*not int"),
        ({"state_budget": "1GB"}, "state_budget must be a whole number.*got '1GB'"),
        ({"return_state": True, "state_budget": "1GB"}, "state_budget must be a whole number"),
    ],
)
def test_wrong_options_get_one_clear_error(wrong, problem, warm):
    q, k, v = some()
    if warm:
        attention(q, k, v, "taylor(2)/sum", return_state="return_state" in wrong)
    for call in (attention, maclaurin.plan):
        with pytest.raises(InputError, match=problem):
            call(q, k, v, "taylor(2)/sum", **wrong)


def test_wrong_gates_with_heads_first_get_one_clear_error():
    q, k, v = (u.transpose(1, 2) for u in some())
    for gate, came in (([1.0], "list"), (torch.ones(2, 2), r"\[2, 2\]")):
        with pytest.raises(InputError, match=rf"input_gate must be a tensor.*got {came}"):
            attention(q, k, v, "taylor(2)*in/sum", input_gate=gate, layout="bhtd")


def test_a_plan_takes_a_layout():
    q, k, v = (torch.randn(1, 3, 20, 4) for _ in range(3))
    plan = maclaurin.plan(q, k, v, "taylor(2)/sum", layout="bhtd", return_state=True)
    tokens_first = maclaurin.plan(*(u.transpose(1, 2) for u in (q, k, v)), "taylor(2)/sum", return_state=True)
    assert (plan.program, plan.state_bytes) == (tokens_first.program, tokens_first.state_bytes)


@pytest.mark.parametrize(
    "spec", ["exp/sum", "exp/len", "taylor(2)/sum", "taylor(2)+window(2)/sum", "hermite(2)/len"]
)
def test_tensors_without_values_give_shapes(spec):
    q, k, v = some(device="meta")
    y = attention(q, k, v, spec)
    assert (y.shape, y.device.type) == (q.shape, "meta")
