"""Formulas are written once, as text; their LaTeX follows from it."""

from __future__ import annotations

import re

_SYMBOLS = {
    "σ": r"\sigma ", "φ": r"\varphi ", "κ": r"\kappa ", "γ": r"\gamma ", "β": r"\beta ", "α": r"\alpha ",
    "·": r"\cdot ", "−": "-", "≤": r"\le ", "≥": r"\ge ", "‖": r"\|", "⊗": r"\otimes ", "…": r"\ldots ",
    "²": "^2", "³": "^3",
}  # fmt: skip
#: names typeset upright
_FUNCTION = re.compile(r"(?<![A-Za-z\\])(exp|min|max|ln|log|tanh|cosh|sinh|sin|cos)(?![A-Za-z])")
_WORD = re.compile(r"(?<![A-Za-z\\{])([A-Za-z]{3,}[0-9]*|L[0-9])(?![A-Za-z0-9}])")
_SUBSCRIPT = re.compile(r"_([A-Za-z0-9]+(?:[≤<][A-Za-z0-9]+)*)")
_POWER = re.compile(r"\^(−?[A-Za-z0-9.]+)")
_TEN_TO_THE = re.compile(r"(?<![A-Za-z0-9.])([0-9.]+)e([+-]?[0-9]+)")
_SUM = {"Σ": r"\sum", "Π": r"\prod"}


def typeset(text: str) -> str:
    """The formula as LaTeX: x_ts → x_{ts}, (x)^11 → (x)^{11}, √t → \\sqrt{t}, σ → \\sigma, names upright."""
    text = re.sub(r"√(\w+|\([^()]*\))", lambda m: rf"\sqrt{{{m[1].strip('()')}}}", text)
    text = re.sub(r"(\w)\u0304", r"\\bar \1", text)  # a letter under a bar
    text = _SUBSCRIPT.sub(lambda m: f"_{{{m[1]}}}", text)
    text = _POWER.sub(lambda m: f"^{{{m[1]}}}", text)
    text = _TEN_TO_THE.sub(lambda m: rf"{_times(m[1])}10^{{{int(m[2])}}}", text)
    for sign, command in _SUM.items():
        text = text.replace(sign, command)
    text = _FUNCTION.sub(r"\\\1", text)
    text = _WORD.sub(
        lambda m: m[1] if m[1] in ("bar", "sqrt", "sum", "prod") else rf"\mathrm{{{m[1]}}}", text
    )
    for sign, command in _SYMBOLS.items():
        text = text.replace(sign, command)
    return re.sub(r" {2,}", " ", text).strip()


def _times(number: str) -> str:
    return "" if number == "1" else rf"{number}\cdot "
