"""A table as data, and as Markdown. Needs no optional package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

Tone = Literal["good", "bad", "unsure", "muted", ""]


@final
@dataclass(frozen=True)
class Column:
    """A heading and how the entries below it are set.

    Numbers to the right, code in its own type, prose may wrap; a named entry has code beside its text, and a
    folded one shows its aside until it is opened.
    """

    title: str
    kind: Literal["text", "number", "code", "prose", "named", "folded"] = "text"
    hint: str = ""


@final
@dataclass(frozen=True)
class Entry:
    """One place of a table: its text, what it is sorted by, a quieter second part, its tone."""

    text: str
    value: float | str | None = None
    aside: str = ""
    tone: Tone = ""

    def __str__(self) -> str:
        return f"{self.text} {self.aside}".strip()


@final
@dataclass(frozen=True)
class Table:
    """Headings and rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]


def markdown(table: Table) -> str:
    """As a Markdown table."""
    lines = [
        _line(_escaped(column.title) for column in table.columns),
        _line("---:" if column.kind == "number" else "---" for column in table.columns),
    ]
    for row in table.rows:
        texts = []
        for column, entry in zip(table.columns, row, strict=True):
            text, aside = _escaped(entry.text), _escaped(entry.aside)
            text = _code(text) if column.kind == "code" else text
            aside = _code(aside) if column.kind == "named" else aside
            texts.append(f"{text} {aside}".strip())
        lines.append(_line(texts))
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text and "`" not in text else text


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
