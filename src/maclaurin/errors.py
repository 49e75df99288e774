"""The errors this library raises. Every message says what was given, why it cannot work and what would.

A message writes parameters in backticks, `out` or `resume=True`; commands print them as options, --out and
--resume (cli/main.py).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


class MaclaurinError(ValueError):
    """Base of every error this library raises on purpose."""


class SpecError(MaclaurinError):
    """A part that cannot be built, or parts that make no sense together.

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
    """Input that cannot be used: tensors, files, options."""


class NoFiniteStateError(MaclaurinError):
    """The recurrent form was requested for a spec that has none."""


class StateBudgetError(MaclaurinError):
    """The recurrent state would be larger than the caller allows.

    `reason` is the part of the message that says why, without the context and the advice.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        self.reason = reason or message
        super().__init__(message)


class DataError(MaclaurinError):
    """Data that is missing, cannot be read, or cannot be used as requested."""


def load_extra(library: str, purpose: str, instead: str = "") -> Any:
    """Import the library, or raise an error that names the extra to install and what works without it."""
    try:
        return importlib.import_module(library)
    except ImportError:
        alternative = f", or {instead}" if instead else ""
        raise DataError(
            f"{purpose} needs the library {library}, which is not installed: "
            f"pip install 'maclaurin[data]'{alternative}."
        ) from None


@contextlib.contextmanager
def requires_extra(extra: str, *modules: str) -> Iterator[None]:
    """Turn a missing optional module into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] not in modules:
            raise
        raise MaclaurinError(
            f"this command needs {problem.name}: pip install 'maclaurin[{extra}]'."
        ) from None
