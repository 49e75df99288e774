"""Formulas are written once, as text; their LaTeX follows from it.

The text is plain mathematics: `Σ_s≤t exp(x_ts) v_s / max(t, 5)`. A slash between spaces is a fraction, one
without stays a slash; factors are separated by a space or a dot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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
