"""HTML from small functions: text is escaped, unless it is already HTML."""

from __future__ import annotations

import html
import json
import math
import re
from importlib import resources
from typing import Any

from maclaurin.report.tables import Column, Entry, Table

_EMPTY = frozenset({"meta", "br", "hr", "link"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Any text as HTML."""
    return text if isinstance(text, Html) else Html(html.escape(str(text), quote=True))


def join(*parts: object) -> Html:
    """Parts one after the other."""
    return Html("".join(escape(part) for part in parts))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """<name attribute="…">children</name>; class_ is class, data_x is data-x, None leaves one out."""
    shown = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written = key.rstrip("_").replace("_", "-")
        shown += f" {written}" if value is True else f' {written}="{escape(value)}"'
    if name in _EMPTY:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{join(*children)}</{name}>")


def embedded(data: Any, **attributes: object) -> Html:
    """JSON inside the page, where a script can read it and no text can end it."""
    text = json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return tag("script", Html(safe), type="application/json", **attributes)


def _finite(data: Any) -> Any:
    """Five digits are enough to draw; what is no number is null."""
    if isinstance(data, float):
        return float(f"{data:.5g}") if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


def table_html(table: Table, caption: object = "", titles: dict[str, str] | None = None) -> Html:
    """A table that scrolls in its own frame and sorts by its headings."""
    heads = [_heading(column) for column in table.columns]
    rows = [tag("tr", *_row(table.columns, row, titles or {})) for row in table.rows]
    inner = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), class_="sortable")
    return framed(inner, table.title, caption)


def framed(table: Html, title: str, caption: object = "") -> Html:
    """A table under its caption; on a narrow screen the table scrolls and the caption stays."""
    frame = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=title)
    return tag("div", tag("p", caption, class_="caption") if caption else "", frame, class_="tabled")


def breakable(notation: str) -> Html:
    """A notation that may be broken between its parts."""
    return Html(re.sub(r"(?<=.)([/*+])|(?<=,)", r"<wbr>\1", escape(notation)))


def _heading(column: Column) -> Html:
    button = tag("button", column.title, type="button", title=column.hint or None)
    return tag("th", button, scope="col", class_=column.kind, aria_sort="none")


def _row(columns: tuple[Column, ...], row: tuple[Entry, ...], titles: dict[str, str]) -> list[Html]:
    return [
        _entry(column, entry, titles, first=place == 0)
        for place, (column, entry) in enumerate(zip(columns, row, strict=True))
    ]


def _entry(column: Column, entry: Entry, titles: dict[str, str], *, first: bool) -> Html:
    if column.kind == "folded":
        return tag(
            "td", tag("details", tag("summary", entry.aside), tag("code", entry.text)) if entry.text else "–"
        )
    is_code = column.kind == "code" and entry.text
    text = tag("code", breakable(entry.text)) if is_code else escape(entry.text)
    if entry.tone:
        text = tag("span", text, class_=f"tone {entry.tone}")
    aside = Html("")
    if entry.aside and column.kind == "named":
        aside = join(" ", tag("code", breakable(entry.aside), title=titles.get(entry.aside)))
    elif entry.aside:
        aside = join(" ", tag("small", entry.aside))
    value = entry.value
    if isinstance(value, float) and math.isnan(value):
        value = None
    return tag(
        "th" if first else "td",
        text,
        aside,
        class_=column.kind,
        scope="row" if first else None,
        data_value=value,
    )


#: before the page is painted: the theme chosen last time
THEME = """try {
  const chosen = localStorage.getItem("maclaurin-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* private windows */ }"""


def contents(parts: list[tuple[str, str, list[tuple[str, str]]]]) -> Html:
    """The list of sections that stands beside the page."""
    lists = []
    for title, top, headings in parts:
        links = [tag("li", tag("a", text, href=f"#{target}")) for target, text in headings]
        name = title if len(parts) > 1 else "Findings"
        lists.append(tag("ul", tag("li", tag("a", name, href=top)), *links))
    toggle = tag("button", "Dark", type="button", id="theme", aria_pressed="false", hidden=True)
    head = tag("p", tag("b", "Maclaurin"), class_="brand")
    return tag("nav", tag("div", head, toggle, class_="bar"), *lists, aria_label="Contents")


def asset(name: str) -> str:
    """A style sheet of the report that goes into the page."""
    text = resources.files("maclaurin.report").joinpath("assets", name).read_text("utf-8")
    if "</s" in text:
        raise ValueError(f"{name} would end its own element.")
    return text
