"""The identities of the algebra, each a sentence, each with random inputs in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import maclaurin
from maclaurin import parse
from maclaurin.forms.certificate import certified_order, output_error, weight_error
from maclaurin.spec import Hermite, Sign, Taylor
from maclaurin.spec.polynomials import sign_of_polynomial
from maclaurin.testing import Shape, TensorCase, assert_same, random_tensors

SHAPE = Shape(batch=2, tokens=11, kv_heads=2, group=2, d=3, e=4)
NORMS = ["l2", "rms", "layer", "l2(scale=dim)"]


def case_of(notation, seed=0, **options):
    return random_tensors(parse(notation), SHAPE, seed, **options)


def rewritten(case, notation, **changed):
    spec = parse(notation)
    kept = {n: t for n, t in {**case.tensors, **changed}.items() if n in ("q", "k", "v", *spec.gates)}
    return TensorCase(spec, kept)


@pytest.mark.parametrize("form", ["parallel", "chunked"])
@pytest.mark.parametrize("causal", [True, False])
def test_softmax_is_torch_softmax(form, causal):
    case = case_of("exp/sum", size=4.0)
    q, k, v = (case.tensors[n].transpose(1, 2) for n in "qkv")
    own = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert_same(case.output(form=form, causal=causal), own, "softmax")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kernel", ["exp", "taylor(2)", "linear(elu1)", "exp(clamp=5)"])
def test_a_norm_ignores_every_positive_factor_of_its_row(kernel, norm):
    case = case_of(f"{kernel}/len*out/{norm}")
    bare = rewritten(case, f"{kernel}/{norm}").output(form="parallel")
    for before in ("/sum", "/len", "*out", "/len*out", "/sum*out"):
        with_part = rewritten(case, f"{kernel}{before}/{norm}")
        assert_same(with_part.output(form="parallel"), bare, f"{before}/{norm}")
        assert with_part.spec.simplified() == parse(f"{kernel}/{norm}")


@pytest.mark.parametrize("notation", ["exp/l2", "exp/rms", "exp/layer", "exp/sum"])
def test_scale_invariant_specs_survive_huge_scores(notation):
    case = case_of(notation, size=3000.0)
    assert case.output().isfinite().all()
    assert_same(case.output(form="chunked"), case.output(form="parallel"), notation)


@pytest.mark.parametrize("kernel", ["exp", "taylor(2)", "power(2)"])
def test_an_output_gate_may_stand_on_the_weights_or_on_the_output(kernel):
    case = case_of(f"{kernel}/len*out")
    bare = rewritten(case, f"{kernel}/len").output()
    assert_same(case.output(), bare * case.tensors["output_gate"][..., None], "gate on the output")


def test_an_output_gate_may_stand_on_the_query_of_an_odd_power():
    case = case_of("power(1)*out")
    gated = case.tensors["q"] * case.tensors["output_gate"][..., None]
    assert_same(case.output(), rewritten(case, "power(1)", q=gated).output(), "gate on the query")


@pytest.mark.parametrize("notation", ["exp*in/len", "taylor(2)*in/sum", "linear(elu1)*in/l2"])
def test_an_input_gate_is_a_factor_of_the_values(notation):
    case = case_of(notation)
    gated = case.tensors["v"] * case.tensors["input_gate"][..., None]
    assert_same(case.output(), rewritten(case, notation.replace("*in", ""), v=gated).output(), "gate on v")


@pytest.mark.parametrize(
    "notation",
    [
        "exp/sum",
        "exp/l2",
        "exp*forget/sum",
        "taylor(2,about=mean)/sum",
        "taylor(4,about=mean)/layer",
        "hermite(3)/len",
        "taylor(2,about=mean)+window(3,sinks=1)/sum",
        "poly(0)+window(4)/sum",
    ],
)
def test_a_constant_added_to_every_key_is_not_seen(notation):
    """q·(k + a) adds q·a to a whole row, which softmax and expansions about its mean ignore."""
    case = case_of(notation)
    shifted = case.tensors["k"] + torch.randn(SHAPE.d, dtype=torch.float64)
    assert_same(case.with_tensors(k=shifted).output(form="parallel"), case.output(form="parallel"), notation)


def test_expansions_about_zero_do_see_it():
    case = case_of("taylor(2)/sum")
    shifted = case.with_tensors(k=case.tensors["k"] + 1.0)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(shifted.output(), case.output(), "about zero")


@given(order=st.integers(0, 20).map(lambda n: 2 * n), x=st.floats(-60, 60))
def test_even_truncations_of_exp_are_positive(order, x):
    assert Taylor(order).sign is Sign.POSITIVE
    assert float(Taylor(order).weight(torch.tensor(x, dtype=torch.float64))) > 0


@given(order=st.integers(0, 10).map(lambda n: 2 * n + 1))
def test_odd_truncations_of_exp_have_a_root(order):
    assert Taylor(order).sign is Sign.INDEFINITE
    x = torch.tensor([-3.0 * order - 3, 0.0], dtype=torch.float64)
    low, high = Taylor(order).weight(x)
    assert low < 0 < high


@given(order=st.integers(0, 8))
def test_the_sign_found_for_taylor_by_its_stationary_points_is_the_known_one(order):
    series = [1 / math.factorial(n) for n in range(order + 1)]
    assert sign_of_polynomial(series) is Taylor(order).sign


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_hermite_weights_sum_to_one(order, form):
    case = case_of(f"hermite({order})/len")
    ones = case.with_tensors(v=torch.ones_like(case.tensors["v"]))
    assert_same(ones.output(form=form), torch.ones_like(ones.output()), "sum of weights")


def test_hermite_2_is_identity_6():
    x = torch.randn(5, 40, dtype=torch.float64)
    kernel = Hermite(2)
    weights = kernel.weight(x, kernel.statistics([(x**n).sum(-1, keepdim=True) for n in range(3)]))
    centred = x - x.mean(-1, keepdim=True)
    variance = x.var(-1, correction=0, keepdim=True)
    assert_same(weights, 1 - variance / 2 + centred + centred**2 / 2, "identity 6")


@pytest.mark.parametrize("size", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
def test_the_truncated_series_is_within_its_certificate(size, tolerance):
    case = case_of("exp/sum", size=size)
    q, k = (case.tensors[n].norm(dim=-1).amax() for n in "qk")
    certificate = certified_order(float(q * k) / math.sqrt(SHAPE.d), tolerance)
    y = rewritten(case, f"taylor({certificate.order})/sum").output(form="parallel")
    error = float((y - case.output()).abs().amax() / case.tensors["v"].abs().amax())
    assert error <= certificate.error_bound <= tolerance


@given(order=st.integers(0, 30), bound=st.floats(0.01, 20), part=st.floats(-1, 1))
def test_every_weight_is_within_the_certified_relative_error(order, bound, part):
    x = torch.tensor(part * bound, dtype=torch.float64)
    error = float((Taylor(order).weight(x) - x.exp()).abs() / x.exp())
    assert error <= weight_error(order, bound)


def test_softmax_runs_as_a_recurrent_network_and_says_so():
    case = random_tensors(parse("exp/sum"), Shape(1, 12, 2, 1, 2, 3), 0, size=0.5)
    with pytest.warns(maclaurin.SeriesNotice, match="series up to order"):
        y, state = case(form="recurrent", return_state=True, tolerance=1e-10)
    error = float((y - case.output()).abs().amax() / case.tensors["v"].abs().amax())
    assert error <= state.certificate.error_bound <= 1e-10
    assert output_error(state.certificate.order - 2, state.certificate.score_bound) > 1e-10


@pytest.mark.parametrize("spec", ["taylor(2,about=mean)+window(4,sinks=1)/sum", "taylor(2)+window(3)/sum"])
def test_a_window_longer_than_the_text_is_softmax(spec):
    case = case_of("exp/sum")
    long = rewritten(case, spec.replace("window(4", "window(64").replace("window(3", "window(64"))
    for form in ("parallel", "chunked", "recurrent"):
        assert_same(long.output(form=form), case.output(), f"{form}: all keys exact")


def test_the_state_is_constant_in_the_length_of_the_text():
    sizes = {
        tokens: random_tensors(
            parse("taylor(2,about=mean)+window(4,sinks=1)*forget/sum"), Shape(tokens=tokens), 0
        )
        .state()
        .nbytes
        for tokens in (1, 7, 150)
    }
    assert len(set(sizes.values())) == 1


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_a_tiny_row_sum_has_no_gradient_where_no_loss_looks(form):
    """y/D overflows under D = 2e-37; a loss over other rows still has finite gradients."""
    q, k = (torch.ones(1, 2, 1, 1, requires_grad=True) for _ in "qk")
    v = torch.tensor([1.0, 1e3]).view(1, 2, 1, 1)
    small = torch.tensor([1.0, 1e-37]).view(1, 2, 1, 1)
    y = maclaurin.attention(q * small, k, v, "linear(relu)/sum", causal=True, form=form, chunk_size=1)
    first = torch.autograd.grad(y[:, 0].sum(), (q, k))
    assert all(gradient.isfinite().all() for gradient in first)
