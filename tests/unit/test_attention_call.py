"""The one call: bad input, dtypes, queries that differ from keys, auto, torch.compile."""

import itertools
import pickle
import warnings

import pytest
import torch

import maclaurin
from maclaurin import InputError, NoFiniteStateError, StateBudgetError, attention, parse
from maclaurin.testing import Shape, TensorCase, assert_same, random_tensors, relative_error


def tensors(batch=2, tokens=6, heads=4, kv_heads=2, d=3, e=5, dtype=torch.float32):
    return (
        torch.randn(batch, tokens, heads, d, dtype=dtype),
        torch.randn(batch, tokens, kv_heads, d, dtype=dtype),
        torch.randn(batch, tokens, kv_heads, e, dtype=dtype),
    )


BAD = [
    (lambda q, k, v: attention(q[0], k, v, "exp/sum"), "q must be"),
    (lambda q, k, v: attention(q.long(), k, v, "exp/sum"), "floating point"),
    (lambda q, k, v: attention(q, k.double(), v, "exp/sum"), "one dtype"),
    (lambda q, k, v: attention(q, k.to("meta"), v, "exp/sum"), "one device"),
    (lambda q, k, v: attention(q, k, v[:, :-1], "exp/sum"), "k and v must agree"),
    (lambda q, k, v: attention(q[..., :2], k, v, "exp/sum"), "q and k must agree"),
    (lambda q, k, v: attention(q[:, :, :3], k, v, "exp/sum"), "multiple of the key-value heads"),
    (lambda q, k, v: attention(q[:, :0], k, v, "exp/sum"), "empty"),
    (lambda q, k, v: attention(q.numpy(), k, v, "exp/sum"), "torch tensor"),
    (lambda q, k, v: attention(q, k, v, "exp*in/len"), "needs input_gate"),
    (lambda q, k, v: attention(q, k, v, "exp/len", input_gate=q[..., 0]), "has no \\*in"),
    (lambda q, k, v: attention(q, k, v, "exp*in/len", input_gate=q[..., 0]), "input_gate must be"),
    (lambda q, k, v: attention(q, k, v, "exp/len*out", output_gate=q[..., 0].long()), "floating point"),
    (lambda q, k, v: attention(q, k, v, "exp/sum", form="serial"), "forms are auto, parallel"),
    (lambda q, k, v: attention(q, k, v, None), "spec must be"),
    (lambda q, k, v: attention(q, k, v, "exp/sum", key_padding_mask=[[True]]), "must be a bool tensor"),
    (lambda q, k, v: attention(q, k, v, "taylor(2)/sum", state="x"), "state must be"),
    (lambda q, k, v: attention(q, k, v, "taylor(2)/sum", chunk_size=2.5), "chunk_size"),
    (lambda q, k, v: attention(q, k, v, "taylor(2)/sum", chunk_size=0), "chunk_size"),
    (lambda q, k, v: attention(q, k, v, "taylor(2)/sum", form="parallel", return_state=True), "no state"),
    (lambda q, k, v: attention(q, k, v, "taylor(2)/sum", form="recurrent", causal=False), "left to right"),
    (
        lambda q, k, v: attention(q, k, v, "exp*forget/sum", log_forget=-k[..., 0].abs(), causal=False),
        "undefined for causal=False",
    ),
    (lambda q, k, v: attention(q, k[:, :2], v[:, :2], "exp/sum"), "cross attention"),
    (lambda q, k, v: attention(q[:, :2], k, v, "taylor(2)/sum", form="recurrent"), "one query per key"),
    (lambda q, k, v: attention(q, k, v, "exp/sum", cu_seqlens=torch.tensor([0, 6])), "one row"),
    (
        lambda q, k, v: attention(q[:1], k[:1], v[:1], "exp/sum", cu_seqlens=torch.tensor([0, 5])),
        "rise from 0 to T = 6",
    ),
    (
        lambda q, k, v: attention(q[:1], k[:1], v[:1], "exp/sum", cu_seqlens=torch.tensor([0.0, 6.0])),
        "integers",
    ),
    (
        lambda q, k, v: attention(
            q[:1], k[:1], v[:1], "exp/sum", cu_seqlens=torch.tensor([0, 6]), max_seqlen=4
        ),
        "max_seqlen is 4",
    ),
    (lambda q, k, v: attention(q, k, v, "exp/sum", key_padding_mask=torch.ones(2, 6)), "must be bool"),
    (
        lambda q, k, v: attention(
            q,
            k,
            v,
            "exp/sum",
            cu_seqlens=torch.tensor([0, 6]),
            key_padding_mask=torch.ones(2, 6, dtype=torch.bool),
        ),
        "give one of them",
    ),
    (lambda q, k, v: attention(q * torch.nan, k, v, "exp/sum", form="recurrent"), "NaN"),
    (lambda q, k, v: attention(q, k, v, "exp/sum", form="recurrent", tolerance=2.0), "tolerance"),
    (lambda q, k, v: attention(q, k, v, "exp/sum", form="recurrent", score_bound=1e-3), "score_bound"),
]


