"""Dataclasses as JSON and back, by their type hints, and the JSON files of records."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from maclaurin.errors import InputError
from maclaurin.files import write_file

T = TypeVar("T")
#: whole numbers from here on are not all exact in JavaScript
LARGEST_IN_JAVASCRIPT = 1 << 53


def to_plain(value: Any) -> Any:
    """The value as dicts, lists, strings and numbers; the dict of a class with a `kind` includes it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_plain(getattr(value, field.name)) for field in _saved(type(value))}
        kind = getattr(value, "kind", None)
        return fields if kind is None else {"kind": kind, **fields}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    return value


def significant(value: float, digits: int) -> float:
    """The number rounded to this many significant digits."""
    return float(f"{value:.{digits}g}")


def finite(plain: Any, digits: int | None = None) -> Any:
    """Plain data with null in place of numbers that are not finite, others rounded to significant digits.

    Rounding includes whole numbers that JavaScript cannot hold exactly: a state of order 80 has 5e30 bytes.
    """
    if isinstance(plain, dict):
        return {key: finite(part, digits) for key, part in plain.items()}
    if isinstance(plain, list | tuple):
        return [finite(part, digits) for part in plain]
    if isinstance(plain, int) and (digits is None or abs(plain) < LARGEST_IN_JAVASCRIPT):
        return plain
    if not isinstance(plain, float | int):
        return plain
    if not math.isfinite(plain):
        return None
    return plain if digits is None else significant(plain, digits)


def digest(plain: Any) -> str:
    """SHA-256 of plain data (numbers, strings, lists, dicts) as canonical JSON, in hex."""
    spelling = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(spelling.encode()).hexdigest()


def write_json(
    path: Path,
    value: Any,
    schema: int | None = None,
    *,
    indent: int | None = 1,
    allow_nan: bool = True,
    flush: bool = True,
) -> None:
    """Write a dataclass or plain data as a JSON file, atomically, with the number of its schema first.

    indent      None writes one line without spaces
    allow_nan   False raises ValueError for a number that is not finite, which JSON itself does not have
    """
    data = to_plain(value) if schema is None else {"schema": schema, **to_plain(value)}
    separators = (",", ":") if indent is None else None
    text = json.dumps(data, indent=indent, separators=separators, ensure_ascii=False, allow_nan=allow_nan)
    write_file(path, text + "\n", flush=flush)


def read_json(path: Path) -> Any | None:
    """The content of a JSON file; None if it is missing, cannot be read or is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def read_value(cls: type[T], path: Path) -> T:
    """The value that `write_json` wrote without a schema; any error is raised as it comes."""
    return from_plain(cls, json.loads(path.read_bytes()))


def read_or_none(
    cls: type[T], path: Path, change: Callable[[dict[str, Any]], None] = lambda data: None
) -> T | None:
    """The value in a JSON file; None if the file is missing, damaged or of another version.

    change   called with the plain data first; it may raise ValueError to reject them
    """
    try:
        data = json.loads(path.read_bytes())
        change(data)
        return from_plain(cls, data)
    except (OSError, KeyError, TypeError, AttributeError, ValueError):
        return None


def read_record(
    cls: type[T],
    path: Path,
    schema: int,
    what: str,
    *,
    missing: str,
    advice: str = "",
    older: Mapping[int, str] = types.MappingProxyType({}),
    change: Callable[[dict[str, Any]], None] = lambda data: None,
) -> T:
    """Read a file of `write_json` with a schema; any problem is one InputError.

    what      what the file should hold, such as "an inspection"
    missing   the error if there is no file
    advice    the end of every other error, such as " Choose another `out`."
    older     earlier schema → what to do with such a file
    change    called with the plain data first
    """
    if not path.is_file():
        raise InputError(missing)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise InputError(f"{path} is not {what}: it is not JSON ({problem}).{advice}") from None
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}.{advice}") from None
    found = data.pop("schema", None) if isinstance(data, dict) else None
    if found is None:
        raise InputError(f"{path} is not {what}: it has no schema number.{advice}")
    if found != schema:
        raise InputError(
            f"{path} has schema {found}, but this version of maclaurin reads schema {schema} of {what}."
            f"{older.get(found, '')}{advice}"
        )
    try:
        change(data)
        return from_plain(cls, data)
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise InputError(
            f"{path} does not have the form of {what} ({problem!r}): it was changed by hand or written by "
            f"another version.{advice}"
        ) from None


def from_plain(hint: type[T], data: Any) -> T:
    """The value of type `hint` that `to_plain` turned into `data`.

    Unknown and missing fields raise TypeError, as the class itself does.
    """
    return _read(hint, data)


def _read(hint: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(hint, data)
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, data)
    if origin is tuple:
        hints = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else arguments
        return tuple(_read(part, item) for part, item in zip(hints, data, strict=True))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {_read_key(arguments[0], key): _read(arguments[1], item) for key, item in data.items()}
    return float(data) if hint is float and isinstance(data, int) else data


def _read_dataclass(hint: Any, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise TypeError(f"{hint.__name__} cannot be read from {type(data).__name__}.")
    hints = _hints(hint)
    given = {name: item for name, item in data.items() if name != "kind" or "kind" in hints}
    return hint(**{name: _read(hints.get(name, Any), item) for name, item in given.items()})


def _read_union(choices: tuple[Any, ...], data: Any) -> Any:
    if data is None:
        return None
    named = [choice for choice in choices if choice is not type(None)]
    kinds = {choice.kind: choice for choice in named if getattr(choice, "kind", None)}
    if kinds and isinstance(data, Mapping):
        return _read(kinds[data["kind"]], data)
    return _read(named[0], data)


def _read_key(hint: Any, key: str) -> Any:
    return int(key) if hint is int else key


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in _saved(cls)}


@cache
def _saved(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """Fields that are part of the value; those left out of comparisons stay out of files too."""
    return tuple(field for field in dataclasses.fields(cls) if field.init and field.compare)
