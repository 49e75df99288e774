"""Options written in one string: `mqar:pairs=8,vocab=256` → a frozen dataclass, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from maclaurin.data.errors import DataError
from maclaurin.errors import did_you_mean

Options = TypeVar("Options")


def split_options(written: str) -> tuple[str, dict[str, str]]:
    """`name:a=1,b=2` → (name, {a: 1, b: 2})."""
    name, _, rest = written.partition(":")
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise DataError(f"in {written!r}, {part!r} is not an option; options are written name=value.")
        if key in values:
            raise DataError(f"in {written!r}, {key} is given twice.")
        values[key] = value
    return name, values


def read_options(kind: type[Options], name: str, values: Mapping[str, str]) -> Options:
    """The dataclass with these fields; whole numbers, numbers and words are read by the field's type."""
    hints = get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in known:
            raise DataError(
                f"{name} has no option {key!r}; it has {', '.join(known)}.{did_you_mean(key, known)}"
            )
    return kind(**{key: _read(hints[key], name, key, text) for key, text in values.items()})


def _read(hint: Any, name: str, key: str, text: str) -> int | float | str:
    if hint is str:
        return text
    number = float if hint is float else int
    try:
        return number(text)
    except ValueError:
        expected = "a number" if number is float else "a whole number"
        raise DataError(f"{name}: {key} must be {expected}, not {text!r}.") from None
