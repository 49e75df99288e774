"""Dataclasses as JSON and back, by their type hints."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


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
