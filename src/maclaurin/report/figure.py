"""Charts, each defined once with altair: Vega draws it on the page, vl-convert writes it as SVG and PDF.

Colours are parameters (ink, c0 … c6). On the page they are variables of the style sheet, so that one chart
works on light and dark; in a file they are the colours for white paper. Altair and vl-convert are imported
when a chart is made: pages work without charts, and figures drawn with matplotlib use only the colours.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from maclaurin.plain_data import finite

if TYPE_CHECKING:
    import altair as alt

View = Any  # altair's classes for single, layered and concatenated views share no useful base
Row = dict[str, Any]

#: Okabe and Ito's palette, darkened for white paper where needed
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b8579b", "#c88a00", "#3a9bd9", "#7a6a00")
INK = "#1b1f24"
#: significant digits of the numbers of a chart, enough to draw
DIGITS = 5

#: for figures drawn with matplotlib
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"
WIDTH = 6.5
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,
    "svg.hashsalt": "maclaurin",
}

#: name → colour on white paper, and in the page
_PARAMETERS = {"ink": INK, **{f"c{place}": colour for place, colour in enumerate(PALETTE)}}
_PAPER = {**_PARAMETERS, "paper": "white", "line": "#e4e4e0", "quiet": "#9a9a92"}
_PAGE = {**{name: f"var(--{name})" for name in _PAPER}, "paper": "transparent"}


@final
@dataclass(frozen=True, eq=False)
class Figure:
    """A chart with its data, as vega-lite in the colours of the page."""

    spec: dict[str, Any]

    @property
    def paper_spec(self) -> dict[str, Any]:
        """The specification for white paper, without the invisible points for tooltips."""
        params = [
            {**each, "value": _PAPER[each["name"]]} if each["name"] in _PARAMETERS else each
            for each in self.spec["params"]
        ]
        config = {**_config(_PAPER), "font": "Helvetica, Arial, sans-serif"}
        return _without_hover({**self.spec, "params": params, "config": config})

    @functools.cached_property
    def svg(self) -> str:
        """The chart on white paper, in its initial state."""
        import vl_convert

        return _with_own_clip_numbers(vl_convert.vegalite_to_svg(self.paper_spec, vl_version=_version()))

    @property
    def pdf(self) -> bytes:
        """The same as PDF."""
        import vl_convert

        return vl_convert.vegalite_to_pdf(self.paper_spec, vl_version=_version())


def _with_own_clip_numbers(svg: str) -> str:
    """The file with its clip paths numbered from 1: Vega counts through all charts of a process."""
    numbers = {name: f"clip{i}" for i, name in enumerate(re.findall(r'id="(clip\d+)"', svg), 1)}
    return re.sub(r'(id="|url\(#)(clip\d+)', lambda found: found[1] + numbers[found[2]], svg)


@final
class Sheet:
    """The rows of a figure, by name. They are stored outside the chart, so altair does not check each one."""

    def __init__(self) -> None:
        self._datasets: dict[str, list[Row]] = {}

    def add(self, rows: Iterable[Row]) -> alt.Chart:
        """A chart of these rows, to be given a mark."""
        import altair as alt

        name = f"data-{len(self._datasets)}"
        self._datasets[name] = finite(list(rows), DIGITS)
        return alt.Chart(alt.NamedData(name))

    def figure(self, view: View) -> Figure:
        """The figure of a view of these rows, with the colours as parameters."""
        import altair as alt

        parameters = [alt.param(name=name, value=_PAGE[name]) for name in _PARAMETERS]
        return Figure({**view.add_params(*parameters).to_dict(), "datasets": self._datasets})


def has_charts() -> bool:
    """Whether the libraries that charts need are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("altair", "vl_convert"))


@functools.cache
def vega_script() -> str:
    """Vega, vega-lite and vega-embed in one script, so that the page loads nothing."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=_version())


def page_config() -> dict[str, Any]:
    """The style of charts on a page; the page adds its font."""
    return _config(_PAGE)


def _version() -> str:
    """The version of vega-lite, in the format of vl-convert."""
    import altair as alt

    return ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


def _config(colours: Mapping[str, str]) -> dict[str, Any]:
    ink, quiet = colours["ink"], colours["quiet"]
    words = {
        "labelColor": ink,
        "titleColor": ink,
        "labelFontSize": 11,
        "titleFontSize": 11.5,
        "labelLimit": 220,
    }
    return {
        "background": colours["paper"],
        "axis": {**words, "gridColor": colours["line"], "domainColor": quiet, "tickColor": quiet,
                 "titleFontWeight": "normal", "labelLimit": 220},
        "legend": {**words, "symbolStrokeWidth": 2.5, "labelLimit": 220},
        "title": {"color": ink, "fontSize": 12, "anchor": "start"},
        "text": {"color": ink},
        "rule": {"color": ink},
        "view": {"stroke": None},
        "range": {"category": [colours[f"c{place}"] for place in range(len(PALETTE))]},
        "scale": {"invalid": {"color": {"value": colours["c1"]}}},  # colour of values that are not finite
    }  # fmt: skip


def _without_hover(spec: Any) -> Any:
    if isinstance(spec, dict):
        return {key: part if key == "datasets" else _without_hover(part) for key, part in spec.items()}
    if isinstance(spec, list):
        return [_without_hover(part) for part in spec if not _is_for_pointer(part)]
    return spec


def _is_for_pointer(layer: Any) -> bool:
    """Whether these are invisible marks, which only have tooltips."""
    return (
        isinstance(layer, dict) and isinstance(layer.get("mark"), dict) and layer["mark"].get("aria") is False
    )
