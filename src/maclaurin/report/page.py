"""One page that needs nothing but itself."""

from __future__ import annotations

from importlib import resources

from maclaurin.report.analysis import Analysis
from maclaurin.report.html import Html, join, tag
from maclaurin.report.numbers import listed
from maclaurin.report.sections import Sections

#: before the page is painted: the theme chosen last time
THEME = """try {
  const chosen = localStorage.getItem("maclaurin-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* private windows */ }"""


def page(analyses: list[Analysis]) -> str:
    """The whole report as HTML."""
    parts, articles = [], []
    for place, analysis in enumerate(analyses):
        sections = Sections(analysis, analysis.study.name if len(analyses) == 1 else f"study {place + 1}")
        articles.append(sections.article())
        parts.append((analysis.study.title, f"#{sections.anchor('top')}", sections.headings))
    title = listed([analysis.study.title for analysis in analyses])
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · Maclaurin"),
        tag("style", Html(asset("page.css"))),
        tag("script", Html(THEME)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the findings", href="#content", class_="skip"),
        tag("div", contents(parts), tag("main", *articles, _foot(), id="content"), class_="frame"),
        tag("script", Html(asset("page.js"))),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


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


def _foot() -> Html:
    words = (
        "Seeds are blocks and the noise is pooled over all cells. Intervals hold 95 % each and are not "
        "corrected for their number; tests of effects are. A run that diverged counts as the worst result. "
        "Numbers: "
    )
    files = join(_file("runs.csv"), ", ", _file("summary.csv"), ", ", _file("tables.md"), ".")
    return tag("footer", tag("p", words, files))


def _file(name: str) -> Html:
    return tag("a", name, href=name)


def asset(name: str) -> str:
    """A style sheet or script that goes into the page."""
    text = resources.files("maclaurin.report").joinpath("assets", name).read_text("utf-8")
    if "</s" in text:
        raise ValueError(f"{name} would end its own element.")
    return text
