"""The errors this library raises. Every message says what was given, why it cannot work and what would."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MaclaurinError(ValueError):
    """Base of every error this library raises on purpose."""


class SpecError(MaclaurinError):
    """A part that cannot be built, or parts that mean nothing together.

    `place` is the part at fault, or the text of the argument at fault, so that a notation can point at it.
    """

    def __init__(self, reason: str, place: object = None) -> None:
        self.place = place
        super().__init__(reason)


class NotationError(SpecError):
    """A string that is not the notation of a spec; the message has a caret under the place."""

    def __init__(self, text: str, position: int, reason: str) -> None:
        self.text, self.position, self.reason = text, position, reason
        shown = "".join(" " if letter.isspace() else letter for letter in text)
        super().__init__(f"{reason}\n    {shown}\n    {' ' * position}^")

    def __reduce__(self) -> tuple[type[NotationError], tuple[str, int, str]]:
        return type(self), (self.text, self.position, self.reason)


class InputError(MaclaurinError):
    """Tensors that do not fit each other or the spec."""


class NoFiniteStateError(MaclaurinError):
    """A recurrent form was asked of a spec that has none."""


class StateBudgetError(MaclaurinError):
    """The recurrent state would be larger than the caller allows."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' for a word close to known ones, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""
