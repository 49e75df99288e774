"""Parts of one's own, exactly as docs/extending.md shows them: each in one block under 15 lines, all laws
inherited, its formula printed, trained in the Hugging Face model and decoded with a state."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import maclaurin
from maclaurin import SpecError, parse
from maclaurin.spec import (
    Argument,
    DecayGate,
    Denominator,
    FeatureMap,
    Kernel,
    Norm,
    Polynomial,
    Recipe,
    RowGate,
    Sign,
    ValueGate,
    number,
    positive,
    register,
    whole,
)
from maclaurin.testing import SpecLaws

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
PARTS = [block for block in BLOCKS if "@register" in block]

#: for a block without imports, those of the block before it
PAGE_IMPORTS = {
    later: "".join(line + "\n" for line in earlier.splitlines() if "import" in line)
    for earlier, later in itertools.pairwise(PARTS)
}

here = {"__name__": __name__}
for block in PARTS:  # once, when tests are collected: laws are generated for the parts they define
    exec(compile(block, "docs/extending.md", "exec"), here)


@register
@dataclass(frozen=True, slots=True)
class Square(FeatureMap):
    """φ(u) = u²"""

    notation: ClassVar[str] = "square"

    def __call__(self, u):
        return u * u

    def text(self, u):
        return f"{u}²"


@register
@dataclass(frozen=True, slots=True)
class Shifted(Denominator):
    """D_t = Σ_s w_ts + shift: neither scaled nor constant."""

    notation: ClassVar[str] = "shifted"
    uses_row_sum: ClassVar[bool] = True
    has_log_slope: ClassVar[bool] = True
    shift: float = positive(default=1.0)

    def divisor(self, seen):
        return seen.row_sum + self.shift

    def log_slope(self, seen):
        return seen.row_sum / (seen.row_sum + self.shift)

    def text(self, row_sum):
        return f"({row_sum} + {self.shift:g})"


@register
@dataclass(frozen=True, slots=True)
class CubeRoot(Denominator):
    """D_t = (t·Σ_s w_ts)^(1/3), through its logarithm."""

    notation: ClassVar[str] = "cuberoot"
    uses_row_sum: ClassVar[bool] = True
    in_log_domain: ClassVar[bool] = True

    def divisor(self, seen):
        return self.log_divisor(seen).exp()

    def log_divisor(self, seen):
        return (seen.log_row_sum + seen.keys.log()) / 3

    def text(self, row_sum):
        return f"(t·{row_sum})^(1/3)"


@register
@dataclass(frozen=True, slots=True)
class TwoSums(Denominator):
    """D_t = 2 Σ_s w_ts: a factor on the row changes nothing, yet it is not the row sum."""

    notation: ClassVar[str] = "twosums"
    uses_row_sum: ClassVar[bool] = True
    is_scaled: ClassVar[bool] = True
    ignores_row_scale: ClassVar[bool] = True

    def divisor(self, seen):
        return 2 * seen.scaled_row_sum

    def text(self, row_sum):
        return f"(2·{row_sum})"


@register
@dataclass(frozen=True, slots=True)
class Half(Norm):
    """N(y) = y/(1 + ‖y‖), which depends on the size of y."""

    notation: ClassVar[str] = "half"
    text: ClassVar[str] = "half"

    def __call__(self, y):
        return y / (1 + y.square().sum(-1, keepdim=True).add(1e-12).sqrt())


@register
@dataclass(frozen=True, slots=True)
class Added(RowGate):
    """y_t + b_t: no factor, so a norm behind it cancels nothing before it."""

    notation: ClassVar[str] = "added"
    argument: ClassVar[Argument] = Argument("added", symbol="b_t", tokens="query", heads="query")

    def on_rows(self, y, gate):
        return y + gate

    def text(self, y):
        return f"{y} + b_t"


@register
@dataclass(frozen=True, slots=True)
class Squashed(ValueGate):
    """tanh(v_s) + c_s"""

    notation = "squashed"
    argument = Argument("squashed", symbol="c_s", tokens="key", heads="key", recipe=Recipe.LINEAR)

    def on_values(self, v, gate):
        return v.tanh() + gate

    def text(self, v):
        return f"tanh({v}) + c_s"


@register
@dataclass(frozen=True, slots=True)
class Fade(DecayGate):
    """f_r = e^(rate·g_r), from g_r ≤ 0."""

    notation = "fade"
    argument = Argument("fade", symbol="g_r", tokens="key", heads="key", recipe=Recipe.LOG_SIGMOID)
    rate: float = positive(default=1.0)

    def log_decay(self, gate):
        return self.rate * gate

    def text(self, g):
        return f"exp({self.rate:g}·{g})"


@register
@dataclass(frozen=True, slots=True)
class Channels(RowGate):
    """y_t + silu(W x_t), one number per channel, which no norm cancels."""

    notation = "channels"
    argument = Argument(
        "channels", symbol="b_t", tokens="query", heads="query", per_channel=True, recipe=Recipe.SILU
    )

    def on_rows(self, y, gate):
        return y + gate

    def text(self, y):
        return f"{y} + b_t"


@register
@dataclass(frozen=True, slots=True)
class BothHalves(FeatureMap):
    """φ(u) = (relu(u), relu(−u)), twice as long as u."""

    notation = "crelu"
    sign = Sign.NONNEGATIVE

    def __call__(self, u):
        return (u[..., None] * u.new_tensor([1.0, -1.0])).flatten(-2).relu()

    def size(self, d):
        return 2 * d

    def text(self, u):
        return f"crelu({u})"


@register
@dataclass(frozen=True, slots=True)
class PowerMap(FeatureMap):
    """φ(u) = relu(u + shift)^p"""

    notation = "powmap"
    sign = Sign.NONNEGATIVE
    p: int = whole(at_least=1)
    shift: float = number(default=0.0)

    def __call__(self, u):
        return (u + self.shift).relu() ** self.p

    def text(self, u):
        return f"relu({u} + {self.shift:g})^{self.p}"


#: parts whose meaning depends on the scale of the weights, each once wrong on exp and next to a window
SCALES = [
    "exp/rootsum",
    "exp/shifted",
    "exp/shifted(3)/l2",
    "exp/cuberoot",
    "exp/twosums",
    "taylor(2,about=mean)+window(3)/twosums",
    "exp/half",
    "exp/len/half",
    "exp*added/l2",
    "exp/len*added/l2",
    "taylor(2)/shifted(0.5)*added/rms",
    "taylor(2)+window(3)/rootsum",
    "taylor(2)*forget/rootsum",
    "hermite(2)/half",
    "taylor(2)+window(3,sinks=1)/half",
]

SPECS = [
    "cosh(4)/sum",
    "cosh(3)*forget/l1",
    "linear(square)*in/l2",
    "taylor(2)*leak/sum",
    "taylor(2)*leak/rootlen",
    "exp/rootlen",
    "taylor(2,about=mean)+fading(3,rate=0.2)/sum",
    "linear(crelu)/sum",
    "linear(crelu)*forget*added/l2",
    "linear(powmap(2))/sum",
    "linear(powmap(3,shift=0.5),scale=0.5)*squashed/rms",
    "taylor(2)*fade(rate=0.5)*squashed/sum",
    "exp/sum*channels/l2",
]


class TestOwnParts(SpecLaws):
    specs: ClassVar[list[str]] = [*SPECS, *SCALES]


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_a_row_sum_of_large_scores_does_not_overflow(size):
    """fp32 scores up to 300, which e^x does not hold; D = √Σ e^x is e^(half the largest score)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 7, 1, 4) for _ in range(3))
    scale = size / float(torch.einsum("bthd,bshd->bts", q, k).abs().amax())
    y = maclaurin.attention(q, k, v, "exp/rootsum/l2", scale=scale)
    torch.testing.assert_close(y, maclaurin.attention(q, k, v, "exp/l2", scale=scale))
    wide = [u.double() for u in (q, k, v)]
    expected = maclaurin.attention(*wide, "exp/rootsum", scale=scale)
    got = maclaurin.attention(q, k, v, "exp/rootsum", scale=scale)
    small = expected.abs() < 1e30
    torch.testing.assert_close(got.double()[small], expected[small], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("spec", ["exp/rootsum", "exp/shifted"])
def test_a_denominator_reads_the_true_row_sum(spec):
    """It read e^(−largest score) times the sum, in every form alike."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 4, dtype=torch.float64) for _ in range(3))
    weights = (torch.einsum("bthd,bshd->bhts", 5 * q, k) / 2).exp().tril()
    row_sum = weights.sum(-1).transpose(1, 2)[..., None]
    divisor = row_sum.sqrt() if spec == "exp/rootsum" else row_sum + 1
    expected = torch.einsum("bhts,bshe->bthe", weights, v) / divisor
    for form in ("auto", "parallel", "chunked"):
        torch.testing.assert_close(maclaurin.attention(5 * q, k, v, spec, form=form), expected)


@pytest.mark.parametrize("block", PARTS, ids=lambda block: re.search(r"class (\w+)", block)[1])
def test_a_part_takes_fewer_than_15_lines(block):
    """As a file of its own, imports included; a block without imports needs those of the block before it."""
    imports = "" if "import" in block else PAGE_IMPORTS[block]
    assert len([line for line in (imports + block).splitlines() if line.strip()]) < 15


def test_the_page_runs_as_it_is_written():
    variables = dict(here)
    run = [block for block in BLOCKS if "@register" not in block and "SpecLaws" not in block]
    for block in run:
        exec(compile(block, "docs/extending.md", "exec"), variables)
    assert run
    assert set(variables) > set(here), "the page makes something with the parts it registers"


def test_a_denominator_of_ones_own_divides():
    """It was ignored once: taylor(2)/rootlen was taylor(2) bit for bit, while the formula said / t."""
    q = k = v = torch.randn(1, 9, 2, 4, dtype=torch.float64)
    plain = maclaurin.attention(q, k, v, "taylor(2)")
    t = torch.arange(1, 10).reshape(1, 9, 1, 1)
    for form in ("parallel", "chunked", "recurrent"):
        torch.testing.assert_close(
            maclaurin.attention(q, k, v, "taylor(2)/rootlen", form=form), plain / t.sqrt()
        )
    assert "/ √t" in parse("taylor(2)/rootlen").formula
    assert r"\sqrt{t}" in parse("taylor(2)/rootlen").latex


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cosh(4)/sum", "0.5·(x_ts)^2"),
        ("taylor(2)*leak/sum", "D_ts = Π_s<r≤t (1/(1 + exp(g_r)))"),
        ("taylor(2)*fade(rate=0.5)/sum", "D_ts = Π_s<r≤t exp(0.5·g_r)"),
        ("exp*added/l2", "y_t = L2( Σ_s≤t exp(x_ts) v_s + b_t )"),
        ("exp/len*added", "y_t = Σ_s≤t exp(x_ts) v_s / t + b_t"),
        ("exp*in*squashed*out/l2", "y_t = L2( o_t Σ_s≤t exp(x_ts) (tanh(i_s v_s) + c_s) )"),
        ("exp*squashed*in", "y_t = Σ_s≤t exp(x_ts) i_s (tanh(v_s) + c_s)"),
        ("linear(powmap(3))/l2", "x_ts = relu(q_t + 0)^3·relu(k_s + 0)^3"),
        ("taylor(2)/l1", "L1( "),
        ("taylor(2,about=mean)+fading(3,rate=0.2)/sum", "exp(x_ts − r_t − 0.2·(t−s)) for the last 3 keys"),
    ],
)
def test_formulas_know_the_part(spec, words):
    assert words in parse(spec).formula


@pytest.mark.parametrize("spec", SPECS)
def test_it_trains_and_decodes_in_the_model(spec):
    from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM

    torch.manual_seed(0)
    config = MaclaurinConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention=spec,
    )
    model = MaclaurinForCausalLM(config)
    tokens = torch.randint(16, (2, 12))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(20):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.2
    model.eval()
    with torch.no_grad():
        cached = model.generate(tokens[:, :6], max_new_tokens=5, do_sample=False)
        plain = model.generate(tokens[:, :6], max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("family", [Norm, Denominator, Kernel])
def test_a_part_without_its_meaning_cannot_be_registered(family):
    with pytest.raises(SpecError, match="without its meaning: define"):

        @register
        @dataclass(frozen=True, slots=True)
        class Empty(family):
            notation: ClassVar[str] = "empty"


def test_a_taken_name_is_an_error():
    with pytest.raises(SpecError, match="already the norm L2"):

        @register
        @dataclass(frozen=True, slots=True)
        class Other(Norm):
            notation: ClassVar[str] = "l2"
            text: ClassVar[str] = "L2"

            def __call__(self, y):
                return y


def test_a_kernel_cannot_hide_a_name_of_the_catalogue():
    with pytest.raises(SpecError, match="already a name of the catalogue"):

        @register
        @dataclass(frozen=True, slots=True)
        class Based(Polynomial):
            notation: ClassVar[str] = "based"
            series: ClassVar[tuple[float, ...]] = (1.0, 1.0)


def test_a_polynomial_that_changes_its_weights_says_what_programs_compute():
    """Its weight was ignored in the parallel form, which evaluates `fused`."""
    with pytest.raises(SpecError, match="defines weight, but programs would compute"):

        @register
        @dataclass(frozen=True, slots=True)
        class Capped(Polynomial):
            notation: ClassVar[str] = "capped"
            series: ClassVar[tuple[float, ...]] = (1.0, 1.0, 0.5)

            def weight(self, x, statistics=None):
                return (1 + x + x * x / 2).clamp(max=1.0)


READS = {
    "the row sum": (lambda seen: seen.row_sum, {}),
    "the row sum, for its logarithm": (lambda seen: seen.log_row_sum, {}),
    "the scaled row sum": (lambda seen: seen.scaled_row_sum + 1, {"uses_row_sum": True}),
    "the unit of the row sum": (lambda seen: seen.row_sum + seen.unit, {"uses_row_sum": True}),
    "an argument": (lambda seen: seen.argument, {}),
}


@pytest.mark.parametrize("what", READS)
def test_a_denominator_declares_what_it_reads(what):
    read, declared = READS[what]

    @dataclass(frozen=True, slots=True)
    class Reader(Denominator):
        notation: ClassVar[str] = "reader"

        def divisor(self, seen):
            return read(seen)

        def text(self, row_sum):
            return "D"

    for name, value in declared.items():
        setattr(Reader, name, value)
    spec = maclaurin.AttentionSpec.of(parse("exp").kernel, Reader())
    q = torch.randn(1, 4, 1, 2)
    for form in ("parallel", "chunked"):
        with pytest.raises(SpecError, match=f"reads {what.split(',')[0]} without declaring it"):
            maclaurin.attention(q, q, q, spec, form=form)
