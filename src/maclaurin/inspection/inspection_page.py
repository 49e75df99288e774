"""The page of an inspection: its charts, tables and text."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from maclaurin.inspection.inspection_record import (
    FILE_NAME,
    SHARP_ORDER,
    About,
    HeadRecord,
    Histogram,
    Inspection,
    PerplexityRecord,
    error_at,
    findings,
    layer_errors,
    order_text,
    perplexity_text,
)
from maclaurin.report.figure import Figure, Sheet, has_charts
from maclaurin.report.formatting import (
    NOTHING,
    Column,
    Entry,
    Table,
    counted,
    in_one_line,
    many,
    plain,
    power,
    share,
)
from maclaurin.report.page import (
    NO_CHARTS,
    Article,
    Block,
    Drawn,
    Facts,
    Fold,
    Numbering,
    Section,
    Tabled,
    Text,
    render,
)

#: orders whose error can be shown on the map, if they were tried
SHOWN_ERRORS = (2, 4, 8)
#: the first paragraph of each section
LEADS = {
    "heads": (
        "Each square is a head. Its error is the difference between its output with exp cut off at an order "
        "and its softmax output, on the text above. Choose what the colours show; click a square, or move "
        "the sliders, to see one head in detail."
    ),
    "orders": (
        "Perplexity of the whole model with exp replaced by its Taylor polynomial in every layer, untrained. "
        "Softmax does not change when a constant is added to a row of scores, so the polynomial can be taken "
        "about the mean score of the row; the state is the same."
    ),
    "windows": (
        "The last keys and the sinks keep their exact weights. A key that leaves the window enters a "
        "polynomial tail about the mean, or is forgotten. Memory does not grow with the text."
    ),
    "layers": "Means over heads. Layers with large errors are the ones to keep exact in a conversion.",
}
FOOT = (
    "An error is ‖y_N − y‖/‖y‖ over all tokens of the text, where y is the softmax output and y_N the "
    "output of the polynomial divided by its own row sum, both in float64. The order needed is the lowest "
    "even order from which the error stays within the tolerance; odd orders have a row sum that can vanish."
)
_NAMES: dict[About, str] = {"mean": "about the row mean", "zero": "about zero"}


def inspection_files(inspection: Inspection) -> dict[str, str]:
    """Name → content of index.html and, if charts can be drawn, of the figures as SVG."""
    drawn = {}
    if has_charts():
        drawn = {"heads": heads_figure(inspection), "orders": orders_figure(inspection)}
    files = {f"{name}.svg": figure.svg for name, figure in drawn.items() if figure is not None}
    return {**files, "index.html": _page(inspection, drawn)}


def _page(inspection: Inspection, drawn: Mapping[str, Figure | None]) -> str:
    article = Article(
        kind="inspection",
        title=inspection.model.name,
        question="Which orders of softmax does each head need?",
        lead=(Text(_facts(inspection)),),
        findings=tuple(findings(inspection)),
        sections=tuple(_sections(inspection, drawn)),
    )
    return render(article.title, [article], FOOT, (FILE_NAME,))


def _sections(inspection: Inspection, drawn: Mapping[str, Figure | None]) -> Iterator[Section]:
    """The sections that have content; `drawn` is empty if charts cannot be drawn."""
    number = Numbering()

    def section(name: str, title: str, *blocks: Block) -> Section:
        return Section(name, title, (Text(LEADS[name]), *blocks))

    def figure(name: str, title: str, note: str) -> tuple[Block, ...]:
        made = drawn.get(name)
        if made is None:
            return () if name in drawn else (NO_CHARTS,)
        return (Drawn(made, title, note, number("Figure"), f"{name}-figure"),)

    def table(found: Table, caption: str) -> Tabled:
        return Tabled(found, caption, number("Table"))

    note = (
        f"Orange: more than order {inspection.highest_order}, or not finite. Next to it the chosen head: its "
        "error by order, the size of each term of the series, its scores, and all measures."
    )
    every = Tabled(heads_table(inspection), "One row per head, named layer.head")
    heads = figure("heads", "The heads, layers downwards", note)
    yield section("heads", "Heads", *heads, Fold("Every head as a table", (every,)))
    if (orders := orders_table(inspection)).rows:
        note = "The dashed line is the model with its own attention."
        caption = (
            "Perplexity by order. A dash is an order that cannot be used; “all” is the model's own attention"
        )
        curves = figure("orders", "Perplexity against order", note)
        yield section("orders", "Orders", *curves, table(orders, caption))
    if (windows := windows_table(inspection)).rows:
        caption = (
            f"Perplexity by window and order of the tail, with {counted(inspection.sinks, 'sink')}; in "
            "brackets, the share of the gap to softmax that the tail closes"
        )
        yield section("windows", "Windows and tails", table(windows, caption))
    yield section("layers", "Layers", table(layers_table(inspection), "One row per layer"))
    yield Section("provenance", "Provenance", (Facts(_provenance(inspection), in_rows=True),))


def _facts(inspection: Inspection) -> str:
    model, text = inspection.model, inspection.text
    return (
        f"{many(model.parameters)} parameters, {model.layers} layers of {model.heads} heads "
        f"({model.kv_heads} key-value heads of size {model.key_size}), weights in {model.weights}; "
        f"{text.tokens:,} tokens of {text.name} in {counted(text.contexts, 'context')} of at most "
        f"{text.context:,}."
    )


def _provenance(inspection: Inspection) -> tuple[tuple[str, str], ...]:
    facts: dict[str, Any] = {
        "text": f"{inspection.text.name}, sha256 {inspection.text.sha256[:16]}",
        "weights": inspection.model.fingerprint[:16],
        "attention": tuple(dict.fromkeys(inspection.model.attention)),
        **inspection.made,
    }
    return tuple((name, in_one_line(value)) for name, value in facts.items())


# --------------------------------------------------------------------------------------------- charts


@final
@dataclass(frozen=True)
class _Measure:
    """One number of a head, as shown on the map; `shade` is the value that the colour shows."""

    title: str
    of: Callable[[HeadRecord], float | None]
    text: Callable[[float | None], str]
    shade: Callable[[float], float] = float


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    small = value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5)
    return (f"{value:.1e}" if small else f"{value:.3g}").replace("-", "−")


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{_number(100 * value)} %"


def _measures(inspection: Inspection) -> list[_Measure]:
    highest, tolerance = inspection.highest_order, inspection.tolerance

    def order(value: float | None) -> str:
        return order_text(None if value is None else int(value), highest)

    def needed(about: About) -> _Measure:
        title = f"order for {100 * tolerance:g} % error, {_NAMES[about]}"
        return _Measure(title, lambda head: head.order_needed(about, tolerance), order)

    def error(at: int) -> _Measure:
        title = f"error at order {at}, about the row mean (colour: log₁₀)"
        return _Measure(
            title, lambda head: head.error_about_mean[at], _percent, lambda x: math.log10(max(x, 1e-18))
        )

    return [
        needed("mean"),
        needed("zero"),
        *(error(at) for at in SHOWN_ERRORS if at <= highest),
        _Measure("dominant order of the numerator", lambda head: head.dominant_order, _number),
        _Measure("mean score", lambda head: head.scores.mean, _number),
        _Measure("deviation of all scores", lambda head: head.scores.deviation, _number),
        _Measure("deviation within a row", lambda head: head.row_deviation, _number),
        _Measure("least score", lambda head: head.scores.least, _number),
        _Measure("largest score", lambda head: head.scores.largest, _number),
        _Measure("sink mass", lambda head: head.sink_mass, _percent),
        _Measure("effective rank, order-1 state", lambda head: head.effective_rank_1, _number),
        _Measure("effective rank, order-2 state", lambda head: head.effective_rank_2, _number),
    ]


def heads_figure(inspection: Inspection) -> Figure:
    """The map of heads, and next to it everything about the chosen head."""
    import altair as alt

    sheet, measures = Sheet(), _measures(inspection)
    heads = sheet.add(_head_data(head, measures) for head in inspection.heads)
    sharpest = max(inspection.heads, key=lambda head: error_at(head, SHARP_ORDER, "mean"))
    measure = alt.param(
        name="measure",
        value=0,
        bind=alt.binding_select(
            options=list(range(len(measures))), labels=[each.title for each in measures], name="Colours show"
        ),
    )
    chosen = alt.selection_point(
        name="chosen",
        fields=["layer", "head"],
        on="click",
        clear=False,
        value=[{"layer": sharpest.layer, "head": sharpest.head}],
        bind={  # type: ignore[arg-type]
            "layer": alt.binding_range(min=0, max=inspection.model.layers - 1, step=1, name="Layer"),
            "head": alt.binding_range(min=0, max=inspection.model.heads - 1, step=1, name="Head"),
        },
    )
    model = inspection.model
    heat = (
        heads.properties(width=max(160, min(560, 26 * model.heads)), height=max(120, 15 * model.layers))
        .transform_calculate(value="datum.values[measure]", text="datum.texts[measure]")
        .mark_rect(invalid="show", cursor="pointer")
        .encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("layer:O", title="layer", axis=alt.Axis(labelOverlap=True)),
            color=alt.Color(
                "value:Q",
                scale=alt.Scale(scheme="blues", domain=_shade_domain(alt, inspection, measures)),
                legend=alt.Legend(title=None),
            ),
            stroke=alt.condition(chosen, alt.value(alt.ExprRef("c3")), alt.value(None)),
            strokeWidth=alt.condition(chosen, alt.value(3), alt.value(0)),
            tooltip=[
                alt.Tooltip("layer:O", title="layer"),
                alt.Tooltip("head:O", title="head"),
                alt.Tooltip("text:N", title="value"),
            ],
        )
        .add_params(measure, chosen)
    )
    one = heads.properties(width=360, height=150).transform_filter(chosen)
    details = [
        _errors_chart(alt, sheet, one, inspection),
        _terms_chart(alt, one, inspection),
        _scores_chart(alt, one),
    ]
    left = alt.vconcat(heat, _values_chart(alt, one, measures)).resolve_scale(color="independent")
    right = alt.vconcat(*details).resolve_scale(color="independent")
    return sheet.figure(alt.hconcat(left, right).resolve_scale(color="independent"))


def _shade_domain(alt: Any, inspection: Inspection, measures: list[_Measure]) -> list[Any]:
    """Least and largest shade of the measure that is shown."""
    ends: list[tuple[float, float]] = []
    for measure in measures:
        shades = [
            measure.shade(value) for head in inspection.heads if (value := measure.of(head)) is not None
        ]
        ends.append((min(shades), max(shades)) if shades else (0.0, 1.0))
    return [alt.ExprRef(f"{json.dumps([end[i] for end in ends])}[measure]") for i in (0, 1)]


def _head_data(head: HeadRecord, measures: list[_Measure]) -> dict[str, Any]:
    values = [measure.of(head) for measure in measures]
    shades = [None if v is None else m.shade(v) for v, m in zip(values, measures, strict=True)]
    return {
        "layer": head.layer,
        "head": head.head,
        "values": shades,
        "texts": [measure.text(value) for value, measure in zip(values, measures, strict=True)],
        "mean": [_drawn(error) for error in head.error_about_mean[::2]],
        "zero": [_drawn(error) for error in head.error_about_zero[::2]],
        "terms": [_drawn(term) for term in head.terms],
        **_bars("score", head.score_histogram),
        **_bars("row", head.row_mean_histogram),
    }


def _bars(name: str, histogram: Histogram) -> dict[str, Any]:
    """Shares instead of counts, at the left edges of the bins."""
    total = max(sum(histogram.counts), 1)
    places = [histogram.start + i * histogram.width for i in range(len(histogram.counts))]
    return {f"{name}_x": places, f"{name}_share": [count / total for count in histogram.counts]}


def _drawn(value: float | None) -> float | None:
    """A number for a logarithmic axis."""
    return None if value is None or not value > 0 else min(max(value, 1e-12), 1e12)


def _order_axis(alt: Any, inspection: Inspection) -> Any:
    domain = alt.Scale(domain=[0, inspection.highest_order])
    return alt.X("order:Q", title="order", scale=domain, axis=alt.Axis(tickMinStep=1, format="d"))


def _errors_chart(alt: Any, sheet: Sheet, one: Any, inspection: Inspection) -> Any:
    """Error by even order."""
    orders = f"sequence(0, {inspection.highest_order + 1}, 2)"
    lines = (
        one.transform_calculate(order=orders)
        .transform_flatten(["order", "mean", "zero"])
        .transform_fold(["mean", "zero"], as_=["about", "error"])
        .transform_filter("isValid(datum.error)")
        .transform_calculate(expansion=f"{json.dumps(_NAMES)}[datum.about]")
        .mark_line(point=True)
        .encode(
            x=_order_axis(alt, inspection),
            y=alt.Y("error:Q", title="error of the output", scale=alt.Scale(type="log"), axis=_powers(alt)),
            color=alt.Color("expansion:N", sort=list(_NAMES.values()), legend=_legend(alt)),
            tooltip=[
                alt.Tooltip("order:Q", title="order"),
                alt.Tooltip("error:Q", title="error", format=".2g"),
            ],
        )
    )
    limit = sheet.add([{"tolerance": inspection.tolerance}]).mark_rule(strokeDash=[5, 4])
    title = "error by order, even orders; dashed: the tolerance"
    return (lines + limit.encode(y=alt.Y("tolerance:Q", title="error of the output"))).properties(title=title)


def _terms_chart(alt: Any, one: Any, inspection: Inspection) -> Any:
    """Size of each term of the series."""
    return (
        one.transform_calculate(order=f"sequence(0, {inspection.highest_order + 1})")
        .transform_flatten(["order", "terms"])
        .transform_filter("isValid(datum.terms)")
        .mark_line(point={"color": alt.ExprRef("c2")}, color=alt.ExprRef("c2"))
        .encode(
            x=_order_axis(alt, inspection),
            y=alt.Y("terms:Q", title="‖Σ xⁿv/n!‖ / ‖Σ eˣv‖", scale=alt.Scale(type="log"), axis=_powers(alt)),
            tooltip=[
                alt.Tooltip("order:Q", title="order"),
                alt.Tooltip("terms:Q", title="size", format=".2g"),
            ],
        )
        .properties(title="size of each term, relative to the sum")
    )


def _scores_chart(alt: Any, one: Any) -> Any:
    """Histograms of all scores and of the means of rows."""
    colours = alt.Scale(range=[alt.ExprRef("c5"), alt.ExprRef("c3")])

    def bars(name: str, label: str) -> Any:
        return (
            one.transform_flatten([f"{name}_x", f"{name}_share"])
            .transform_calculate(end=f"datum.{name}_x + 1", scores=f"'{label}'")
            .mark_bar(opacity=0.6)
            .encode(
                x=alt.X(f"{name}_x:Q", title="score x"),
                x2="end:Q",
                y=alt.Y(f"{name}_share:Q", title="share", stack=None),
                y2=alt.Y2Datum(0),
                color=alt.Color("scores:N", scale=colours, legend=_legend(alt)),
            )
        )

    both = bars("score", "all scores") + bars("row", "row means")
    return both.properties(title="scores")


def _values_chart(alt: Any, one: Any, measures: list[_Measure]) -> Any:
    """All measures of the chosen head as text."""
    titles = json.dumps([measure.title.partition(" (")[0] for measure in measures], ensure_ascii=False)
    head = alt.expr("'layer ' + chosen.layer[0] + ', head ' + chosen.head[0]")
    rows = one.transform_calculate(title=titles).transform_flatten(["title", "texts"])
    y = alt.Y("title:N", sort=None, axis=None)
    names = rows.mark_text(align="left").encode(y=y, x=alt.value(0), text="title:N")
    values = rows.mark_text(align="right").encode(y=y, x=alt.value(300), text="texts:N")
    title = alt.Title(head, fontSize=14)
    return (names + values).properties(width=300, height=18 * len(measures), title=title)


def _powers(alt: Any) -> Any:
    """Labels at powers of ten only."""
    power = "round(log(datum.value) / LN10)"
    label = f"abs(log(datum.value) / LN10 - {power}) < 1e-6 ? '1e' + {power} : ''"
    return alt.Axis(labelExpr=label, tickCount=5)


def _legend(alt: Any) -> Any:
    return alt.Legend(title=None, orient="bottom")


def orders_figure(inspection: Inspection) -> Figure | None:
    """Perplexity against order; None if no order gives a finite number."""
    import altair as alt

    points = [
        {"order": row.order, "perplexity": row.perplexity, "about": _NAMES[row.about]}
        for row in inspection.perplexity
        if row.kind == "order" and row.about is not None and _is_number(row.perplexity)
    ]
    if not points:
        return None
    sheet, scale = Sheet(), alt.Scale(type="log")
    lines = (
        sheet.add(points)
        .properties(width=560, height=300)
        .mark_line(point=True)
        .encode(
            x=alt.X("order:Q", title="order", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("perplexity:Q", title="perplexity", scale=scale),
            color=alt.Color("about:N", sort=list(_NAMES.values()), legend=_legend(alt)),
            tooltip=[
                alt.Tooltip("about:N", title="expanded"),
                alt.Tooltip("order:Q", title="order"),
                alt.Tooltip("perplexity:Q", title="perplexity", format=",.4~g"),
            ],
        )
    )
    own = inspection.own_perplexity()
    if _is_number(own):
        rule = sheet.add([{"own": own}]).mark_rule(strokeDash=[5, 4])
        lines = lines + rule.encode(y=alt.Y("own:Q", title="perplexity", scale=scale))
    return sheet.figure(lines)


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


# --------------------------------------------------------------------------------------------- tables


def orders_table(inspection: Inspection) -> Table:
    """Perplexity by order, about zero and about the mean; empty if no order was tried."""
    rows = []
    for order in inspection.orders:
        found = {
            row.about: row for row in inspection.perplexity if row.kind == "order" and row.order == order
        }
        if found:
            rows.append(
                (Entry(str(order), order), *(_perplexity(found.get(about)) for about in ("zero", "mean")))
            )
    if rows:
        own = Entry(perplexity_text(inspection.own_perplexity()), inspection.own_perplexity())
        rows.append((Entry("all", 10**6), own, own))
    columns = (Column("order"), Column("about zero", "number"), Column("about the row mean", "number"))
    return Table("perplexity by order", columns, tuple(rows))


def windows_table(inspection: Inspection) -> Table:
    """Perplexity by window and tail."""
    rows = [row for row in inspection.perplexity if row.kind == "window"]
    tails = sorted({row.order for row in rows}, key=lambda order: -1 if order is None else order)
    names = ["no tail" if order is None else f"order {order}" for order in tails]
    own, lines = inspection.own_perplexity(), []
    for window in sorted({row.window for row in rows if row.window is not None}):
        of_order = {row.order: row for row in rows if row.window == window}
        bare = of_order[None].perplexity if None in of_order else None
        cells = [_perplexity(of_order.get(order), own, bare) for order in tails]
        lines.append((Entry(str(window), window), *cells))
    columns = (Column("window"), *(Column(name, "number") for name in names))
    return Table("perplexity by window", columns, tuple(lines))


def layers_table(inspection: Inspection) -> Table:
    """Means over the heads of each layer."""
    columns = (
        Column("layer"),
        Column("error at order 2", "number", "root mean square over heads, about the row mean"),
        Column("order needed", "number", "median head, about the row mean"),
        Column("sharp heads", "number", f"heads that need more than order {SHARP_ORDER}"),
        Column("row mean", "number"),
        Column("row deviation", "number"),
        Column("largest |x|", "number"),
        Column("sink mass", "number"),
    )
    errors = layer_errors(inspection, 2)
    rows = [_layer(inspection, layer, errors[layer]) for layer in range(inspection.model.layers)]
    return Table("layers", columns, tuple(rows))


def heads_table(inspection: Inspection) -> Table:
    """One row per head."""
    columns = (
        Column("head", hint="layer.head"),
        Column("order needed", "number", "about the row mean"),
        Column("about zero", "number", "order needed about zero"),
        Column("dominant order", "number", "of the terms xⁿ/n! of the numerator"),
        Column("error at order 2", "number", "about the row mean"),
        Column("mean score", "number"),
        Column("deviation", "number"),
        Column("least", "number"),
        Column("largest", "number"),
        Column("sink mass", "number"),
        Column("rank, order 1", "number"),
        Column("rank, order 2", "number"),
    )
    return Table("heads", columns, tuple(_head(inspection, head) for head in inspection.heads))


def _head(inspection: Inspection, head: HeadRecord) -> tuple[Entry, ...]:
    scores, error = head.scores, error_at(head, 2, "mean")
    return (
        Entry(f"{head.layer}.{head.head}", head.layer * 1000 + head.head),
        _needed(inspection, head.order_needed("mean", inspection.tolerance)),
        _needed(inspection, head.order_needed("zero", inspection.tolerance)),
        Entry(str(head.dominant_order), head.dominant_order),
        Entry(power(error), error),
        *(Entry(plain(x, 2), x) for x in (scores.mean, scores.deviation, scores.least, scores.largest)),
        Entry(share(head.sink_mass), head.sink_mass),
        *(Entry(plain(x, 1), x) for x in (head.effective_rank_1, head.effective_rank_2)),
    )


def _layer(inspection: Inspection, layer: int, error: float) -> tuple[Entry, ...]:
    heads = inspection.of_layer(layer)
    over = inspection.highest_order + 1
    needed = [head.order_needed("mean", inspection.tolerance) for head in heads]
    middle = statistics.median_high([over if order is None else order for order in needed])
    sharp = sum(order is None or order > SHARP_ORDER for order in needed)
    row_mean = statistics.mean(head.row_means.mean for head in heads)
    deviation = statistics.mean(head.row_deviation for head in heads)
    largest = max(max(-head.scores.least, head.scores.largest) for head in heads)
    mass = statistics.mean(head.sink_mass for head in heads)
    return (
        Entry(str(layer), layer),
        Entry(power(error), error),
        _needed(inspection, None if middle == over else middle),
        Entry(f"{sharp} of {len(heads)}", sharp),
        *(Entry(plain(x, 2), x) for x in (row_mean, deviation, largest)),
        Entry(share(mass), mass),
    )


def _needed(inspection: Inspection, order: int | None) -> Entry:
    highest = inspection.highest_order
    return Entry(order_text(order, highest), highest + 1 if order is None else order)


def _perplexity(row: PerplexityRecord | None, own: float | None = None, bare: float | None = None) -> Entry:
    if row is None or row.perplexity is None:
        return Entry(NOTHING)
    aside = ""
    if row.order is not None and own is not None and bare is not None and bare > own:
        closed = (bare - row.perplexity) / (bare - own)
        aside = f"({round(100 * closed)} %)".replace("-", "−")
    return Entry(perplexity_text(row.perplexity), row.perplexity, aside)
