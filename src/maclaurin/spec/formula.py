"""A spec as mathematics: its parallel formula in text and LaTeX, and its recurrence.

Every term comes from its part; this module only joins them. A formula is written once, as text, and its LaTeX
follows from it (`typeset`). The text is plain mathematics: `Σ_s≤t exp(x_ts) v_s / max(t, 5)`. A slash between
spaces is a fraction, one without stays a slash; factors are separated by a space or a dot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from maclaurin.spec.attention_spec import AttentionSpec


def text_formula(spec: AttentionSpec) -> str:
    """y_t = p_t N( o_t Σ … / … ) with just the parts the spec has, then what its symbols mean."""
    return "\n".join(line.text for line in _lines(spec))


def latex_formula(spec: AttentionSpec) -> str:
    """The same as text_formula, for a paper."""
    return r",\quad ".join(line.latex for line in _lines(spec))


@final
@dataclass(frozen=True)
class _Line:
    """A formula, perhaps with words after it, and a formula after those."""

    formula: str
    words: str = ""
    rest: str = ""

    @property
    def text(self) -> str:
        return self.formula + self.words + self.rest

    @property
    def latex(self) -> str:
        return typeset(self.formula) + (typeset_words(self.words) if self.words else "") + typeset(self.rest)


def _lines(spec: AttentionSpec) -> Iterator[_Line]:
    yield _Line(f"y_t = {_body(spec)}")
    yield _Line(f"x_ts = {_score(spec)}")
    if spec.window is not None:
        yield _Line(
            f"w_ts = exp(x_ts − r_t{spec.window.bias_text})",
            f" for {spec.window.text}, else ",
            spec.kernel.text("x_ts"),
        )
        point, meaning = spec.kernel.reference_text
        yield _Line(f"r_t = {point}", meaning and f", {meaning}")
        if spec.window.kept:
            score, meaning = spec.window.score_text
            yield _Line(score, f", {meaning}")
    formula, meaning = spec.kernel.where_text
    if formula:
        yield _Line(formula, meaning and f", {meaning}")
    if spec.kernel.depends_on_row:
        over = "the tail" if spec.window else "the visible keys"
        yield _Line("x̄ = ", f"mean of the scores over {over}")
    if spec.decay_gates:
        factors = " ".join(_as_factor(gate.text(gate.argument.symbol)) for gate in spec.decay_gates)
        weighs = ", which weighs keys in means and variances of scores too"
        yield _Line(f"D_ts = Π_s<r≤t {factors}", weighs if spec.kernel.depends_on_row else "")


def _body(spec: AttentionSpec) -> str:
    weights = " ".join(["Σ_s≤t", *(["D_ts"] if spec.decay_gates else []), _weight(spec)])
    body = f"{weights} {_as_factor(_value(spec, 's'))}"
    if spec.denominator is not None:
        divisor = _inserted(spec.denominator.text, weights)
        body = f"{body} / {divisor if is_factor(divisor) else in_brackets(divisor)}"
    for gate in spec.gates_before_norm:
        body = _inserted(gate.text, body)
    if spec.norm is not None:
        body = f"{spec.norm.text}( {body} )"
    for gate in spec.gates_after_norm:
        body = _inserted(gate.text, body)
    return body


def _weight(spec: AttentionSpec) -> str:
    if spec.window is not None:
        return "w_ts"
    weight = spec.kernel.text("x_ts")
    return weight if is_factor(weight.replace("·", "")) else in_brackets(weight)


def _value(spec: AttentionSpec, token: str) -> str:
    """v after its gates, for the token s or t."""
    value = f"v_{token}"
    for gate in spec.value_gates:
        value = _inserted(gate.text, value)
    return value if token == "s" else value.replace("_s", f"_{token}")


def _as_factor(text: str) -> str:
    """The text in brackets, unless a factor before it multiplies all of it."""
    return in_brackets(text) if is_sum(text) or ("/" in text and not is_factor(text)) else text


_HOLE = "Ω"  # a letter in place of the term while the text around it is looked at


def _inserted(write: Callable[[str], str], term: str) -> str:
    """write(term), the term in brackets where it would otherwise be read differently."""
    text = write(_HOLE)

    def bracketed(hole: re.Match[str]) -> str:
        free = _stands_free(text[: hole.start()], text[hole.end() :], term)
        return term if free else in_brackets(term)

    return re.sub(_HOLE, bracketed, text)


def _stands_free(before: str, after: str, term: str) -> bool:
    """Whether the term needs no brackets between these texts."""
    if is_factor(term):
        return True
    if re.match(r"$|\)|,| [+−-]", after) is None:
        return False
    alone = re.search(r"(^|\(|, |\+ )$", before) is not None
    multiplied = re.search(r"([\w)] |·)$", before) is not None
    return alone or (multiplied and not is_sum(term))


def _score(spec: AttentionSpec) -> str:
    feature = spec.kernel.feature_map
    q, k = ("q_t", "k_s") if feature is None else (feature.text("q_t"), feature.text("k_s"))
    return spec.kernel.scaled_text(f"{q}·{k}")


def text_recurrence(spec: AttentionSpec) -> str:
    """S_t = f_t S_{t−1} + …, y_t = …, for the orders the state holds."""
    if not spec.has_finite_state and not spec.has_series:
        return "none: no finite state reproduces " + spec.kernel.text("x")
    orders = _orders(spec) if spec.has_finite_state else "n = 0, 1, 2, … (truncated at a certified order)"
    factors = (_as_factor(gate.text(gate.argument.symbol)) for gate in spec.decay_gates)
    forget = "".join(f"{factor.replace('_r', '_t')} " for factor in factors)
    value = _value(spec, "t")
    value = f"{value if is_factor(value) else in_brackets(value)}ᵀ"
    q, k = _features(spec)
    entering = "when k_t leaves the window: " if spec.window else ""
    if spec.window and spec.window.kept:
        entering = "when k_t has left the window and is not, or no longer, kept: "
    if spec.has_finite_state and spec.orders == (1,):
        order, power, which, read = "", "", "", f"a_1 ⟨{q}, S_t⟩"
    else:
        order, power, which, read = "⁽ⁿ⁾", "^⊗n", f",   {orders}", f"Σ_n a_n ⟨{q}^⊗n, S_t⁽ⁿ⁾⟩"
    lines = [f"{entering}S_t{order} = {forget}S_t₋₁{order} + {k}{power} {value}{which}"]
    if spec.needs_row_sum:
        lines.append(f"z_t{order} = {forget}z_t₋₁{order} + {k}{power}")
    lines.append(f"y_t reads {read}, then the denominator, gates and norm as above")
    return "\n".join(lines)


def _features(spec: AttentionSpec) -> tuple[str, str]:
    """Query and key as the state takes them: φ(q_t) and φ(k_t), where there is a feature map."""
    feature = spec.kernel.feature_map
    q, k = ("q_t", "k_t") if feature is None else (feature.text("q_t"), feature.text("k_t"))
    return q if is_factor(q) else in_brackets(q), k if is_factor(k) else in_brackets(k)


def _orders(spec: AttentionSpec) -> str:
    if not spec.orders:
        return "no orders (nothing is kept)"
    if len(spec.orders) > 6 and spec.orders == tuple(range(spec.orders[0], spec.orders[-1] + 1)):
        return f"n = {spec.orders[0]}, {spec.orders[0] + 1}, …, {spec.orders[-1]}"
    return "n = " + ", ".join(map(str, spec.orders))


# ----------------------------------------------------------------------------------------- from text to LaTeX

_SYMBOLS = {
    "Σ": r"\sum", "Π": r"\prod",
    "σ": r"\sigma ", "φ": r"\varphi ", "κ": r"\kappa ", "γ": r"\gamma ", "β": r"\beta ", "α": r"\alpha ",
    "·": r"\cdot ", "−": "-", "≤": r"\le ", "≥": r"\ge ", "‖": r"\|", "⊗": r"\otimes ", "…": r"\ldots ",
    "²": "^2", "³": "^3", "\u2009": r"\, ",
}  # fmt: skip
#: names that LaTeX knows
_FUNCTION = re.compile(r"(?<![A-Za-z\\_])(exp|min|max|ln|log|tanh|cosh|sinh|sin|cos)(?![A-Za-z])")
#: other names, typeset upright
_WORD = re.compile(r"(?<![A-Za-z\\_])([A-Za-z]{3,}[0-9]*|L[0-9])(?![A-Za-z0-9])")
_NUMBERED = re.compile(r"(?<![A-Za-z\\_])([A-Z])([0-9]+)(?=\()")  # T2(x)
_SUBSCRIPT = re.compile(r"_([A-Za-z0-9]+(?:[≤<][A-Za-z0-9]+)*)")
_POWER = re.compile(r"\^(−?[A-Za-z0-9.]+)")
_TEN_TO_THE = re.compile(r"(?<![A-Za-z0-9.])([0-9.]+)e([+-]?[0-9]+)")
_BETWEEN_FACTORS = re.compile(r"(?<=[\w)!]) (?=[\w(√])")
#: what a fraction does not reach across
_SEPARATORS = (" = ", ", ", " + ", " − ", " - ")
_FRACTION = " / "


def typeset(text: str) -> str:
    """The formula as LaTeX: x_ts → x_{ts}, (x)^11 → (x)^{11}, √t → \\sqrt{t}, σ → \\sigma, names upright."""
    text = _BETWEEN_FACTORS.sub("\u2009", text)
    text = re.sub(r"√(\w+)", r"√(\1)", text)
    text = _structured(text)
    text = re.sub(r"(\w)\u0304", r"\\bar \1", text)  # a letter under a bar
    text = _TEN_TO_THE.sub(lambda m: rf"{_times(m[1])}10^{{{int(m[2])}}}", text)
    text = _FUNCTION.sub(r"\\\1", text)
    text = _NUMBERED.sub(r"\1_\2", text)
    text = _WORD.sub(r"\\mathrm{\1}", text)
    text = _SUBSCRIPT.sub(r"_{\1}", text)
    text = _POWER.sub(r"^{\1}", text)
    for sign, command in _SYMBOLS.items():
        text = text.replace(sign, command)
    return re.sub(r" {2,}", " ", text).strip()


def typeset_words(words: str) -> str:
    """Words between formulas as LaTeX."""
    escaped = re.sub(r"([_%&#$])", r"\\\1", words)
    return rf"\text{{{escaped}}}"


def _times(number: str) -> str:
    return "" if number == "1" else rf"{number}\cdot "


def _structured(text: str) -> str:
    """The text with its fractions, roots and tall brackets as LaTeX."""
    pieces = list(_split(text, _SEPARATORS))
    return "".join(piece if piece in _SEPARATORS else _quotient(piece) for piece in pieces)


def _quotient(text: str) -> str:
    pieces = [piece for piece in _split(text, (_FRACTION,)) if piece != _FRACTION]
    first, *divisors = (
        _grouped(piece if at == 0 else without_brackets(piece)) for at, piece in enumerate(pieces)
    )
    for divisor in divisors:
        first = rf"\frac{{{first}}}{{{divisor}}}"
    return first


def _grouped(text: str) -> str:
    """Brackets: a root and an exponent need none, and those around something tall grow with it."""
    found, at = "", 0
    for start, stop in _bracket_pairs(text):
        before, inner = text[at:start], _structured(text[start + 1 : stop].strip())
        if before.endswith("√"):
            found += rf"{before[:-1]}\sqrt{{{inner}}}"
        elif before.endswith("^"):
            found += rf"{before}{{{inner}}}"
        elif re.search(r"\\frac|Σ|Π", inner):
            found += rf"{before}\left({inner}\right)"
        else:
            found += f"{before}({inner})"
        at = stop + 1
    return found + text[at:]


# ------------------------------------------------------------------------------------ brackets of the text


def in_brackets(text: str) -> str:
    """(text), without a second pair of brackets."""
    return f"({without_brackets(text)})"


def without_brackets(text: str) -> str:
    """The text without a pair of brackets around all of it."""
    pairs = list(_bracket_pairs(text))
    return text[1:-1].strip() if pairs == [(0, len(text) - 1)] else text


def is_sum(text: str) -> bool:
    """Whether a factor before the text would not multiply all of it."""
    return re.search("[+−-]", _outside_brackets(text)) is not None


def is_factor(text: str) -> bool:
    """Whether the text can be divided by, or raised to a power, without brackets."""
    return re.search(r"[-+−/·\s]", _outside_brackets(text)) is None


def _outside_brackets(text: str) -> str:
    """What is not between brackets, without signs of exponents: those of 1e-06 and t^−1."""
    for start, stop in reversed(list(_bracket_pairs(text))):
        text = text[:start] + text[stop + 1 :]
    return re.sub(r"(?<=\^)[+−-]|(?<=[0-9.]e)[+-](?=[0-9])", "", text)


def _bracket_pairs(text: str) -> Iterator[tuple[int, int]]:
    """Where the outermost brackets open and close."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        if letter == "(":
            start, depth = (at if depth == 0 else start), depth + 1
        elif letter == ")":
            depth -= 1
            if depth == 0:
                yield start, at


def _split(text: str, separators: tuple[str, ...]) -> Iterator[str]:
    """The pieces of the text between separators outside brackets, and the separators."""
    hidden = list(_bracket_pairs(text))
    at = 0
    for match in re.finditer("|".join(map(re.escape, separators)), text):
        if not any(start < match.start() < stop for start, stop in hidden):
            yield text[at : match.start()]
            yield match[0]
            at = match.end()
    yield text[at:]
