"""The findings of an inspection in sentences."""

from __future__ import annotations

import math
import statistics

from maclaurin.inspection.inspection_record import (
    SHARP_ORDER,
    Inspection,
    heads_within,
    layer_errors,
    layers_to_keep,
    sharp_heads,
)
from maclaurin.report.formatting import listed, share

#: orders at which heads are counted, if they were tried
COUNTED = (2, 4, 8)


def findings(inspection: Inspection) -> list[str]:
    """The main findings, most important first."""
    lines = [_scores(inspection), _within(inspection), _sharp(inspection), *_orders(inspection)]
    lines += [*_windows(inspection), _sinks(inspection), _keep(inspection)]
    return [line for line in lines if line]


def perplexity_text(value: float | None) -> str:
    """28.64, 545.7, 18,696."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "∞"
    if value >= 1e7:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def order_text(needed: int | None, highest: int) -> str:
    """4, or > 32."""
    return f"> {highest}" if needed is None else str(needed)


def _scores(inspection: Inspection) -> str:
    heads = inspection.heads
    middle = statistics.median(head.row_means.mean for head in heads)
    largest = max(max(-head.scores.least, head.scores.largest) for head in heads)
    deviation = statistics.median(head.row_deviation for head in heads)
    return (
        f"Scores: the median head has a row mean of {middle:.2g} and deviates by {deviation:.2g} within a "
        f"row; the largest |x| is {largest:.3g}."
    ).replace("-", "−")


def _within(inspection: Inspection) -> str:
    total = len(inspection.heads)
    counts = [
        f"{heads_within(inspection, order)} at order {order}"
        for order in COUNTED
        if order <= inspection.highest_order
    ]
    if not counts:
        return ""
    tolerance = share(inspection.tolerance)
    return f"Of {total} heads, within {tolerance} of softmax about the row mean: {listed(counts)}."


def _sharp(inspection: Inspection) -> str:
    if inspection.highest_order < SHARP_ORDER:
        return ""
    sharp = sharp_heads(inspection)
    if not sharp:
        return f"No head is sharp: order {SHARP_ORDER} is enough for every head."
    named = ", ".join(
        f"{head.layer}.{head.head} ({order_text(head.order_needed, inspection.highest_order)})"
        for head in sharp[:6]
    )
    return (
        f"{len(sharp)} heads are sharp: they need more than order {SHARP_ORDER}. The sharpest, as layer.head "
        f"with the order needed: {named}."
    )


def _orders(inspection: Inspection) -> list[str]:
    own = inspection.own_perplexity()
    order = 2 if 2 in inspection.orders else inspection.orders[0]
    zero = inspection.perplexity_of(order=order, about="zero")
    mean = inspection.perplexity_of(order=order, about="mean")
    if own is None:
        return []
    line = f"Perplexity with the model's own attention: {perplexity_text(own)}."
    if mean is not None:
        zero_text = f", {perplexity_text(zero)} about zero" if zero is not None else ""
        line += f" With order {order}, untrained: {perplexity_text(mean)} about the row mean{zero_text}."
    return [line]


def _windows(inspection: Inspection) -> list[str]:
    own = inspection.own_perplexity()
    best = [row for row in inspection.perplexity if row.kind == "window" and row.order is not None]
    lines = []
    for window in sorted({row.window for row in best if row.window is not None}):
        bare = inspection.perplexity_of(window=window)
        tails = [row for row in best if row.window == window and row.perplexity is not None]
        if own is None or bare is None or not tails or bare <= own:
            continue
        row = max(tails, key=lambda row: row.order or 0)
        assert row.perplexity is not None
        closed = (bare - row.perplexity) / (bare - own)
        part = share(min(closed, 1)) if closed > 0 else "none"
        lines.append(
            f"Window {window}: {perplexity_text(bare)} alone, {perplexity_text(row.perplexity)} with a tail "
            f"of order {row.order}, which closes {part} of the gap."
        )
    return lines


def _sinks(inspection: Inspection) -> str:
    if not inspection.sinks:
        return ""
    masses = [head.sink_mass for head in inspection.heads]
    half = sum(mass > 0.5 for mass in masses)
    first = "token" if inspection.sinks == 1 else f"{inspection.sinks} tokens"
    return (
        f"The first {first} takes {share(statistics.mean(masses))} of the attention on average, and more "
        f"than half of it in {half} of {len(masses)} heads."
    )


def _keep(inspection: Inspection) -> str:
    """Layers to keep exact in a conversion."""
    if inspection.model.layers < 4 or inspection.highest_order < 2:
        return ""
    count = max(1, inspection.model.layers // 6)
    errors = layer_errors(inspection, 2)
    layers = layers_to_keep(inspection, count)
    named = listed([f"{layer} ({errors[layer]:.2f})" for layer in layers])
    return f"Layers to keep exact in a conversion, with their relative error at order 2: {named}."
