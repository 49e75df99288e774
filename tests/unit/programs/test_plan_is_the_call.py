"""`plan` describes what `attention` does, and a cached plan skips no check."""

import pytest
import torch

import maclaurin
from maclaurin import attention
from maclaurin.errors import InputError
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
