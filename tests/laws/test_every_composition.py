"""Whatever the notation can say runs in every form it has, or is refused with the reason when parsed."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from maclaurin import AttentionSpec, SpecError
from maclaurin.spec import (
    L2,
    RMS,
    Cosine,
    Elu1,
    Exp,
    ForgetGate,
    Hermite,
    Identity,
    InputGate,
    Layer,
    Linear,
    OutputGate,
    Poly,
    Power,
    Relu,
    RowSum,
    RunningSum,
    Sigmoid,
    SlidingWindow,
    Taylor,
    VisibleKeys,
)
from maclaurin.testing import Shape, assert_same, random_tensors
from maclaurin.testing.tolerances import assert_same_gradients

kernels = st.sampled_from(
    [
        Exp(),
        Exp(0.5),
        *(Taylor(n, about) for n in range(4) for about in ("zero", "mean")),
        *(Hermite(n) for n in range(4)),
        *(Power(n) for n in range(4)),
        Poly((0.0,)),
        Poly((1.0, 0.0, 0.5)),
        *(Linear(feature) for feature in (Identity(), Elu1(), Relu(), Cosine())),
        Linear(Relu(), 0.5),
        Sigmoid(-1.0),
    ]
)
windows = st.sampled_from([None, None, SlidingWindow(1), SlidingWindow(3, 2), SlidingWindow(2, 1, 2)])
denominators = st.sampled_from(
    [
        None,
        RowSum(),
        RowSum(floor=0.5),
        RowSum(eps=0.1, detach=True),
        VisibleKeys(),
        RunningSum(floor=1.0, len=True),
    ]
)
norms = st.sampled_from([None, L2(), L2("dim"), RMS(), RMS(True), Layer()])


def maybe(part):
    return st.sampled_from([None, part])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.tuples(
        kernels,
        windows,
        maybe(InputGate()),
        maybe(ForgetGate()),
        denominators,
        maybe(OutputGate()),
        norms,
        maybe(OutputGate()),
    ),
    st.integers(0, 1000),
)
def test_it_runs_in_every_form_it_has(parts, seed):
    try:
        spec = AttentionSpec.of(*parts)
    except SpecError:
        assume(False)
        return
    case = random_tensors(
        spec, Shape(batch=2, tokens=7, kv_heads=1, group=2, d=2, e=3), seed
    ).with_gradients()
    y = case.output(form="parallel")
    assert bool(y.isfinite().all())
    direction = torch.randn_like(y)
    expected = case.gradients((y * direction).sum())
    blocked = [] if spec.window is not None and spec.window.kept else ["blocked"]
    forms = [*blocked, "auto", *(["chunked", "recurrent"] if spec.has_finite_state else [])]
    for form in forms:
        other = case.output(form=form, chunk_size=3)
        assert_same(other, y, form)
        assert_same_gradients(case.gradients((other * direction).sum()), expected, f"{form}: ")
    if spec.has_finite_state:
        _, state = case.tokens(0, 4)(return_state=True)
        assert_same(case.tokens(4, 7).output(state=state), y[:, 4:], "from a state")
        _, state = case.tokens(0, 6)(return_state=True)
        assert_same(case.tokens(6, 7).output(state=state), y[:, 6:], "one step")
    if spec.has_order_of_time:
        with pytest.raises(ValueError, match="causal=False"):
            case.output(causal=False)
