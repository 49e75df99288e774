"""Formulas say what is computed, in text and in LaTeX; parts like the ones here were once printed wrong."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from maclaurin import AttentionSpec, SpecError, attention, catalogue, parse
from maclaurin.errors import InputError
from maclaurin.spec import (
    Argument,
    DecayGate,
    Denominator,
    FeatureMap,
    Kernel,
    Recipe,
    RowGate,
    Sign,
    Taylor,
    VisibleKeys,
)
from maclaurin.spec.formula import typeset
from maclaurin.spec.norm import L2
from maclaurin.testing.printed_formula import printed_and_computed, value_of

NOTATIONS = [
    text
    for text, answer in json.loads(
        (Path(__file__).parents[1] / "golden" / "notation.json").read_text()
    ).items()
    if "formula" in answer
]


# ------------------------------------------------------------------------------------------------- LaTeX


@pytest.mark.parametrize("text", dict.fromkeys([*NOTATIONS, *(entry.notation for entry in catalogue)]))
def test_every_formula_can_be_typeset(text):
    from latex2mathml.converter import convert

    latex = parse(text).latex
    assert latex.isascii(), "a sign without its command"
    assert not re.search(r"(?<![A-Za-z0-9])[0-9.]+e[+-]?[0-9]", latex), "a number as in a program"
    for words in re.findall(r"\\text\{([^}]*)\}", latex):
        assert not re.search(r"(?<!\\)[_^&#$%]", words), f"a sign of formulas among words: {words}"
    assert latex.count("{") == latex.count("}")
    assert latex.count(r"\left(") == latex.count(r"\right)")
    shown = convert(latex)
    assert "\\" not in shown, "an unknown command"
    assert "_" not in shown
    assert "^" not in shown


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("√(1 + (x)^2)", r"\sqrt{1 + (x)^{2}}"),
        ("√t", r"\sqrt{t}"),
        ("(t·u)^(1/3)", r"(t\cdot u)^{1/3}"),
        ("a + b / c", r"a + \frac{b}{c}"),
        ("f(a b / (c + d), 2)", r"f\left(\frac{a\, b}{c + d}, 2\right)"),
        ("T10(x) = Σ_n≤10 x^n/n!", r"T_{10}(x) = \sum_{n\le 10}\, x^{n}/n!"),
        ("detach(x_ts)^−0.5", r"\mathrm{detach}(x_{ts})^{-0.5}"),
        ("1e-06·x̄", r"10^{-6}\cdot \bar x"),
    ],
)
def test_latex_follows_from_the_text(text, latex):
    assert typeset(text) == latex


def test_a_symbol_has_one_name():
    """x̄ was \\bar x_t where it was used and \\bar x where it was defined."""
    latex = parse("hermite(3)+window(4)/len").latex
    assert r"\bar x_" not in latex
    assert r"\bar x =" in latex


def test_the_point_of_a_window_is_the_one_that_is_computed():
    """hermite(1) expands about x̄; x̄ + u/2 was printed."""
    assert "\nr_t = x̄\n" in parse("hermite(1)+window(2)/sum").formula
    assert "\nr_t = x̄ + u/2, u the variance" in parse("hermite(2)+window(2)/sum").formula


def test_means_are_weighted_by_the_decay():
    """x̄ was printed as the plain mean of the scores, while a decay gate weighs them."""
    weighted = "D_ts = Π_s<r≤t f_r, which weighs keys in means and variances of scores too"
    assert parse("taylor(2,about=mean)*forget/sum").formula.endswith(weighted)
    assert parse("taylor(2)*forget/sum").formula.endswith("D_ts = Π_s<r≤t f_r")


# ------------------------------------------------------------------------------------------------ brackets


@dataclass(frozen=True, slots=True)
class OnePlusExp(Kernel):
    notation = "oneplus"
    sign = Sign.POSITIVE

    def weight(self, x, statistics=None):
        return 1 + x.exp()

    def text(self, x):
        return f"1 + exp({x})"


@dataclass(frozen=True, slots=True)
class NextLength(Denominator):
    notation = "nextlen"

    def divisor(self, seen):
        return seen.keys + 1

    def text(self, row_sum):
        return "t + 1"


@dataclass(frozen=True, slots=True)
class SquaredSum(Denominator):
    notation = "squaredsum"
    uses_row_sum = True

    def divisor(self, seen):
        return seen.row_sum**2

    def text(self, row_sum):
        return f"{row_sum}^2"


def test_sums_are_in_brackets():
    spec = AttentionSpec.of(OnePlusExp(), NextLength())
    assert spec.formula.startswith("y_t = Σ_s≤t (1 + exp(x_ts)) v_s / (t + 1)\n")
    assert spec.latex.startswith(r"y_{t} = \frac{\sum_{s\le t}\, (1 + \exp(x_{ts}))\, v_{s}}{t + 1},")
    assert AttentionSpec.of(OnePlusExp(), SquaredSum()).formula.startswith(
        "y_t = Σ_s≤t (1 + exp(x_ts)) v_s / (Σ_s≤t (1 + exp(x_ts)))^2\n"
    )


# -------------------------------------------------------------------------- printed and computed are the same


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x^2/2 + 1", 5.5), ("−x + 1", -2.0), ("2 x·x", 18.0), ("1/(1 + x)", 0.25), ("√(x + 1)", 2.0),
        ("max(x, 5) − min(x, 1)", 4.0), ("relu(x − 4)", 0.0), ("1e-01·x", 0.3), ("x²", 9.0), ("x^−1", 1 / 3),
        ("(x + 1)^(1/2)", 2.0), ("T2(x)", None), ("Σ_r≤t x", None), ("x +", None), ("(x", None),
    ],
)  # fmt: skip
def test_a_text_is_computed_as_it_reads(text, expected):
    value = value_of(text, {"x": torch.tensor(3.0, dtype=torch.float64)})
    assert (None if value is None else pytest.approx(float(value))) == expected


def wrong_row_gate(gate_text):
    @dataclass(frozen=True, slots=True)
    class Added(RowGate):
        notation = "added"
        argument = Argument("added", symbol="b_t", tokens="query", heads="query")

        def on_rows(self, y, gate):
            return y + gate

        def text(self, y):
            return gate_text.format(y=y)

    return Added()


@pytest.mark.parametrize(
    ("text", "is_right"), [("{y} + b_t", True), ("b_t {y}", False), ("{y} − b_t", False)]
)
def test_a_gate_that_prints_something_else_is_found(text, is_right):
    """A gate that adds was printed as a factor."""
    checked = printed_and_computed(AttentionSpec.of(Taylor(2), wrong_row_gate(text)), 0)
    printed, computed = next((p, c) for part, p, c in checked if part.notation == "added")
    assert torch.allclose(printed, computed) is is_right


def test_a_decay_that_prints_something_else_is_found():
    """The rate was missing."""

    @dataclass(frozen=True, slots=True)
    class Fade(DecayGate):
        notation = "fade"
        argument = Argument("fade", symbol="g_r", tokens="key", heads="key")

        def log_decay(self, gate):
            return 0.5 * gate

        def text(self, g):
            return f"exp({g})"

    ((_, printed, computed),) = printed_and_computed(AttentionSpec.of(Taylor(2), Fade()), 0)
    assert not torch.allclose(printed, computed)


# ------------------------------------------------------------------------ parts that do not fit together


@dataclass(frozen=True, slots=True)
class RootSum(Denominator):
    notation = "rootsum"
    uses_row_sum = True

    def divisor(self, seen):
        return seen.row_sum.sqrt()

    def text(self, row_sum):
        return f"√({row_sum})"


@dataclass(frozen=True, slots=True)
class AtLeastOne(Denominator):
    notation = "atleastone"
    uses_row_sum = True
    positive_for = Sign.INDEFINITE

    def divisor(self, seen):
        return seen.row_sum.clamp(min=1)

    def text(self, row_sum):
        return f"max({row_sum}, 1)"


@pytest.mark.parametrize("kernel", ["taylor(1)", "linear(identity)", "power(3)", "poly(1,1)"])
def test_a_row_sum_that_can_be_negative_is_refused(kernel):
    """√ of it was NaN."""
    with pytest.raises(SpecError, match=r"/rootsum divides by a row sum that can be negative"):
        AttentionSpec.of(parse(kernel).kernel, RootSum())
    assert not AttentionSpec.of(parse(kernel).kernel, AtLeastOne()).denominator_can_vanish


def test_a_row_sum_that_can_be_zero_can_vanish():
    assert AttentionSpec.of(parse("power(2)").kernel, RootSum()).denominator_can_vanish
    assert not AttentionSpec.of(Taylor(2), RootSum()).denominator_can_vanish
    assert not AttentionSpec.of(Taylor(1), VisibleKeys()).denominator_can_vanish


def test_a_factor_per_channel_before_a_norm_is_refused_when_parsed():
    """A layer made such a gate, and the model failed in its first forward pass."""

    @dataclass(frozen=True, slots=True)
    class Silu(RowGate):
        notation = "siluout"
        multiplies = True
        argument = Argument("siluout", "o_t", "query", "query", per_channel=True, recipe=Recipe.SILU)

        def on_rows(self, y, gate):
            return y * gate

    with pytest.raises(SpecError, match=r"after the norm: /l2\*siluout"):
        AttentionSpec.of(Taylor(2), Silu(), L2())
    assert AttentionSpec.of(Taylor(2), L2(), Silu()).may_be_per_channel(Silu.argument)


def test_a_feature_map_of_another_size_than_it_declares_is_an_error():
    @dataclass(frozen=True, slots=True)
    class Twice(FeatureMap):
        notation = "twice"

        def __call__(self, u):
            return u.repeat_interleave(2, -1)

        def text(self, u):
            return f"({u}, {u})"

    spec = AttentionSpec.of(type(parse("linear(relu)").kernel)(parse("linear(relu)").kernel.feature))
    object.__setattr__(spec.kernel, "feature", Twice())
    q = k = v = torch.randn(1, 5, 2, 4)
    with pytest.raises((SpecError, InputError), match=r"define size\(self, d\) on the class .*Twice"):
        attention(q, k, v, spec)
