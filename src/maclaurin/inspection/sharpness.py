"""Which heads and layers need high orders, so that a conversion can keep them exact. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from maclaurin.inspection.schema import About, HeadRecord, Inspection

#: a head that needs a higher order is called sharp
SHARP_ORDER = 8


@final
@dataclass(frozen=True)
class SharpHead:
    """A head, the order it needs (None: higher than those tried), and its error at the order in question."""

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
    """Error at an order: beyond the highest one tried, that of the highest; ∞ where a row sum vanished."""
    errors = head.errors(about)
    error = errors[min(order, len(errors) - 1)]
    return math.inf if error is None else error
