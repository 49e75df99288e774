"""The notation: `exp(clamp=5)*in/len*out/layer` ⇄ AttentionSpec.

spec  := kernel ["+" window] {"*" gate} ["/" denominator] {"*" gate} ["/" norm] {"*" gate}
part  := name ["(" argument {"," argument} ")"]
argument := [name "="] value                 a value is a word, a number or a part, as in linear(shifted(0.5))
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from maclaurin.errors import NotationError, SpecError
from maclaurin.spec.attention_spec import ORDER_OF_PARTS, AttentionSpec, in_formula_order
from maclaurin.spec.part import Part, registered
from maclaurin.wording import did_you_mean

Made = TypeVar("Made")

_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[-+]?[0-9.][0-9.eE+-]*)|(?P<mark>.))")
#: which families a mark announces
_FAMILIES = {"+": ("window",), "*": ("gate",), "/": ("denominator", "norm")}


def parse(text: str) -> AttentionSpec:
    """The spec that `text` is the notation of, so that parse(str(spec)) == spec."""
    if not isinstance(text, str):
        raise SpecError(f"a notation is a string such as 'exp/sum', not {text!r}.")
    reader = _Reader(text)
    parts: list[Part] = [reader.part("kernel")]
    places = [0]
    while not reader.at_end:
        places.append(reader.position)
        parts.append(reader.part(*_FAMILIES[reader.mark("".join(_FAMILIES))]))
        _checked(text, tuple(parts), places, in_formula_order)
    return _checked(text, tuple(parts), places, AttentionSpec)


def _written_elsewhere(name: str) -> str | None:
    """What a part is and how it is written, if the name is one; None if it is not."""
    for mark, families in (("", ("kernel",)), *_FAMILIES.items()):
        for family in families:
            if name in registered(family):
                return f"{mark}{name} is a {family}"
    return None


def _checked(
    text: str, parts: tuple[Part, ...], places: list[int], make: Callable[[tuple[Part, ...]], Made]
) -> Made:
    """`make(parts)`; its error gets a caret under the part at fault."""
    try:
        return make(parts)
    except SpecError as problem:
        at = next((start for part, start in zip(parts, places, strict=True) if part is problem.place), 0)
        raise NotationError(text, at, str(problem)) from None


@dataclass
class _Reader:
    """A cursor over the text; its position is for the caret in an error."""

    text: str
    position: int = 0
    written_at: dict[str, int] = field(default_factory=dict)  # arguments of the part just read

    def error(self, position: int, reason: str) -> NotationError:
        return NotationError(self.text, position, reason)

    @property
    def at_end(self) -> bool:
        return not self.text[self.position :].strip()

    @property
    def following(self) -> str:
        return self.text[self.position :].lstrip()

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
            raise self.error(
                at, f"expected one of {' '.join(allowed)} here, found {mark!r}; {ORDER_OF_PARTS}."
            )
        return mark

    def part(self, *families: str) -> Part:
        """A name of one of these families with its arguments."""
        at, name = self.word(f"the name of a {' or '.join(families)}")
        known = {k: v for family in families for k, v in registered(family).items()}
        if name not in known:
            kinds = " or ".join(families)
            elsewhere = _written_elsewhere(name)
            if elsewhere is not None:
                raise self.error(at, f"{elsewhere}, and a {kinds} is expected here; {ORDER_OF_PARTS}.")
            raise self.error(
                at,
                f"there is no {kinds} {name!r}; choose from {', '.join(sorted(known))}."
                + did_you_mean(name, list(known)),
            )
        positional, named = self.arguments()
        try:
            return known[name].from_arguments(positional, named)
        except SpecError as problem:
            where = self.written_at.get(problem.place, at) if isinstance(problem.place, str) else at
            raise self.error(where, str(problem)) from None

    def arguments(self) -> tuple[list[str], dict[str, str]]:
        """The arguments between parentheses, if any."""
        positional: list[str] = []
        named: dict[str, str] = {}
        self.written_at = {}
        if not self.following.startswith("("):
            return positional, named
        opened, _, _ = self.next()
        while True:
            at, kind, word = self.next()
            if (kind, word) == ("mark", ")") and not positional and not named:
                return positional, named
            if kind not in ("word", "number"):
                raise self.error(at if kind != "end" else opened, self._bad_argument(kind, word))
            self.written_at[word] = at
            if self.following.startswith("="):
                self.next()
                value_at, value_kind, value = self.next()
                if value_kind not in ("word", "number"):
                    raise self.error(value_at, f"{word}= needs a value.")
                if word in named:
                    raise self.error(at, f"{word} is given twice.")
                named[word] = value + (self.nested() if value_kind == "word" else "")
                self.written_at[value] = value_at
            elif named and kind == "number":
                raise self.error(at, "a number without a name comes before the named arguments.")
            else:
                positional.append(word + (self.nested() if kind == "word" else ""))
            at, kind, mark = self.next()
            if (kind, mark) == ("mark", ")"):
                return positional, named
            if (kind, mark) != ("mark", ","):
                raise self.error(at if kind != "end" else opened, self._bad_argument(kind, mark))

    def nested(self) -> str:
        """The arguments of an argument with their parentheses, unread; empty if it has none."""
        if not self.following.startswith("("):
            return ""
        opened, _, _ = self.next()
        depth = 1
        while depth:
            at, kind, word = self.next()
            if kind == "end":
                raise self.error(opened, self._bad_argument(kind, word))
            self.written_at.setdefault(word, at)
            depth += (word == "(") - (word == ")")
        return self.text[opened : self.position]

    @staticmethod
    def _bad_argument(kind: str, word: str) -> str:
        if kind == "end":
            return "this parenthesis is never closed."
        return f"expected an argument, a comma or ) here, found {word!r}."
