"""A spec as mathematics: its parallel formula in text and LaTeX, and its recurrence.

Every term comes from its part; this module only joins them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.typeset import typeset


def text_formula(spec: AttentionSpec) -> str:
    """y_t = p_t N( o_t Σ … / … ) with just the parts the spec has."""
    return "\n".join([f"y_t = {_body(spec, _TEXT)}", *_where(spec, _TEXT)])


def latex_formula(spec: AttentionSpec) -> str:
    """The same as text_formula, for a paper."""
    return r",\quad ".join([f"y_t = {_body(spec, _LATEX)}", *_where(spec, _LATEX)])


@final
@dataclass(frozen=True)
class _Style:
    """How text and LaTeX differ: single terms, products, fractions, norms, and words between formulas."""

    term: Callable[[str], str]
    space: str
    fraction: Callable[[str, str], str]
    norm: Callable[[str, str], str]
    words: Callable[[str], str]
    latex: bool


_TEXT = _Style(str, " ", lambda a, b: f"{a} / {b}", lambda n, y: f"{n}( {y} )", str, False)
_LATEX = _Style(
    typeset,
    r"\, ",
    lambda a, b: rf"\frac{{{a}}}{{{b}}}",
    lambda n, y: rf"{n}\!\left({y}\right)",
    lambda words: rf"\text{{ {words} }}",
    True,
)


def _body(spec: AttentionSpec, style: _Style) -> str:
    decay = [style.term("D_ts")] if spec.decay_gates else []
    gates = [style.term(gate.text) for gate in spec.value_gates]
    weights = [style.term("Σ_s≤t"), *decay, _weight(spec, style)]
    body = style.space.join([*weights, *gates, style.term("v_s")])
    if spec.denominator is not None:
        write = spec.denominator.latex if style.latex else spec.denominator.text
        body = style.fraction(body, write(style.space.join(weights)))
    body = style.space.join([*(style.term(gate.text) for gate in spec.gates_before_norm), body])
    if spec.norm is not None:
        body = style.norm(spec.norm.latex if style.latex else spec.norm.text, body)
    return style.space.join([*(style.term(gate.text) for gate in spec.gates_after_norm), body])


def _weight(spec: AttentionSpec, style: _Style) -> str:
    if spec.window is not None:
        return style.term("w_ts")
    if style.latex:
        return rf"\left({spec.kernel.latex('x_{ts}')}\right)"
    weight = spec.kernel.text("x_ts")
    return f"({weight})" if " " in weight and not weight.endswith(")") else weight


def _where(spec: AttentionSpec, style: _Style) -> list[str]:
    lines = [f"{style.term('x_ts')} = {_score(spec, style)}"]
    if spec.window is not None:
        exact = style.term(f"exp(x_ts − r_t{spec.window.bias_text})")
        tail = spec.kernel.latex("x_{ts}") if style.latex else spec.kernel.text("x_ts")
        words = f"for {spec.window.text}, else"
        between = style.words(words) if style.latex else f" {words} "
        lines.append(f"{style.term('w_ts')} = {exact}{between}{tail}")
        reference = spec.kernel.reference_text
        point, _, meaning = reference.partition(", ")
        behind = f", {meaning}" if meaning else ""
        lines.append(f"{style.term('r_t')} = {style.term(point)}{style.words(behind) if behind else ''}")
        if spec.window.kept:
            score, meaning = spec.window.score_text
            lines.append(f"{style.term(score)}{style.words(f', {meaning}')}")
    if spec.kernel.depends_on_row:
        over = "the tail" if spec.window else "the visible keys"
        mean = style.words(f"mean of the scores over {over}") if style.latex else f"mean of x_ts over {over}"
        lines.append(f"{style.term('x̄')} = {mean}")
    if spec.decay_gates:
        factors = style.space.join(style.term(gate.text) for gate in spec.decay_gates)
        lines.append(f"{style.term('D_ts')} = {style.term('Π_s<r≤t')} {factors}")
        lines += [style.term(gate.where_text) for gate in spec.decay_gates if gate.where_text]
    return lines


def _score(spec: AttentionSpec, style: _Style) -> str:
    feature = spec.kernel.feature_map
    q, k = ("q_t", "k_s") if feature is None else (feature.text("q_t"), feature.text("k_s"))
    return style.term(spec.kernel.scaled_text(f"{q}·{k}"))


def text_recurrence(spec: AttentionSpec) -> str:
    """S_t = f_t S_{t−1} + …, y_t = …, for the orders the state holds."""
    if not spec.has_finite_state and not spec.has_series:
        return "none: no finite state reproduces " + spec.kernel.text("x")
    orders = _orders(spec) if spec.has_finite_state else "n = 0, 1, 2, … (truncated at a certified order)"
    forget = "".join(f"{gate.text.replace('_r', '_t')} " for gate in spec.decay_gates)
    gated = " ".join([*(gate.text.replace("_s", "_t") for gate in spec.value_gates), "v_t"])
    value = f"({gated})ᵀ" if spec.value_gates else f"{gated}ᵀ"
    feature = spec.kernel.feature_map
    key = "k_t" if feature is None or feature.is_identity else f"({feature.text('k_t')})"
    entering = "when k_t leaves the window: " if spec.window else ""
    if spec.window and spec.window.kept:
        entering = "when k_t has left the window and is not, or no longer, kept: "
    lines = [f"{entering}S_t⁽ⁿ⁾ = {forget}S_t₋₁⁽ⁿ⁾ + {key}^⊗n {value},   {orders}"]
    if spec.needs_row_sum:
        lines.append(f"z_t⁽ⁿ⁾ = {forget}z_t₋₁⁽ⁿ⁾ + {key}^⊗n")
    lines.append("y_t reads Σ_n a_n ⟨q_t^⊗n, S_t⁽ⁿ⁾⟩, then the denominator, gates and norm as above")
    return "\n".join(lines)


def _orders(spec: AttentionSpec) -> str:
    if not spec.orders:
        return "no orders (nothing is kept)"
    if len(spec.orders) > 6 and spec.orders == tuple(range(spec.orders[0], spec.orders[-1] + 1)):
        return f"n = {spec.orders[0]}, {spec.orders[0] + 1}, …, {spec.orders[-1]}"
    return "n = " + ", ".join(map(str, spec.orders))
