"""Numbers and tables in readable form. Needs no optional package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from maclaurin.wording import in_list

NOTHING = "–"


# ------------------------------------------------------------------------------------------ numbers


def plain(value: float | None, decimals: int = 3) -> str:
    """2.345, −0.120; a dash for None."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def signed(value: float, decimals: int = 3) -> str:
    """+0.120, −0.120."""
    text = plain(value, decimals)
    return text if text.startswith("−") or text == NOTHING or not text.strip("0.") else f"+{text}"


def interval(bounds: tuple[float, float] | None, decimals: int = 3) -> str:
    """[low, high], or an empty text for None."""
    if bounds is None:
        return ""
    return f"[{plain(bounds[0], decimals)}, {plain(bounds[1], decimals)}]"


def power(value: float | None) -> str:
    """1.2e−15, 0.62; for errors."""
    if value is None or not math.isfinite(value):
        return plain(value)
    return f"{value:.2g}" if 0.01 <= value < 100 else f"{value:.1e}".replace("e-", "e−").replace("e+", "e")


def chance(p: float) -> str:
    """The p of a test, with a sensible number of digits."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def ratio(f: float | None) -> str:
    """The F of a test."""
    return NOTHING if f is None else f"{f:,.0f}" if f >= 100 else f"{f:.2g}" if f < 10 else f"{f:.0f}"


def share(fraction: float) -> str:
    """37 %."""
    percent = 100 * fraction
    return "< 1 %" if 0 < percent < 0.95 else f"{percent:.0f} %"


def size(count: float | None) -> str:
    """1.5 MiB."""
    if count is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def many(count: float | None) -> str:
    """13.8M, 412k."""
    if count is None:
        return NOTHING
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(count) >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{count / scale:.3g}{letter}"
    return f"{count:,.0f}"


def in_one_line(value: Any) -> str:
    """Any value as one line of text."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {in_one_line(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(in_one_line(part) for part in value)
    return str(value)


def listed(names: list[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def listed_cells(names: Iterable[str]) -> str:
    """a, b and c, with quotes where a name contains a comma."""
    return listed([in_list(name) for name in names])


def counted(number: int, word: str) -> str:
    """1 run, 2 runs."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# ------------------------------------------------------------------------------------------- tables

Tone = Literal["good", "bad", "unsure", "muted", ""]


@final
@dataclass(frozen=True)
class Column:
    """A heading and the style of the entries below it.

    Numbers are right-aligned, code is in a monospace font, prose may wrap. A named entry has code next to its
    text, and a folded entry shows only its aside until it is opened.
    """

    title: str
    kind: Literal["text", "number", "code", "prose", "named", "folded"] = "text"
    hint: str = ""


@final
@dataclass(frozen=True)
class Entry:
    """One cell of a table: its text, its sort key, a less prominent second text, its tone."""

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
