"""What a part declares is checked when it is registered: a mistake is an error, and no part is ignored."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import maclaurin
from maclaurin import AttentionSpec, SpecError, attention
from maclaurin.errors import InputError
from maclaurin.layers.gates import module_names
from maclaurin.spec import (
    Argument,
    DecayGate,
    Denominator,
    Gate,
    Kernel,
    Norm,
    Recipe,
    RowGate,
    Sign,
    SlidingWindow,
    Taylor,
    ValueGate,
    Window,
    positive,
    register,
    whole,
)
from maclaurin.spec.part import KEYWORDS, Part


def part(family, name="mine", **body):
    """A part with everything a family needs but what `body` replaces; None removes."""
    meaning = {
        ValueGate: {"on_values": lambda self, v, gate: v * gate, "multiplies": True},
        DecayGate: {},
        RowGate: {"on_rows": lambda self, y, gate: y * gate, "multiplies": True},
        Denominator: {"divisor": lambda self, seen: seen.keys, "text": lambda self, row_sum: "t"},
        Norm: {"__call__": lambda self, y: y, "text": "N"},
        Kernel: {
            "weight": lambda self, x, statistics=None: x,
            "sign": Sign.INDEFINITE,
            "text": lambda self, x: x,
        },
        Window: {"size": 2, "sinks": 0},
        Gate: {},
        Part: {},
    }[family]
    body = {"notation": name, **meaning, **body}
    named = {n: value for n, value in body.items() if value is not None}
    return dataclass(frozen=True, slots=True)(type("Mine", (family,), {**named, "__module__": __name__}))


def argument(name="mine", tokens="key", heads="key", **options):
    return Argument(name, symbol="g", tokens=tokens, heads=heads, **options)


@pytest.mark.parametrize(
    ("family", "body", "words"),
    [
        (ValueGate, {"argument": argument(), "notation": None}, "has no name"),
        (ValueGate, {"argument": argument(), "notation": "größe"}, "use letters from a to z"),
        (ValueGate, {}, "must declare the tensor it takes"),
        (ValueGate, {"argument": argument(heads="query")}, "needs heads='key'"),
        (ValueGate, {"argument": argument(tokens="query")}, "needs tokens='key'"),
        (ValueGate, {"argument": argument(running=True)}, "running"),
        (DecayGate, {"argument": argument(heads="query")}, "needs heads='key'"),
        (DecayGate, {"argument": argument(per_channel=True)}, "cannot be per_channel"),
        (RowGate, {"argument": argument(heads="query")}, "needs tokens='query'"),
        (RowGate, {"argument": argument(tokens="query")}, "needs heads='query'"),
        (Denominator, {"argument": argument(tokens="key")}, "needs tokens='query'"),
        (Denominator, {"argument": argument(tokens="query", running=True)}, "needs tokens='key'"),
        (Denominator, {"argument": argument(tokens="query", per_channel=True)}, "cannot be per_channel"),
        (Denominator, {"is_scaled": True}, "must set uses_row_sum"),
        (Norm, {"argument": argument()}, "gets none"),
        (ValueGate, {"argument": argument("scale")}, "keyword of attention"),
        (ValueGate, {"argument": argument("a b")}, "use letters from a to z"),
        (ValueGate, {"arguments": property(lambda self: ())}, "overrides `arguments`"),
        (Gate, {"argument": argument()}, "subclass ValueGate"),
        (Part, {}, "belongs to no family"),
        (Window, {"log_bias": lambda self, age: -age}, "defines log_bias and not bias_text"),
        (Window, {"bias_text": " − 1"}, "defines bias_text and not log_bias"),
        (ValueGate, {"argument": argument(), "multiplies": False}, r"define text\(self, v\)"),
        (
            RowGate,
            {"argument": argument("g", "query", "query"), "multiplies": False},
            r"define text\(self, y\)",
        ),
        (DecayGate, {"argument": argument(), "log_decay": lambda self, g: 2 * g}, "log_decay and not text"),
        (DecayGate, {"argument": argument(), "text": lambda self, g: g}, "text and not log_decay"),
        (DecayGate, {"argument": argument(recipe=Recipe.SILU)}, "one per channel: use another recipe"),
        (ValueGate, {"argument": argument(recipe=Recipe.SILU)}, "set per_channel=True or use another"),
        (Norm, {"a": 3.0, "__annotations__": {"a": "float"}}, "cannot read its field a"),
        (Kernel, {"has_finite_state": True}, "must define orders and coefficients too"),
        (Kernel, {"has_finite_state": True, "orders": (1,)}, "must define coefficients too"),
        (Kernel, {"orders": (1,)}, "must define has_finite_state too"),
        (Kernel, {"depends_on_row": True}, "must define statistics too"),
        (Kernel, {"argument": argument()}, "gets none"),
        (Denominator, {"in_log_domain": True}, "must define log_divisor"),
        (Denominator, {"has_log_slope": True}, "must define log_slope"),
    ],
)
def test_a_wrong_declaration_cannot_be_registered(family, body, words):
    with pytest.raises(SpecError, match=words):
        register(part(family, **body))


def test_a_class_with_fields_must_be_a_dataclass():
    with pytest.raises(SpecError, match="is not a dataclass"):

        @register
        class Mine(Norm):
            notation = "mine"
            text = "N"
            a: float = positive(default=1.0)

            def __call__(self, y):
                return y


@pytest.mark.parametrize(("name", "value"), [("size", 0), ("size", -1), ("sinks", -1), ("kept", -1)])
def test_a_window_holds_the_current_key_at_least(name, value):
    """A size of 0 ran in two forms and was an IndexError in the third."""
    with pytest.raises(SpecError, match=f"the {name} of a window is a whole number"):
        AttentionSpec.of(Taylor(2), part(Window, **{name: value})())


def test_a_gate_without_a_role_cannot_be_in_a_spec():
    """It was printed in the formula and ignored in the answer."""
    with pytest.raises(SpecError, match="is not a ValueGate, DecayGate or RowGate"):
        AttentionSpec.of(Taylor(2), part(Gate, argument=argument())())


def test_no_argument_can_be_called_like_a_keyword_of_attention():
    given = [n for n, p in inspect.signature(attention).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert set(KEYWORDS) == set(given)


def test_a_biased_window_is_never_plain():
    """Fused programs dropped a bias that had no text."""

    @dataclass(frozen=True, slots=True)
    class Biased(Window):
        notation: ClassVar[str] = "biased"
        size: int = whole(at_least=1)
        sinks: ClassVar[int] = 0

        def log_bias(self, age):
            return -age

    assert not Biased(3).is_plain
    assert SlidingWindow(3).is_plain


def test_modules_of_a_layer_have_different_names():
    """`forget` and `log_forget` were one module; the later replaced the earlier."""
    names = module_names([argument("log_forget"), argument("forget")])
    assert names == {"log_forget": "log_forget_gate", "forget": "forget_gate"}
    assert set(module_names([argument("input"), argument("input_gate")]).values()) == {
        "input_gate",
        "input_gate_gate",
    }
    published = [argument(n) for n in ("input_gate", "log_forget", "output_gate", "denominator_gate", "leak")]
    assert list(module_names(published).values()) == [
        "input_gate", "forget_gate", "output_gate", "denominator_gate", "leak_gate",
    ]  # fmt: skip


# ------------------------------------------------------------------------------- registered parts


@register
@dataclass(frozen=True, slots=True)
class LengthPower(Denominator):
    """D_t = t^p; its field is required."""

    notation: ClassVar[str] = "lenpow"
    p: float = positive()

    def divisor(self, seen):
        return seen.keys**self.p

    def text(self, row_sum):
        return f"t^{self.p}"


@register
@dataclass(frozen=True, slots=True)
class Undeclared(Denominator):
    """Reads the row sum without declaring it."""

    notation: ClassVar[str] = "undeclared"

    def divisor(self, seen):
        return seen.row_sum

    def text(self, row_sum):
        return row_sum


def some(tokens=5):
    return (torch.randn(1, tokens, 2, 4, dtype=torch.float64) for _ in range(3))


def test_an_unknown_argument_is_reported_beside_a_part_with_a_required_field():
    with pytest.raises(InputError, match="attention has no argument 'inputgate'"):
        attention(*some(), "taylor(2)/sum", inputgate=torch.ones(1, 5, 2))
    with pytest.raises(InputError, match=r"has no \*in"):
        attention(*some(), "taylor(2)/lenpow(0.5)", input_gate=torch.ones(1, 5, 2))


@pytest.mark.parametrize("spec", ["taylor(2)/undeclared", "exp/undeclared"])
@pytest.mark.parametrize("form", ["auto", "parallel", "chunked", "recurrent"])
def test_an_undeclared_row_sum_is_the_same_error_in_every_form(spec, form):
    with pytest.raises(SpecError, match="set uses_row_sum = True on the class Undeclared"):
        maclaurin.attention(*some(), spec, form=form)
