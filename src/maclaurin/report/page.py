"""Pages in one file: the content of a page is data, and one template turns it into HTML.

A page is a list of articles; an article has sections, and a section blocks: text, tables, figures. Style,
scripts and data are inlined, so that a page makes no requests.
"""

from __future__ import annotations

import collections
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, ClassVar, final

import jinja2
from markupsafe import Markup, escape

from maclaurin.report.figure import Figure, page_config, vega_script
from maclaurin.report.formatting import Table, Tone


@dataclass(frozen=True)
class Block:
    """Something on the page; `kind` names it in the template."""

    kind: ClassVar[str]


@final
@dataclass(frozen=True)
class Heading(Block):
    """A heading inside a section."""

    kind = "heading"
    text: str
    anchor: str


@final
@dataclass(frozen=True)
class Text(Block):
    """A paragraph; style is a class of the style sheet."""

    kind = "text"
    text: str
    style: str = ""


@final
@dataclass(frozen=True)
class Bullets(Block):
    """Sentences, one below the other."""

    kind = "bullets"
    lines: tuple[str, ...]


@final
@dataclass(frozen=True)
class Facts(Block):
    """Names and values, side by side or one below the other."""

    kind = "facts"
    facts: tuple[tuple[str, str], ...]
    in_rows: bool = False


@final
@dataclass(frozen=True)
class Formulas(Block):
    """(cells, notation, formula)."""

    kind = "formulas"
    rows: tuple[tuple[str, str, str], ...]


@final
@dataclass(frozen=True)
class Progress(Block):
    """How much of the planned work is done, as a bar and in words."""

    kind = "progress"
    done: int
    planned: int
    text: str
    note: str = ""


@final
@dataclass(frozen=True)
class Tabled(Block):
    """A table with its caption; pointing at a notation shows its formula."""

    kind = "table"
    table: Table
    caption: str = ""
    label: str = ""
    formulas: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Drawn(Block):
    """A figure with its caption.

    anchor   its id in the page
    file     its SVG file next to the page, for readers without scripts; if empty, the page contains the SVG
    """

    kind = "figure"
    figure: Figure
    title: str
    note: str = ""
    label: str = ""
    anchor: str = ""
    file: str = ""


@final
@dataclass(frozen=True)
class ClaimCard:
    """A claim with its verdict."""

    says: str
    verdict: str
    tone: Tone
    facts: tuple[tuple[str, str], ...]


@final
@dataclass(frozen=True)
class Claims(Block):
    """Claims, each in a frame."""

    kind = "claims"
    cards: tuple[ClaimCard, ...]


@final
@dataclass(frozen=True)
class Fold(Block):
    """Blocks that are hidden until the reader opens them."""

    kind = "fold"
    summary: str
    blocks: tuple[Block, ...]
    open: bool = False
    style: str = ""


#: shown instead of figures if they cannot be drawn
NO_CHARTS = Text(
    "Charts need altair: pip install 'maclaurin[plot]', then run the same command again.", "note"
)


@final
@dataclass(frozen=True)
class Section:
    """A heading in the contents and the blocks below it."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]


@final
@dataclass(frozen=True)
class Article:
    """The subject of a page: a study, a model, a memory.

    kind, name   shown above the title, such as study mini
    lead         blocks below the question, before the findings
    """

    kind: str
    title: str
    question: str
    lead: tuple[Block, ...]
    findings: tuple[str, ...]
    sections: tuple[Section, ...]
    name: str = ""
    anchor: str = "top"


@final
class Numbering:
    """Figure 1, Table 1, Figure 2: numbers labels in the order of the calls."""

    def __init__(self) -> None:
        self._last = collections.Counter[str]()

    def __call__(self, kind: str) -> str:
        """The next label of a kind."""
        self._last[kind] += 1
        return f"{kind} {self._last[kind]}"


def render(title: str, articles: Sequence[Article], foot: str, files: Sequence[str]) -> str:
    """The page as HTML; `files` are the files next to it with its numbers."""
    has_figures = next(figures_of(articles), None) is not None
    return _environment().get_template("page.html").render(
        title=title,
        articles=articles,
        foot=foot,
        files=files,
        css=_inlined(_asset("page.css")),
        script=_inlined(_asset("page.js")),
        vega=_inlined(vega_script()) if has_figures else "",
        chart_config=page_config(),
    )  # fmt: skip


def figures_of(articles: Sequence[Article]) -> Iterator[Drawn]:
    """Every figure, in the order of the page."""
    for article in articles:
        for section in article.sections:
            yield from _drawn(section.blocks)


def _drawn(blocks: Sequence[Block]) -> Iterator[Drawn]:
    for block in blocks:
        if isinstance(block, Drawn):
            yield block
        elif isinstance(block, Fold):
            yield from _drawn(block.blocks)


def slug(text: str) -> str:
    """The text as an id or file name."""
    return "-".join("".join(c if c.isalnum() and c.isascii() else " " for c in text.lower()).split()) or "x"


def breakable(notation: str) -> Markup:
    """A notation with possible line breaks between its parts."""
    return Markup(re.sub(r"(?<=.)([/*+])|(?<=,)", r"<wbr>\1", str(escape(notation))))


def embedded(data: Any) -> Markup:
    """JSON for a script element, escaped so that no text can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("maclaurin.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters |= {
        "zip": lambda a, b: zip(a, b, strict=True), "breakable": breakable, "embedded": embedded,
    }  # fmt: skip
    return found


def _asset(name: str) -> str:
    return resources.files("maclaurin.report").joinpath("assets", name).read_text("utf-8")


def _inlined(text: str) -> Markup:
    """A style sheet or script, inserted into the page unchanged."""
    if re.search(r"</(script|style)", text, flags=re.IGNORECASE):
        raise ValueError("a script or style sheet contains the end tag of its own element.")
    return Markup(text)
