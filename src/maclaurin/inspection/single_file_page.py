"""Pages in one file: Jinja templates, and Altair charts with Vega's scripts inlined once.

A chart is defined once. The page draws it with Vega; `svg` renders the same definition without a browser, for
files and for readers without scripts.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import dataclass
from typing import Any, final

import jinja2
from markupsafe import Markup

#: Okabe and Ito's colours, as in page.css
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b8579b", "#c88a00", "#3a9bd9", "#7a6a00")
#: how charts look in files; the page sets its own colours for light and dark
_FILE_CONFIG: dict[str, Any] = {
    "background": "white",
    "font": "sans-serif",
    "title": {"anchor": "start"},
    "view": {"stroke": None},
    "range": {"category": list(PALETTE)},
    "scale": {"invalid": {"color": {"value": PALETTE[1]}}},  # in place of what is no number
}


@final
@dataclass(frozen=True)
class Column:
    """A heading of a table, with an explanation that is shown when it is pointed at."""

    title: str
    hint: str = ""


@final
@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table: its text, the number it is sorted by, a smaller second part."""

    text: str
    value: float | None = None
    aside: str = ""


@final
@dataclass(frozen=True)
class Table:
    """A table that sorts by its headings."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


@final
@dataclass(frozen=True)
class Figure:
    """A chart with its name and what it shows.

    spec   Vega-Lite, from `chart_spec`
    """

    name: str
    caption: str
    spec: dict[str, Any]

    @property
    def data(self) -> Markup:
        """The chart inside the page, where a script can read it and no text in it can end it."""
        return embedded(self.spec)

    @functools.cached_property
    def svg(self) -> Markup:
        """The chart as it first looks."""
        return Markup(svg(self.spec))


def has_charts() -> bool:
    """Whether the libraries that charts need are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("altair", "vl_convert"))


def chart_spec(chart: Any) -> dict[str, Any]:
    """An Altair chart as plain Vega-Lite."""
    return json.loads(chart.to_json(indent=None))


def svg(spec: dict[str, Any]) -> str:
    """A chart as SVG, without a browser."""
    import vl_convert

    return vl_convert.vegalite_to_svg({**spec, "config": _FILE_CONFIG}, vl_version=_version(spec))


def vega_scripts(specs: list[dict[str, Any]]) -> Markup:
    """Vega, Vega-Lite and vega-embed as one script; nothing without charts."""
    if not specs:
        return Markup("")
    import vl_convert

    bundle: Any = vl_convert.javascript_bundle  # its stub asks for an argument that is optional
    return _inlined(bundle(vl_version=_version(specs[0])), "Vega")


def _version(spec: dict[str, Any]) -> str:
    """6.4 of …/vega-lite/v6.4.1.json."""
    return ".".join(spec["$schema"].rpartition("/v")[2].split(".")[:2])


def embedded(data: Any) -> Markup:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return Markup(safe)


def render(package: str, template: str, **values: Any) -> str:
    """A template in the folder `assets` of a package; style, script and macros may be those beside us."""
    folders = dict.fromkeys((package, "maclaurin.inspection"))
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(folder, "assets") for folder in folders])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals["asset"] = lambda name: _inlined(loader.get_source(environment, name)[0], name)
    return environment.get_template(template).render(**values)


def _inlined(text: str, name: str) -> Markup:
    """A style sheet or script that goes into the page as it is."""
    if "</script" in text or "</style" in text:
        raise ValueError(f"{name} would end its own element.")
    return Markup(text)
