"""inspection.json: the measurements of a model, which heads and layers need high orders, and the findings.

A conversion reads it to keep sharp heads exact. Needs no torch.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from maclaurin.plain_data import finite, read_record, to_plain, write_json
from maclaurin.report.formatting import listed, share

SCHEMA = 1
FILE_NAME = "inspection.json"
#: significant digits of the numbers in the file
DIGITS = 7

About = Literal["zero", "mean"]
Kind = Literal["own", "order", "window"]


@final
@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation, least and largest of some numbers."""

    mean: float
    deviation: float
    least: float
    largest: float


@final
@dataclass(frozen=True)
class Histogram:
    """Counts of numbers in [start + i·width, start + (i+1)·width); the end bins hold all beyond them."""

    start: float
    width: float
    counts: tuple[int, ...]


@final
@dataclass(frozen=True)
class HeadRecord:
    """One query head. Lists by order start at order 0.

    scores               x = scale·q·k over all visible keys
    row_means            mean of the scores of each row
    row_deviation        standard deviation of the scores of a row, averaged over rows
    terms                ‖Σ_s xⁿ v_s/n!‖ / ‖Σ_s eˣ v_s‖, geometric mean over rows
    error_about_zero     ‖y_N − y‖ / ‖y‖ over all rows, y the softmax output; None where a row sum vanished
    error_about_mean     the same with exp expanded about the mean score of each row
    sink_mass            share of the attention on the first tokens
    effective_rank_1     e^entropy of the normalised singular values of Σ k vᵀ at the end of a context
    effective_rank_2     the same for Σ k^⊗2 vᵀ
    """

    layer: int
    head: int
    kv_head: int
    scores: Spread
    score_histogram: Histogram
    row_means: Spread
    row_mean_histogram: Histogram
    row_deviation: float
    terms: tuple[float, ...]
    dominant_order: int
    error_about_zero: tuple[float | None, ...]
    error_about_mean: tuple[float | None, ...]
    sink_mass: float
    effective_rank_1: float
    effective_rank_2: float

    def errors(self, about: About) -> tuple[float | None, ...]:
        """Error by order."""
        return self.error_about_mean if about == "mean" else self.error_about_zero

    def order_needed(self, about: About = "mean", tolerance: float = 0.01) -> int | None:
        """The lowest even order from which the error stays within the tolerance; None if no tried order does.

        Odd orders are not counted: their row sum can vanish.
        """
        errors, needed = self.errors(about), None
        for order in reversed(range(0, len(errors), 2)):
            error = errors[order]
            if error is None or error > tolerance:
                break
            needed = order
        return needed


@final
@dataclass(frozen=True)
class PerplexityRecord:
    """Perplexity of the whole model with another attention in every layer that supports it, untrained.

    note   why there is no perplexity
    """

    kind: Kind
    attention: str
    order: int | None
    about: About | None
    window: int | None
    sinks: int | None
    loss: float | None
    perplexity: float | None
    note: str = ""


@final
@dataclass(frozen=True)
class ModelRecord:
    """The model that was inspected.

    weights       precision they were rounded to
    fingerprint   digest of the weights before rounding; empty in files of older versions
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    key_size: int
    parameters: int
    attention: tuple[str, ...]
    weights: str
    fingerprint: str = ""


@final
@dataclass(frozen=True)
class TextRecord:
    """The text it read."""

    name: str
    sha256: str
    tokens: int
    predicted: int
    context: int
    contexts: int
    prefix: tuple[int, ...]


@final
@dataclass(frozen=True)
class Inspection:
    """Everything in inspection.json.

    made   date, versions, machine
    """

    made: dict[str, Any]
    model: ModelRecord
    text: TextRecord
    orders: tuple[int, ...]
    windows: tuple[int, ...]
    sinks: int
    tolerance: float
    heads: tuple[HeadRecord, ...]
    perplexity: tuple[PerplexityRecord, ...]

    @property
    def highest_order(self) -> int:
        """The highest order tried on heads."""
        return len(self.heads[0].terms) - 1

    def of_layer(self, layer: int) -> tuple[HeadRecord, ...]:
        """The heads of one layer."""
        return tuple(head for head in self.heads if head.layer == layer)

    def own_perplexity(self) -> float | None:
        """Perplexity with the model's own attention."""
        return next((row.perplexity for row in self.perplexity if row.kind == "own"), None)

    def perplexity_of(
        self, *, order: int | None = None, about: About | None = None, window: int | None = None
    ) -> float | None:
        """Perplexity with another attention; None if it was not tried or is not finite."""
        for row in self.perplexity:
            if row.kind != "own" and (row.order, row.about, row.window) == (order, about, window):
                return row.perplexity
        return None


def write_inspection(inspection: Inspection, path: Path) -> None:
    """Write inspection.json atomically."""
    write_json(path, rounded(to_plain(inspection)), SCHEMA, indent=None, allow_nan=False)


def read_inspection(path: str | Path) -> Inspection:
    """Read a folder that `maclaurin inspect` wrote, or its inspection.json."""
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    missing = f"there is no inspection at {path}: make one with maclaurin inspect MODEL --out {path}."
    return read_record(Inspection, file, SCHEMA, "an inspection", missing=missing)


def rounded(data: Any) -> Any:
    """Plain data with DIGITS significant digits, and None for non-finite numbers."""
    return finite(data, DIGITS)


#: a head that needs a higher order is called sharp
SHARP_ORDER = 8


@final
@dataclass(frozen=True)
class SharpHead:
    """A head, the order it needs (None: higher than those tried), and its error at the given order."""

    layer: int
    head: int
    order_needed: int | None
    error: float


def sharp_heads(
    inspection: Inspection,
    order: int = SHARP_ORDER,
    *,
    about: About = "mean",
    tolerance: float | None = None,
) -> list[SharpHead]:
    """Heads whose error at this order is over the tolerance, largest error first."""
    allowed = inspection.tolerance if tolerance is None else tolerance
    found = [
        SharpHead(head.layer, head.head, head.order_needed(about, allowed), error)
        for head in inspection.heads
        if (error := error_at(head, order, about)) > allowed
    ]
    return sorted(found, key=lambda head: -head.error)


def layers_to_keep(inspection: Inspection, count: int, order: int = 2, *, about: About = "mean") -> list[int]:
    """The `count` layers with the largest error at this order."""
    errors = layer_errors(inspection, order, about)
    return sorted(range(len(errors)), key=lambda layer: -errors[layer])[:count]


def layer_errors(inspection: Inspection, order: int, about: About = "mean") -> list[float]:
    """Error of each layer at this order: the root mean square over its heads."""
    errors = []
    for layer in range(inspection.model.layers):
        heads = [error_at(head, order, about) for head in inspection.of_layer(layer)]
        errors.append(math.sqrt(sum(error**2 for error in heads) / max(len(heads), 1)))
    return errors


def heads_within(inspection: Inspection, order: int, about: About = "mean") -> int:
    """Number of heads within the inspection's tolerance at this order."""
    return sum(error_at(head, order, about) <= inspection.tolerance for head in inspection.heads)


def error_at(head: HeadRecord, order: int, about: About) -> float:
    """Error at an order, or at the highest one tried if the order is beyond it; ∞ if a row sum vanished."""
    errors = head.errors(about)
    error = errors[min(order, len(errors) - 1)]
    return math.inf if error is None else error


# -------------------------------------------------------------------------------------- findings in sentences

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