@pytest.mark.parametrize(("call", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_gets_one_clear_error(call, words):
    with pytest.raises(InputError, match=words):
        call(*tensors())


@pytest.mark.parametrize("notation", ["exp(clamp=5)/len", "linear(relu,clamp=5)/len", "sigmoid(0)"])
def test_a_spec_without_a_finite_state_has_no_recurrent_form(notation):
    q, k, v = tensors()
    with pytest.raises(NoFiniteStateError, match="recurrent form"):
        attention(q, k, v, notation, form="recurrent")
    with pytest.raises(NoFiniteStateError, match="without a state"):
        attention(q, k, v, notation, return_state=True)


def test_a_state_over_the_budget_names_order_bytes_and_alternatives():
    q, k, v = (0.5 * u for u in tensors(d=64, e=64))
    with pytest.raises(StateBudgetError) as caught:
        attention(q, k, v, "exp/sum", form="recurrent")
    for words in ("order", "bytes", "lower order", "about=mean", "window(64,sinks=1)", "parallel"):
        assert words in str(caught.value)
    with pytest.raises(StateBudgetError, match=r"takes .* bytes"):
        attention(q, k, v, "taylor(6)/sum", form="chunked")
    assert attention(q, k, v, "taylor(6)/sum").shape == (2, 6, 4, 64)


def test_errors_and_notices_of_a_series_carry_what_they_say():
    """As fields, also after pickling; the notice points at the line that called."""
    q, k, v = (0.5 * u for u in tensors(d=64, e=64))
    with pytest.raises(StateBudgetError) as caught:
        attention(q, k, v, "exp/sum", form="recurrent")
    assert caught.value.reason.startswith("the state of taylor(")
    assert caught.value.reason in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).reason == caught.value.reason
    with pytest.raises(StateBudgetError) as refused:
        attention(q, k, v, "exp/sum", form="recurrent", score_bound=40.0)
    assert refused.value.reason.startswith("no order of its series is within")
    q, k, v = (0.1 * u for u in tensors(d=2, e=2))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _, state = attention(q, k, v, "exp/sum", return_state=True)
    assert found[0].filename == __file__
    notice = found[0].message
    assert notice.certificate == state.certificate
    assert pickle.loads(pickle.dumps(notice)).certificate == state.certificate
    assert state.certificate.summary in str(notice)


def test_a_plan_on_the_meta_device_refuses_a_series_in_the_words_of_the_call():
    q, k, v = (0.1 * u for u in tensors(d=64, e=64))
    options = {"return_state": True, "score_bound": 3.0}
    words = set()
    for plan_or_call, given in (
        (attention, (q, k, v)),
        (maclaurin.plan, (q, k, v)),
        (maclaurin.plan, [u.to("meta") for u in (q, k, v)]),
    ):
        with pytest.raises(StateBudgetError) as caught:
            plan_or_call(*given, "exp/sum", **options)
        words.add(str(caught.value))
    assert len(words) == 1


@pytest.mark.parametrize(
    ("notation", "has_state"), [("taylor(2)/sum", True), ("exp/sum", True), ("sigmoid(0)", False)]
)
def test_a_state_is_advised_only_where_there_is_one(notation, has_state):
    q, k, v = tensors()
    found = maclaurin.plan(q[:, -1:], k, v, notation)
    assert any("pass a state" in why for why in found.refusals.values()) == has_state


def test_a_series_state_refuses_tokens_beyond_its_certificate():
    case = random_tensors(parse("exp/sum"), Shape(1, 4, 1, 1, 2, 3), 0, size=0.1)
    state = case.state()
    larger = case.map(lambda t: 3 * t)
    with pytest.raises(StateBudgetError, match="score_bound="):
        larger.output(state=state)
    roomy = case.state(score_bound=4.0, tolerance=1e-2)
    larger.output(state=roomy, tolerance=1e-2)


def test_a_state_of_another_spec_or_shape_is_refused():
    case = random_tensors(parse("taylor(2)/sum"), Shape(), 0)
    state = case.state()
    with pytest.raises(InputError, match="belongs to taylor"):
        TensorCase(parse("power(2)/sum"), case.tensors).output(state=state)
    with pytest.raises(InputError, match="sequences"):
        case.map(lambda t: t[:1]).output(state=state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("notation", "form"),
    [
        ("exp/sum", "parallel"),
        ("exp/sum", "chunked"),
        *itertools.product(
            ["taylor(2)/sum", "taylor(2,about=mean)/l2", "power(2)*forget/sum"],
            ["parallel", "chunked", "recurrent"],
        ),
    ],
)
def test_any_float_dtype_in_and_the_same_out(notation, form, dtype):
    spec = parse(notation)
    case = random_tensors(spec, Shape(tokens=40, d=4), 0, dtype)
    wide = case.map(torch.Tensor.double).output(form="parallel")
    y = case.output(form=form)
    assert y.dtype == dtype
    # judged against what rounding the inputs and the output alone costs
    rounded = wide.to(dtype)
    assert relative_error(y, wide) <= max(
        3 * relative_error(rounded, wide), 2e-5 if dtype == torch.float32 else 4e-3
    )


def test_states_are_fp32_for_low_precision_and_fp64_for_fp64():
    for dtype, kept in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        assert random_tensors(parse("taylor(2)/sum"), Shape(), 0, dtype).state().moments.dtype == kept


@pytest.mark.parametrize("notation", ["exp/sum", "exp/len", "taylor(2)/sum", "exp*forget/sum", "exp/running"])
@pytest.mark.parametrize("queries", [1, 3])
def test_fewer_queries_than_keys_are_the_last_tokens(notation, queries):
    case = random_tensors(parse(notation), Shape(), 0)
    last = case.with_tensors(q=case.tensors["q"][:, -queries:])
    assert_same(last.output(), case.output(form="parallel")[:, -queries:], notation)


def test_cross_attention_reads_other_keys():
    q = random_tensors(parse("exp/sum"), Shape(tokens=5), 0).tensors["q"]
    other = random_tensors(parse("taylor(2)/sum"), Shape(tokens=9), 1).with_tensors(q=q)
    linear, parallel = (other.output(causal=False, form=form) for form in ("chunked", "parallel"))
    assert_same(linear, parallel, "cross attention")


def test_an_output_gate_per_channel_where_no_norm_follows():
    case = random_tensors(parse("linear(identity)/rms*out"), Shape(), 0)
    gate = torch.randn(*case.tensors["output_gate"].shape, 4, dtype=torch.float64)
    plain = TensorCase(parse("linear(identity)/rms"), {n: case.tensors[n] for n in "qkv"}).output()
    assert_same(case.with_tensors(output_gate=gate).output(), plain * gate, "gate per channel")
    before = random_tensors(parse("linear(identity)*out/rms"), Shape(), 0)
    with pytest.raises(InputError, match="output_gate must be"):
        before.with_tensors(output_gate=gate).output()


def test_scale_may_be_given():
    case = random_tensors(parse("taylor(2)/sum"), Shape(), 0)
    scaled = case.with_tensors(q=case.tensors["q"] * 0.3 * 3**0.5)
    for form in ("parallel", "chunked", "recurrent"):
        assert_same(case.output(scale=0.3, form=form), scaled.output(), "scale")


@pytest.mark.parametrize("scale", [-0.4, 0.0])
@pytest.mark.parametrize("notation", ["exp/sum", "exp/len*out", "exp/sum(eps=0.5)/layer", "exp/l2"])
def test_scale_may_be_negative_or_zero(notation, scale):
    """torch's fused attentions multiply their mask, −∞, by the scale: of such a scale they make NaN."""
    case = random_tensors(parse(notation), Shape(tokens=13, d=8, e=8), 0).with_gradients()
    leaves = [case.tensors[name] for name in "qkv"]
    scaled = case.with_tensors(q=leaves[0] * scale).output(scale=1.0, form="blocked")
    wanted = torch.autograd.grad(scaled.square().sum(), leaves)
    for form in ("auto", "parallel", "blocked"):
        y = case.output(scale=scale, form=form)
        assert_same(y, scaled, f"scale {scale}, {form}")
        for ours, theirs in zip(torch.autograd.grad(y.square().sum(), leaves), wanted, strict=True):
            assert_same(ours, theirs, f"gradients at scale {scale}, {form}")


def test_a_forget_gate_of_zero_forgets_everything():
    case = random_tensors(parse("taylor(2)*forget/sum"), Shape(tokens=8), 0).with_gradients()
    gates = case.tensors["log_forget"].detach().clone()
    gates[:, 5] = -torch.inf
    for form in ("parallel", "chunked", "recurrent"):
        y = case.with_tensors(log_forget=gates).output(form=form, chunk_size=3)
        assert_same(y[:, 5:], case.tokens(5, 8).output(form="parallel"), form)
        assert torch.autograd.grad(y.sum(), case.tensors["q"])[0].isfinite().all()


def test_long_decays_keep_their_precision():
    """Running totals of the log forget gate reach thousands; differences of neighbours stay right."""
    shape = Shape(batch=1, tokens=3000, kv_heads=1, group=1, d=2, e=3)
    case = random_tensors(parse("taylor(2)*forget/sum"), shape, 0, torch.float32)
    wide = case.map(torch.Tensor.double).output(form="chunked")
    for form in ("parallel", "chunked"):
        assert relative_error(case.output(form=form), wide) < 1e-5


def test_row_sums_do_not_drift_over_a_long_text():
    shape = Shape(batch=1, tokens=65536, kv_heads=1, group=1, d=2, e=2)
    case = random_tensors(parse("taylor(2)/sum"), shape, 0, torch.bfloat16)
    ones = case.with_tensors(v=torch.ones_like(case.tensors["v"]))
    assert (ones.output(form="chunked") == 1).all()


# ------------------------------------------------------------------------------ low precision


@pytest.mark.parametrize("notation", ["taylor(4,about=mean)/sum", "hermite(2)/len", "power(2)*forget/sum"])
@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_autocast_does_not_reach_the_sums(notation, form):
    case = random_tensors(parse(notation), Shape(tokens=60, d=4), 0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = case.output(form=form)
    assert torch.equal(y, case.output(form=form))


@pytest.mark.parametrize(
    "notation", ["hermite(2)+window(8)*forget/sum", "taylor(2,about=mean)+window(8)*forget/sum"]
)
@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_nearly_decayed_tail_has_no_nan(notation, form):
    case = random_tensors(parse(notation), Shape(batch=1, tokens=120), 0, torch.float32)
    case = case.with_tensors(log_forget=12 * case.tensors["log_forget"]).with_gradients()
    y = case.output(form=form, chunk_size=16)
    assert y.isfinite().all()
    for name, gradient in case.gradients(y.square().sum()).items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("form", ["parallel", "chunked"])
def test_a_large_common_key_does_not_cancel_in_fp32(form):
    case = random_tensors(parse("taylor(4,about=mean)/sum"), Shape(tokens=80, d=4), 0, torch.float32)
    case = case.with_tensors(k=case.tensors["k"] + 8.0)
    wide = case.map(torch.Tensor.double).output(form="parallel")
    assert relative_error(case.output(form=form, chunk_size=16), wide) < 1e-4


@pytest.mark.parametrize("size", [45.0, 60.0, 90.0])
def test_a_norm_over_the_heads_survives_large_scores(size):
    case = random_tensors(parse("exp/rms(heads)"), Shape(d=1), 0, torch.float32)
    q = torch.full_like(case.tensors["q"], size)
    large = case.with_tensors(q=q, k=torch.ones_like(case.tensors["k"]))
    wide = large.map(torch.Tensor.double).output(form="parallel")
    assert relative_error(large.output(form="parallel"), wide) < 1e-4


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_norms_ignore_the_size_of_their_row_down_to_the_last_exponent(scale):
    y = torch.randn(2, 3, 4, 5)
    for notation in ("l2", "rms", "layer", "rms(heads)"):
        norm = parse(f"exp/{notation}").norm
        assert relative_error(norm(y * scale), norm(y)) < 1e-5, notation


def test_a_series_does_not_look_under_the_mask():
    case = random_tensors(parse("exp/sum"), Shape(batch=1, tokens=6, d=2), 0, size=0.3)
    mask = torch.tensor([[True, False, True, True, False, True]])
    expected = case.map(lambda t: t[:, mask[0]]).output()
    for garbage in (torch.nan, 1e4):
        spoilt = case.map(lambda t: t.masked_fill(~mask.reshape(1, 6, 1, 1), garbage))  # noqa: B023
        y = spoilt.output(key_padding_mask=mask, form="recurrent", tolerance=1e-9)
        assert relative_error(y[:, mask[0]], expected) < 1e-8


def test_a_series_keeps_its_promise_for_fp32_inputs_of_unequal_size():
    case = random_tensors(parse("exp/sum"), Shape(batch=1, tokens=12, d=2), 0, torch.float32, size=2.0)
    case = case.with_tensors(q=case.tensors["q"] / 10, k=case.tensors["k"] * 10)
    wide = case.map(torch.Tensor.double)
    y = case.output(form="recurrent", tolerance=1e-5)
    error = (y.double() - wide.output()).abs().amax() / wide.tensors["v"].abs().amax()
    assert error < 1e-5


# ------------------------------------------------------------------------------------------ auto


def meta(*shape):
    return torch.empty(*shape, device="meta")


def planned(notation, tokens, d=16, **options):
    q = meta(1, tokens, 4, d)
    return maclaurin.plan(q, q, meta(1, tokens, 4, 64), notation, **options)


def test_auto_takes_the_parallel_form_for_short_texts_and_chunks_for_long_ones():
    assert planned("taylor(2)/sum", 64).form.value == "parallel"
    assert planned("taylor(2)/sum", 16384).form.value == "chunked"
    assert planned("exp/sum", 16384).form.value == "parallel"
    assert planned("exp/sum", 16384).backend == "sdpa"
    assert planned("exp/len", 32768).backend == "sdpa"
    assert planned("sigmoid(-6.93)", 32768).form.value == "blocked"  # its weights would take 48 GiB


def test_auto_never_takes_a_state_that_cannot_be():
    assert planned("taylor-80", 4096, d=64).form.value in ("parallel", "blocked")
    assert planned("taylor(4)/sum", 8192, d=64).form.value in ("parallel", "blocked")


def test_plan_refuses_what_attention_refuses():
    with pytest.raises(NoFiniteStateError):
        planned("exp(clamp=5)/len", 64, form="recurrent")
    with pytest.raises(InputError, match="left to right"):
        planned("taylor(2)/sum", 64, form="recurrent", causal=False)


def test_a_kernel_defined_again_is_the_new_one():
    from dataclasses import dataclass
    from typing import ClassVar

    from maclaurin.spec import Polynomial, register

    def define(factor):
        @register
        @dataclass(frozen=True, slots=True)
        class Again(Polynomial):
            notation: ClassVar[str] = "again"

            @property
            def series(self):
                return (factor,)

        return Again

    case = random_tensors(parse("exp/sum"), Shape(), 0)
    define(1.0)
    first = attention(*(case.tensors[n] for n in "qkv"), "again")
    define(2.0)
    assert_same(attention(*(case.tensors[n] for n in "qkv"), "again"), 2 * first, "redefined")


def test_auto_steps_when_a_state_goes_on_by_one_token():
    case = random_tensors(parse("taylor(2)/sum"), Shape(tokens=1, d=16), 0)
    plan = maclaurin.plan(
        *(case.tensors[n] for n in "qkv"), "taylor(2)/sum", state=case.state(), return_state=True
    )
    assert plan.form.value == "recurrent"


def test_a_plan_says_what_why_and_what_else():
    text = str(planned("taylor(2)/sum", 8192))
    for words in (
        "plain chunked, chunked form",
        "the cheapest by a factor",
        "parallel",
        "recurrent",
        "GFLOP",
        "state:",
    ):
        assert words in text
    assert "the recurrent form was requested" in str(planned("taylor(2)/sum", 64, form="recurrent"))


@pytest.mark.parametrize(
    "notation", ["taylor(2)/sum", "exp/l2", "taylor(2,about=mean)+window(4,sinks=1)/sum"]
)
def test_auto_gives_the_same_answer(notation):
    case = random_tensors(parse(notation), Shape(tokens=200), 0)
    assert_same(case.output(), case.output(form="parallel"), notation)


# --------------------------------------------------------------------------------- torch.compile

COMPILED = [
    "exp/sum",
    "exp/len*out",
    "taylor(2)/sum",
    "taylor(2,about=mean)/sum",
    "power(2)*forget/sum",
    "taylor(2,about=mean)+window(4,sinks=1)/sum",
    "linear(elu1)*in/running(floor=1)",
    "power(2)/sum(eps=0.5)",
    "poly(0)+window(4,sinks=1,kept=3)/sum",
    "taylor(2,about=mean)+window(4,kept=3)/sum",
]
#: forms that are traced in every run of the tests, besides the one that is chosen; tracing takes seconds
ALSO_TRACED = {
    ("exp/sum", "parallel"),
    ("power(2)*forget/sum", "chunked"),
    ("taylor(2,about=mean)+window(4,sinks=1)/sum", "chunked"),
}
TRACED = [
    pytest.param(
        spec, form, marks=[] if form == "auto" or (spec, form) in ALSO_TRACED else [pytest.mark.exhaustive]
    )
    for spec in COMPILED
    for form in ("auto", "parallel", "chunked")
]


@pytest.mark.parametrize(("notation", "form"), TRACED)
@pytest.mark.slow
def test_compiles_without_graph_breaks(notation, form):
    torch._dynamo.reset()
    case = random_tensors(parse(notation), Shape(tokens=37), 0).with_gradients()
    names = list(case.tensors)

    def call(*tensors):
        return attention(**dict(zip(names, tensors, strict=True)), spec=notation, form=form, chunk_size=8)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    y, expected = compiled(*case.tensors.values()), call(*case.tensors.values())
    assert_same(y, expected, "compiled")
    weights = torch.randn_like(y)
    gradients = case.gradients((expected * weights).sum())
    for name, gradient in case.gradients((y * weights).sum()).items():
        assert_same(gradient, gradients[name], f"gradient of {name}", floor=1.0)


LAYER = "0: taylor(2)/sum; 1: poly(0)+window(3)/sum"


@pytest.mark.slow
def test_heads_that_differ_compile_without_graph_breaks():
    """Their notation is parsed outside the graph; a text, and a step after its states."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 9, heads, 8) for heads in (4, 2, 2))
    text, token = [u[:, :8] for u in (q, k, v)], [u[:, 8:] for u in (q, k, v)]

    def prefill(*tensors):
        return attention(*tensors, LAYER, return_state=True)

    def step(states, *tensors):
        return attention(*tensors, LAYER, state=states, return_state=True)[0]

    with torch.no_grad():
        y, states = prefill(*text)
        compiled, _ = torch.compile(prefill, fullgraph=True, backend="aot_eager")(*text)
        assert_same(compiled, y, "text")
        after = torch.compile(step, fullgraph=True, backend="aot_eager")(states, *token)
        assert_same(after, step(states, *token), "step")


@pytest.mark.parametrize(
    "notation", ["taylor(2)/len", "taylor(2,about=mean)/sum", "taylor(2,about=mean)+window(2,sinks=1)/sum"]
)
def test_keys_whose_features_overflow_leave_gradients_finite(notation):
    """In the last chunk, whose state is not read; all rows are finite."""
    case = random_tensors(
        parse(notation), Shape(batch=1, tokens=20, kv_heads=1, group=2, d=2, e=3), 3, torch.float32
    )
    case = case.with_gradients()
    k = torch.cat([case.tensors["k"][:, :17], 1e19 * case.tensors["k"][:, 17:]], 1)
    y = case.with_tensors(k=k).output(form="chunked", chunk_size=4)
    assert y.isfinite().all()
    assert all(u.isfinite().all() for u in case.gradients(y[:, :17].sum()).values())


@pytest.mark.parametrize("layout", ["state", "padding", "packed"])
@pytest.mark.slow
def test_compiles_with_state_padding_and_packing(layout):
    torch._dynamo.reset()
    case = random_tensors(parse("taylor(2)*forget/sum"), Shape(batch=1, tokens=12), 0)
    options = {"form": "chunked", "chunk_size": 4}
    if layout == "state":
        options |= {"state": case.state(), "return_state": True}
    elif layout == "padding":
        options |= {"key_padding_mask": torch.arange(12)[None] % 3 > 0}
    else:
        options |= {"cu_seqlens": torch.tensor([0, 5, 12])}
    compiled = torch.compile(case.output, fullgraph=True, backend="aot_eager")
    assert_same(compiled(**options), case.output(**options), layout)


@pytest.mark.parametrize(
    "notation",
    [
        "taylor(2)/sum",
        "taylor(2,about=mean)/sum",
        "power(2)*forget/sum",
        "linear(elu1)*in/running(floor=1)",
        "taylor(2,about=mean)+window(4,sinks=1)/l2*out",
        "poly(0)+window(4,sinks=1,kept=3)/sum",
    ],
)
@pytest.mark.slow
def test_decoding_steps_compile_once(notation):
    """Token by token from a state, in one graph, as without a compiler."""
    torch._dynamo.reset()
    case = random_tensors(parse(notation), Shape(batch=2, tokens=14, d=4), 0)
    names, compilations = list(case.tensors), []

    def step(state, *tensors):
        named = dict(zip(names, tensors, strict=True))
        return attention(**named, spec=notation, state=state, return_state=True)

    def counting(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    _, state = case.tokens(0, 7)(return_state=True)
    outputs = []
    for t in range(7, 14):
        y, state = compiled(state, *case.tokens(t, t + 1).tensors.values())
        outputs.append(y)
    assert_same(torch.cat(outputs, 1), case.output(form="parallel")[:, 7:], "compiled steps")
    assert len(compilations) <= 2


@pytest.mark.parametrize("notation", [pytest.param("exp/sum", marks=pytest.mark.exhaustive), "taylor(2)/sum"])
@pytest.mark.slow
def test_compiles_once_for_many_lengths(notation):
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (40, 57, 90):
        case = random_tensors(parse(notation), Shape(tokens=length), 0)
        y = compiled(*(case.tensors[n] for n in "qkv"), notation, form="parallel")
        assert_same(y, case.output(form="parallel"), f"length {length}")


@pytest.mark.slow
def test_compiles_with_the_default_compiler():
    torch._dynamo.reset()
    case = random_tensors(parse("taylor(2)/sum"), Shape(tokens=50), 0, torch.float32)
    compiled = torch.compile(lambda **options: case.output(**options), fullgraph=True)
    assert_same(
        compiled(form="chunked", chunk_size=16), case.output(form="chunked", chunk_size=16), "inductor"
    )


@pytest.mark.parametrize(
    "spec",
    ["exp/sum", "taylor(2)/sum", "power(2)*forget/sum*out", "exp*in/l2"],
)
def test_heads_before_tokens_is_the_same_answer(spec):
    parsed = maclaurin.parse(spec)
    q, k, v = torch.randn(2, 20, 4, 8), torch.randn(2, 20, 2, 8), torch.randn(2, 20, 2, 6)
    gates = {a.name: -torch.rand(2, 20, 4 if a.heads == "query" else 2) for a in parsed.arguments}
    for options in ({}, {"form": "parallel"}):
        for _ in range(2):  # found, and remembered
            expected = maclaurin.attention(q, k, v, spec, gates=gates, **options)
            flipped = {name: gate.mT for name, gate in gates.items()}
            found = maclaurin.attention(
                *(u.transpose(1, 2) for u in (q, k, v)), spec, layout="bhtd", gates=flipped, **options
            )
            assert found.shape == (2, 4, 20, 6)
            torch.testing.assert_close(found.transpose(1, 2), expected)


def test_a_state_goes_on_with_heads_before_tokens():
    q = torch.randn(1, 2, 9, 4)
    whole = maclaurin.attention(q, q, q, "taylor(2)/sum", layout="bhtd")
    part = q[:, :, :6]
    y, state = maclaurin.attention(part, part, part, "taylor(2)/sum", layout="bhtd", return_state=True)
    rest = q[:, :, 6:]
    z = maclaurin.attention(rest, rest, rest, "taylor(2)/sum", layout="bhtd", state=state)
    torch.testing.assert_close(torch.cat([y, z], dim=2), whole)
    exp = maclaurin.attention(part, part, part, "exp/sum", layout="bhtd", form="recurrent", tolerance=1e-3)
    expected = maclaurin.attention(part, part, part, "exp/sum", layout="bhtd")
    torch.testing.assert_close(exp, expected, atol=1e-2, rtol=1e-2)


def test_swapped_heads_and_tokens_are_an_error_that_names_the_layout():
    q, k = torch.randn(2, 8, 100, 16), torch.randn(2, 2, 100, 16)
    for keys in (q, k):
        with pytest.raises(InputError, match='pass layout="bhtd"'):
            maclaurin.attention(q, keys, keys, "exp/sum")
    assert maclaurin.attention(q, q, q, "exp/sum", layout="bthd").shape == q.shape
    assert maclaurin.attention(q[:, :1], q[:, :1], q[:, :1], "exp/sum").shape == (2, 1, 100, 16)
    with pytest.raises(InputError, match=r"not 'bhdt'"):
        maclaurin.attention(q, q, q, "exp/sum", layout="bhdt")
    with pytest.raises(InputError, match=r"\[batch, heads, tokens, size\]"):
        maclaurin.attention(q[0], q[0], q[0], "exp/sum", layout="bhtd")


@pytest.mark.parametrize("order", [24, 80])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_high_order_is_right_where_its_terms_cancel(order, compiled):
    """T80(−15) = 3e-7 is a sum of terms up to 3e5: in fp32 it was −0.04, and training diverged."""
    q, k, v = torch.randn(3, 1, 32, 2, 16, generator=torch.Generator().manual_seed(0))
    q = 16 * q
    spec = parse(f"taylor({order})/sum")
    exact = attention(q.double(), k.double(), v.double(), spec)

    def attend(q, k, v):
        return attention(q, k, v, spec)

    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="eager")
    assert (q * 0.25).mul(k).sum(-1).min() < -15, "scores at which terms cancel"
    torch.testing.assert_close(attend(q, k, v), exact.float(), rtol=1e-4, atol=1e-4)
