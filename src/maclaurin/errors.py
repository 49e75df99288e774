"""The errors this library raises. Every message says what was given, why it cannot work and what would.

A message writes parameters in backticks, `out` or `resume=True`; commands print them as options, --out and
--resume (cli/main.py).
"""

from __future__ import annotations

import importlib
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


class MissingExtraError(MaclaurinError):
    """An optional package is not installed."""


def load_extra(module: str, extra: str, purpose: str, instead: str = "") -> Any:
    """Import an optional module, or raise an error that names the extra to install.

    purpose   what needs the module, such as "reading .zst files"
    instead   what works without it, such as "use .gz"
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        missing = problem.name or module
        if missing.split(".")[0] == "maclaurin":
            raise
        raise missing_extra(missing, extra, purpose, instead) from None


def missing_extra(module: str, extra: str, purpose: str, instead: str = "") -> MissingExtraError:
    """The error of `load_extra`, for code that looks for a module without importing it."""
    alternative = f", or {instead}" if instead else ""
    return MissingExtraError(
        f"{purpose} needs {module}, which is not installed: pip install 'maclaurin[{extra}]'{alternative}."
    )
