"""The tables of the page."""

from __future__ import annotations

import statistics

from maclaurin.inspection.schema import HeadRecord, Inspection, PerplexityRecord
from maclaurin.inspection.sharpness import SHARP_ORDER, error_at, layer_errors
from maclaurin.inspection.summary import number, order_text
from maclaurin.report.numbers import NOTHING, plain, power, share
from maclaurin.report.tables import Column, Entry, Table


def orders_table(inspection: Inspection) -> Table:
    """Perplexity by order, about zero and about the mean."""
    rows = []
    for order in inspection.orders:
        found = {
            row.about: row for row in inspection.perplexity if row.kind == "order" and row.order == order
        }
        rows.append(
            (Entry(str(order), order), *(_perplexity(found.get(about)) for about in ("zero", "mean")))
        )
    own = inspection.own_perplexity()
    rows.append((Entry("all", 10**6), Entry(number(own), own), Entry(number(own), own)))
    columns = (
        Column("order", "number"),
        Column("about zero", "number"),
        Column("about the row mean", "number"),
    )
    return Table("perplexity by order", columns, tuple(rows))


def windows_table(inspection: Inspection) -> Table:
    """Perplexity by window and tail."""
    rows = [row for row in inspection.perplexity if row.kind == "window"]
    tails = sorted({row.order for row in rows}, key=lambda order: -1 if order is None else order)
    names = ["no tail" if order is None else f"order {order}" for order in tails]
    columns = (Column("window", "number"), *(Column(name, "number") for name in names))
    own, lines = inspection.own_perplexity(), []
    for window in sorted({row.window for row in rows if row.window is not None}):
        of_order = {row.order: row for row in rows if row.window == window}
        bare = of_order[None].perplexity if None in of_order else None
        entries = [_perplexity(of_order.get(order), own, bare) for order in tails]
        lines.append((Entry(str(window), window), *entries))
    return Table("perplexity by window", columns, tuple(lines))


def layers_table(inspection: Inspection) -> Table:
    """Means over the heads of each layer."""
    columns = (
        Column("layer", "number"),
        Column("error at order 2", "number", "RMS over heads, about the row mean"),
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
    scores = head.scores
    return (
        Entry(f"{head.layer}.{head.head}", head.layer * 1000 + head.head),
        _needed(inspection, head.order_needed("mean", inspection.tolerance)),
        _needed(inspection, head.order_needed("zero", inspection.tolerance)),
        Entry(str(head.dominant_order), head.dominant_order),
        Entry(power(error := error_at(head, 2, "mean")), error),
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
    return Entry(number(row.perplexity), row.perplexity, aside)
