"""The notation: what parses, how it prints, and what a mistake is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin import AttentionSpec, NotationError, SpecError, catalogue, parse, resolve
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

NAMED = [
    "exp/sum",
    "exp/l2",
    "exp/len*out",
    "exp(clamp=5)*in/len*out/layer",
    "exp/l2*out",
    "taylor(4)/sum",
    "taylor(2,about=mean)/sum",
    "taylor(2,about=mean)+window(64,sinks=1)/sum",
    "power(2)*forget/sum",
    "linear(elu1)/sum",
    "linear(relu)/l2",
    "linear(identity)",
    "poly(1,1,0.5)/sum",
    "hermite(2)/len",
    "sigmoid(-6.93)",
    "exp(clamp=5)/sum(floor=1,detach)",
    "exp(clamp=5)/running(floor=1,len)",
    "linear(relu,scale=1)/sum(eps=1e-08)",
    "linear(identity)*in*forget/rms(heads)",
    "exp/l2(scale=dim)",
]


@pytest.mark.parametrize("text", NAMED)
def test_the_notation_is_what_it_prints(text):
    assert str(parse(text)) == text


def test_spaces_do_not_matter():
    assert parse(" taylor( 2 , about = mean ) / sum ") == parse("taylor(2,about=mean)/sum")


def test_numbers_are_numbers_however_they_are_written():
    assert parse("exp(clamp=5.0)/len") == parse("exp(clamp=5)/len")
    assert hash(parse("poly(1,1.0,5e-1)/sum")) == hash(parse("poly(1,1,0.5)/sum"))


numbers = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 6))
positive = st.floats(1e-8, 100)
kernels = st.one_of(
    st.builds(Exp, st.none() | numbers),
    st.builds(Taylor, st.integers(0, 40), st.sampled_from(["zero", "mean"])),
    st.builds(Hermite, st.integers(0, 12)),
    st.builds(Power, st.integers(0, 12)),
    st.builds(Poly, st.lists(numbers, min_size=1, max_size=6).map(tuple)),
    st.builds(Linear, st.sampled_from([Identity(), Elu1(), Relu(), Cosine()]), st.none() | numbers),
    st.builds(Sigmoid, numbers),
)
denominators = st.one_of(
    st.none(),
    st.builds(RowSum, st.none() | positive, st.none() | positive, st.booleans()),
    st.just(VisibleKeys()),
    st.builds(RunningSum, st.none() | positive, st.booleans()),
)
norms = (
    st.none() | st.builds(L2, positive | st.just("dim")) | st.builds(RMS, st.booleans()) | st.just(Layer())
)


@given(
    st.tuples(
        kernels,
        st.none() | st.builds(SlidingWindow, st.integers(1, 99), st.integers(0, 9)),
        st.none() | st.just(InputGate()),
        st.none() | st.just(ForgetGate()),
        denominators,
        st.none() | st.just(OutputGate()),
        norms,
        st.none() | st.just(OutputGate()),
    )
)
def test_every_spec_that_can_be_built_round_trips(parts):
    try:
        spec = AttentionSpec.of(*parts)
    except SpecError:
        return
    assert parse(str(spec)) == spec
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert spec.simplified().simplified() == spec.simplified()
    assert spec.formula
    assert spec.latex.startswith("y_{t} = ")
    assert spec.recurrence


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("exq/sum", 0, "Did you mean exp?"),
        ("exp/sun", 4, "Did you mean sum?"),
        ("exp*ot", 4, "there is no gate 'ot'"),
        ("exp(clamp=5", 3, "never closed"),
        ("exp(clamp=)/sum", 10, "needs a value"),
        ("exp/l2/sum", 6, "is out of order"),
        ("exp/sum/len", 7, "one denominator"),
        ("exp sum", 4, "expected one of"),
        ("exp/", 4, "found the end"),
        ("", 0, "found the end"),
        ("taylor(2,abut=mean)/sum", 9, "Did you mean about?"),
        ("taylor(x)/sum", 7, "whole number"),
        ("taylor(-1)/sum", 7, "whole number"),
        ("taylor/sum", 0, "needs order"),
        ("linear(rely)/l2", 7, "relu"),
        ("linear(relu(3))/l2", 12, "does not take '3'"),
        ("window(3)/sum", 0, "+window is a window, and a kernel is expected"),
        ("taylor(2,about=maen)/sum", 15, "Did you mean mean?"),
        ("taylor(171)/sum", 7, "≤ 170"),
        ("exp/sum(eps=-1)", 12, "a positive number"),
        ("taylor(3)*in/sum", 12, "can vanish"),
        ("power(2)*out+window(3)", 12, "is out of order"),
        ("exp(clamp=nan)", 10, "a number"),
        ("exp(5,clamp=5)", 6, "twice"),
        ("exp(clamp=5,clamp=6)", 12, "twice"),
    ],
)
def test_a_mistake_gets_a_caret_and_a_reason(text, position, words):
    with pytest.raises(NotationError) as caught:
        parse(text)
    assert caught.value.position == position
    assert words in str(caught.value)
    *_, shown, caret = str(caught.value).split("\n")
    assert shown == f"    {text}"
    assert caret == " " * (4 + position) + "^"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("taylor(3)/sum", "Use an even order (taylor(2)/sum, taylor(4)/sum) or a norm: taylor(3)/l2."),
        ("power(3)/sum", "power(3)/l2"),
        ("linear(identity)/sum", "linear(identity)/l2"),
        ("poly(1,1)/sum", "can be negative"),
        ("taylor(3,about=mean)/sum", "can be negative"),
        ("taylor(2,about=mean)/len", "needs a row sum or a norm"),
        ("taylor(2,about=mean)/sum(floor=1)", "plain row sum"),
        ("power(2)+window(8)/sum", "does not approximate e^x"),
        ("exp+window(8)/sum", "window alone"),
        ("exp*out/l2*out", "keep the one after it"),
    ],
)
def test_parts_that_mean_nothing_together_are_refused_with_an_alternative(text, words):
    with pytest.raises(SpecError, match=words.replace("(", r"\(").replace(")", r"\)").replace("^", r"\^")):
        parse(text)


def test_a_floor_makes_any_row_sum_safe():
    assert not parse("taylor(3)/sum(floor=1)").denominator_can_vanish


def test_a_typo_in_a_name_gets_the_nearest_names():
    with pytest.raises(NotationError, match="softmax"):
        resolve("softmx")
    with pytest.raises(ValueError, match="gated_softmax"):
        catalogue["gated_sofmax"]


def test_json_with_an_unknown_key_is_an_error():
    exp = {"family": "kernel", "name": "exp"}
    with pytest.raises(SpecError, match="nothing else"):
        AttentionSpec.from_dict({"parts": [exp], "gate": True})
    with pytest.raises(SpecError, match="no option 'clump'"):
        AttentionSpec.from_dict({"parts": [{**exp, "clump": 5}]})
    with pytest.raises(SpecError, match="there is no kernel 'sin'"):
        AttentionSpec.from_dict({"parts": [{**exp, "name": "sin"}]})


@pytest.mark.parametrize(
    "data",
    [
        {"parts": "exp"},
        {"parts": []},
        {"parts": ["exp"]},
        {"parts": [{"name": "exp"}]},
        {"parts": [{"family": "kernel", "name": "poly", "series": 3}]},
        {"parts": [{"family": "kernel", "name": ["exp"]}]},
        {
            "parts": [
                {"family": "kernel", "name": "exp"},
                {"family": "denominator", "name": "sum", "detach": "no"},
            ]
        },
        {"parts": [{"family": "kernel", "name": "exp"}, {"family": "norm", "name": "sum"}]},
        {"parts": [{"family": "denominator", "name": "sum"}]},
    ],
    ids=str,
)
def test_json_of_the_wrong_kind_is_a_clear_error(data):
    with pytest.raises(SpecError):
        AttentionSpec.from_dict(data)


def test_parts_in_the_wrong_place_are_refused():
    with pytest.raises(SpecError, match="begins with a kernel"):
        AttentionSpec.of(L2(), Exp())
    with pytest.raises(SpecError, match="is out of order"):
        AttentionSpec.of(Exp(), L2(), RowSum())
    with pytest.raises(SpecError, match="made of parts"):
        AttentionSpec.of(Exp(), "in")  # type: ignore[arg-type]


def test_gates_on_keys_are_written_in_one_order():
    assert parse("power(2)*forget*in/sum") == parse("power(2)*in*forget/sum")


def test_an_error_survives_pickling():
    import pickle

    with pytest.raises(NotationError) as caught:
        parse("exp/sun")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.position == 4


def test_parts_built_in_python_obey_the_rules_of_the_notation():
    with pytest.raises(SpecError, match="whole number"):
        Taylor(-1)
    with pytest.raises(SpecError, match="zero or mean"):
        Taylor(2, "median")
    with pytest.raises(SpecError, match="positive"):
        L2(0.0)


def test_what_a_spec_knows():
    spec = parse("exp(clamp=5)*in/len*out/layer")
    assert spec.gates == ("input_gate", "output_gate")
    assert spec.cancelled_parts == (VisibleKeys(), OutputGate())
    assert str(spec.simplified()) == "exp(clamp=5)*in/layer"
    assert not spec.has_finite_state
    based = parse("taylor(2)/sum")
    assert [based.features(d) for d in (16, 32, 64, 128)] == [153, 561, 2145, 8385]
    assert [parse("taylor(3)/l2").features(d) for d in (16, 32, 64, 128)] == [969, 6545, 47905, 366145]
    assert based.state_size(16, 64) == 153 * 65
    assert parse("linear(identity)").state_size(16, 64) == 16 * 64
    assert parse("power(2)/sum").denominator_can_vanish
    assert not based.denominator_can_vanish
    assert str(parse("poly(1,1,0.5)/sum").simplified()) == "taylor(2)/sum"
    assert str(parse("power(1)/l2").simplified()) == "linear(identity)/l2"
    assert str(parse("poly(1,1,0.5,0)/sum").simplified()) == "taylor(2)/sum"
    assert str(parse("taylor(0,about=mean)/sum").simplified()) == "taylor(0)/len"
    assert (
        str(parse("taylor(0,about=mean)+window(3)/sum").simplified()) == "taylor(0,about=mean)+window(3)/sum"
    )


def test_small_numbers_are_powers_of_ten_in_latex():
    assert r"+ 10^{-7}}" in parse("taylor(2)/sum(eps=1e-7)").latex
    assert r"1.1\cdot 10^{-6} + x_{ts}" in parse("poly(11e-7,1)").latex
    assert "e-0" not in parse("poly(1,2.5e-8)").latex


def test_a_norm_over_heads_must_be_per_head():
    with pytest.raises(SpecError, match="a norm per head"):
        parse("taylor(2,about=mean)/rms(heads)")
