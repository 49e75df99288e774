"""The notation: `exp(clamp=5)*in/len*out/layer` ⇄ AttentionSpec.

spec  := kernel ["+" window] {"*" ("in" | "forget")} ["/" denominator] ["*" "out"]
         ["/" norm] ["*" "out"]
part  := name ["(" argument {"," argument} ")"]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from maclaurin.errors import NotationError, SpecError, did_you_mean
from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.part import Part, registered

_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[-+]?[0-9.][0-9.eE+-]*)|(?P<mark>.))")
_GATES = {"in": "input_gate", "forget": "forget_gate", "out": "output_gate"}


def parse(text: str) -> AttentionSpec:
    """The spec that `text` is the notation of, so that parse(str(spec)) == spec."""
    if not isinstance(text, str):
        raise SpecError(f"a notation is a string such as 'exp/sum', not {text!r}.")
    reader = _Reader(text)
    values: dict[str, Any] = {"kernel": reader.part("kernel")}
    places: dict[str, int] = {}
    while not reader.at_end:
        start, mark = reader.position, reader.mark("+*/")
        known = set(values)
        if mark == "+":
            _put(reader, values, "window", reader.part("window"), start)
        elif mark == "*":
            _put_gate(reader, values, start)
        else:
            part = reader.part("denominator", "norm")
            _put(reader, values, part.family, part, start)
        places |= dict.fromkeys(set(values) - known, start)
    try:
        return AttentionSpec(**values)
    except NotationError:
        raise
    except SpecError as problem:
        raise NotationError(text, places.get(problem.place or "", 0), str(problem)) from None


def _put_gate(reader: _Reader, values: dict[str, Any], start: int) -> None:
    at, name = reader.word("a gate")
    if name not in _GATES:
        raise reader.error(
            at,
            f"there is no gate {name!r}; the gates are in, forget and out." + did_you_mean(name, [*_GATES]),
        )
    after_norm = name == "out" and "norm" in values
    _put(reader, values, "gate_after_norm" if after_norm else _GATES[name], True, start)


_ORDER = {
    "kernel": 0, "window": 1, "input_gate": 2, "forget_gate": 2, "denominator": 3,
    "output_gate": 4, "norm": 5, "gate_after_norm": 6,
}  # fmt: skip
_PLACE = (
    "a spec reads: kernel + window * in * forget / denominator * out / norm * out, "
    "each but the kernel optional"
)


def _put(reader: _Reader, values: dict[str, Any], field: str, value: Any, start: int) -> None:
    if field in values:
        raise reader.error(start, f"a spec has one {field.replace('_', ' ')}, and this is a second.")
    if any(_ORDER[known] > _ORDER[field] for known in values):
        raise reader.error(start, f"this {field.replace('_', ' ')} comes too late; {_PLACE}.")
    values[field] = value


@dataclass
class _Reader:
    """A cursor over the text that knows where it is, for the caret in the error."""

    text: str
    position: int = 0
    written_at: dict[str, int] = field(default_factory=dict)  # arguments of the part just read

    def error(self, position: int, reason: str) -> NotationError:
        return NotationError(self.text, position, reason)

    @property
    def at_end(self) -> bool:
        return not self.text[self.position :].strip()

    def next(self) -> tuple[int, str, str]:
        """Position, kind and text of the next token, and move past it."""
        match = _TOKEN.match(self.text, self.position)
        if match is None or self.at_end:
            return len(self.text), "end", ""
        self.position = match.end()
        kind = match.lastgroup or "mark"
        return match.start(kind), kind, match[kind]

    def word(self, expected: str) -> tuple[int, str]:
        at, kind, word = self.next()
        if kind != "word":
            found = f"{word!r}" if word else "the end"
            raise self.error(at, f"expected {expected} here, found {found}.")
        return at, word

    def mark(self, allowed: str) -> str:
        at, kind, mark = self.next()
        if kind != "mark" or mark not in allowed:
            raise self.error(at, f"expected one of {' '.join(allowed)} here, found {mark!r}; {_PLACE}.")
        return mark

    def part(self, *families: str) -> Part:
        """A name of one of these families with its arguments."""
        at, name = self.word(f"the name of a {' or '.join(families)}")
        known = {k: v for family in families for k, v in registered(family).items()}
        if name not in known:
            raise self.error(
                at,
                f"there is no {' or '.join(families)} {name!r}; known are "
                f"{', '.join(sorted(known))}." + did_you_mean(name, list(known)),
            )
        positional, named = self.arguments()
        try:
            return known[name].from_arguments(positional, named)
        except SpecError as problem:
            raise self.error(self.written_at.get(problem.place or "", at), str(problem)) from None

    def arguments(self) -> tuple[list[str], dict[str, str]]:
        """What stands between parentheses, if any do."""
        positional: list[str] = []
        named: dict[str, str] = {}
        self.written_at = {}
        if not self.text[self.position :].lstrip().startswith("("):
            return positional, named
        opened, _, _ = self.next()
        while True:
            at, kind, word = self.next()
            if (kind, word) == ("mark", ")") and not positional and not named:
                return positional, named
            if kind not in ("word", "number"):
                raise self.error(at if kind != "end" else opened, self._bad_argument(kind, word))
            self.written_at[word] = at
            following = self.text[self.position :].lstrip()
            if following.startswith("="):
                self.next()
                value_at, value_kind, value = self.next()
                if value_kind not in ("word", "number"):
                    raise self.error(value_at, f"{word}= needs a value.")
                if word in named:
                    raise self.error(at, f"{word} is given twice.")
                named[word] = value
                self.written_at[value] = value_at
            elif named and kind == "number":
                raise self.error(at, "a number without a name comes before the named arguments.")
            else:
                positional.append(word)
            at, kind, mark = self.next()
            if (kind, mark) == ("mark", ")"):
                return positional, named
            if (kind, mark) != ("mark", ","):
                raise self.error(at if kind != "end" else opened, self._bad_argument(kind, mark))

    @staticmethod
    def _bad_argument(kind: str, word: str) -> str:
        if kind == "end":
            return "this parenthesis is never closed."
        return f"expected an argument, a comma or ) here, found {word!r}."
