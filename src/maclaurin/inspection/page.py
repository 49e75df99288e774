"""The inspection as one page that needs nothing but itself, in the look of the report."""

from __future__ import annotations

from importlib import resources
from typing import Any

from maclaurin.inspection import html as report
from maclaurin.inspection.chart_data import heat_data, order_chart
from maclaurin.inspection.html import Html, embedded, join, table_html, tag
from maclaurin.inspection.schema import Inspection
from maclaurin.inspection.summary import findings
from maclaurin.inspection.tables import heads_table, layers_table, orders_table, windows_table
from maclaurin.report.numbers import counted, in_one_line, many
from maclaurin.report.tables import Table


def page(inspection: Inspection) -> str:
    """All of it as HTML."""
    sections = [
        ("heads", "The heads", _heads(inspection)),
        ("orders", "The orders", _orders(inspection)),
        ("windows", "Windows and tails", _windows(inspection)),
        ("layers", "The layers", _layers(inspection)),
        ("provenance", "Provenance", _provenance(inspection)),
    ]
    kept = [(name, title, body) for name, title, body in sections if body]
    article = tag(
        "article",
        _header(inspection),
        *(tag("section", tag("h2", title), body, id=name) for name, title, body in kept),
        id="top",
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{inspection.model.name} · Maclaurin"),
        tag("style", Html(report.asset("page.css") + _asset("charts.css") + _asset("inspect.css"))),
        tag("script", Html(report.THEME)),
    )
    contents = report.contents([("Findings", "#top", [(name, title) for name, title, _ in kept])])
    main = tag("main", article, _foot(), id="content")
    body = tag(
        "body",
        tag("a", "Skip to the findings", href="#content", class_="skip"),
        tag("div", contents, main, class_="frame"),
        tag("script", Html(_asset("charts.js"))),
        tag("script", Html(_asset("inspect.js"))),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _header(inspection: Inspection) -> Html:
    model, text = inspection.model, inspection.text
    facts = (
        f"{many(model.parameters)} parameters, {model.layers} layers of {model.heads} heads "
        f"({model.kv_heads} of keys and values, size {model.key_size}), weights in {model.weights}; "
        f"{text.tokens:,} tokens of {text.name} in {counted(text.contexts, 'context')} of at most "
        f"{text.context:,}."
    )
    return tag(
        "header",
        tag("p", "inspection", class_="kicker"),
        tag("h1", model.name),
        tag("p", "Which orders of softmax does each head need?", class_="question"),
        tag("p", facts, class_="status"),
        tag(
            "div",
            tag("h2", "What was found"),
            tag("ul", *(tag("li", line) for line in findings(inspection))),
            class_="findings",
        ),
    )


def _heads(inspection: Inspection) -> Html:
    lead = (
        "Each square is a head: its output with exp cut off at an order, against its output with all of "
        "exp, on the text above. Choose what the colours show; press a square, or focus the map and use "
        "the arrow keys, for all that is known of a head."
    )
    wide = inspection.model.heads > 16
    figure = tag(
        "figure",
        tag("div", id="heat", class_="heatmap wide" if wide else "heatmap"),
        tag("noscript", tag("p", "The map is drawn by a script; the table below holds its numbers.")),
        tag("figcaption", tag("b", "Figure 1. "), "Layers downwards, heads across."),
        embedded(heat_data(inspection), id="heat-data"),
    )
    every = tag("details", tag("summary", "Every head as a table"), table_html(heads_table(inspection)))
    return join(tag("p", lead), figure, every)


def _orders(inspection: Inspection) -> Html:
    chart = order_chart(inspection)
    if chart is None:
        return Html("")
    lead = (
        "Perplexity of the whole model with exp replaced by its Taylor polynomial in every layer, without "
        "any training. Softmax does not see a constant added to a row of scores, so the polynomial may be "
        "taken about the row's mean: the same state, read differently."
    )
    figure = tag(
        "figure",
        tag("div", class_="chart", data_title="Perplexity against order"),
        tag(
            "figcaption",
            tag("b", "Figure 2. "),
            "Perplexity against order; the line is the model as it came.",
        ),
        embedded(chart, class_="chart-data"),
        class_="drawn",
    )
    return join(tag("p", lead), figure, _table(orders_table(inspection), "Table 1", "Perplexity by order."))


def _windows(inspection: Inspection) -> Html:
    table = windows_table(inspection)
    if not table.rows:
        return Html("")
    sinks = counted(inspection.sinks, "sink")
    lead = (
        f"The last keys and {sinks} keep their exact weight; a key that leaves the window enters a "
        "polynomial tail about the mean, or is forgotten. Memory does not grow with the text."
    )
    words = (
        "Perplexity by window and order of the tail; in brackets, how much of the gap to softmax it closes."
    )
    return join(tag("p", lead), _table(table, "Table 2", words))


def _layers(inspection: Inspection) -> Html:
    lead = "Means over heads. Layers with large errors are the ones to keep exact in a conversion."
    return join(tag("p", lead), _table(layers_table(inspection), "Table 3", "By layer."))


def _table(table: Table, label: str, words: str) -> Html:
    return table_html(table, join(tag("b", f"{label}. "), words))


def _provenance(inspection: Inspection) -> Html:
    facts: dict[str, Any] = {
        "text": f"{inspection.text.name}, sha256 {inspection.text.sha256[:16]}",
        "attention": ", ".join(dict.fromkeys(inspection.model.attention)),
        **inspection.made,
    }
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", in_one_line(value), class_="prose"))
        for name, value in facts.items()
    ]
    return tag("div", tag("table", tag("tbody", *rows)), class_="scroll")


def _foot() -> Html:
    words = (
        "An error is ‖y_N − y‖/‖y‖ over all tokens of the text, y the output of softmax and y_N that of the "
        "polynomial over its own row sum, both in float64. The order needed is the even one from which on "
        "the error stays within the tolerance; an odd one has a row sum that can vanish. All numbers: "
    )
    return tag("footer", tag("p", words, tag("a", "inspection.json", href="inspection.json"), "."))


def _asset(name: str) -> str:
    text = resources.files("maclaurin.inspection").joinpath("assets", name).read_text("utf-8")
    if "</s" in text:
        raise ValueError(f"{name} would end its own element.")
    return text
