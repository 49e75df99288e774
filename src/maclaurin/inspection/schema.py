"""inspection.json: everything an inspection found, as data. The one place that knows its fields."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from maclaurin.errors import InputError, did_you_mean

SCHEMA = 1
FILE_NAME = "inspection.json"

About = Literal["zero", "mean"]
Kind = Literal["own", "order", "window"]


@final
@dataclass(frozen=True)
class Spread:
    """How some numbers lie."""

    mean: float
    deviation: float
    least: float
    largest: float


@final
@dataclass(frozen=True)
class Histogram:
    """How many numbers lie in [start + i·width, start + (i+1)·width); what lies beyond is in the end ones."""

    start: float
    width: float
    counts: tuple[int, ...]


@final
@dataclass(frozen=True)
class HeadRecord:
    """One query head. Lists by order start at order 0."""

    layer: int
    head: int
    kv_head: int
    #: x = scale·q·k over all visible keys, and its mean over each row
    scores: Spread
    score_histogram: Histogram
    row_means: Spread
    row_mean_histogram: Histogram
    #: the deviation of the scores of one row, averaged over rows
    row_deviation: float
    #: ‖Σ_s xⁿ v_s/n!‖ / ‖Σ_s eˣ v_s‖, geometric mean over rows
    terms: tuple[float, ...]
    dominant_order: int
    #: ‖y_N − y‖ / ‖y‖ over all rows, y the output of softmax; None where a row sum vanished
    error_about_zero: tuple[float | None, ...]
    error_about_mean: tuple[float | None, ...]
    #: share of the attention on the first tokens
    sink_mass: float
    #: e^entropy of the normalised singular values of Σ k vᵀ and Σ k^⊗2 vᵀ at the end of a context
    effective_rank_1: float
    effective_rank_2: float

    def errors(self, about: About) -> tuple[float | None, ...]:
        """Error by order."""
        return self.error_about_mean if about == "mean" else self.error_about_zero

    def order_needed(self, about: About = "mean", tolerance: float = 0.01) -> int | None:
        """The even order from which on the error stays within the tolerance; None if none tried is enough.

        An odd order has a row sum that can vanish: its error says more about that than about the order.
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
    """The whole model with its attention exchanged in every layer that can be, without training."""

    kind: Kind
    attention: str
    order: int | None
    about: About | None
    window: int | None
    sinks: int | None
    loss: float | None
    perplexity: float | None
    #: why there is no number
    note: str = ""


@final
@dataclass(frozen=True)
class ModelRecord:
    """What was examined."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    key_size: int
    parameters: int
    attention: tuple[str, ...]
    weights: str


@final
@dataclass(frozen=True)
class TextRecord:
    """What it read."""

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
    """All of it."""

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
        """The largest order tried on heads."""
        return len(self.heads[0].terms) - 1

    def of_layer(self, layer: int) -> tuple[HeadRecord, ...]:
        """The heads of one layer."""
        return tuple(head for head in self.heads if head.layer == layer)

    def own_perplexity(self) -> float | None:
        """With the attention the model came with."""
        return next((row.perplexity for row in self.perplexity if row.kind == "own"), None)

    def perplexity_of(
        self,
        *,
        order: int | None = None,
        about: About | None = None,
        window: int | None = None,
    ) -> float | None:
        """That of one row; None if it is not there or has no number."""
        for row in self.perplexity:
            if row.kind != "own" and (row.order, row.about, row.window) == (order, about, window):
                return row.perplexity
        return None


def to_json(inspection: Inspection) -> str:
    """As text; numbers that are none are null."""
    data = {"schema": SCHEMA, **dataclasses.asdict(inspection)}
    return json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def read_inspection(path: str | Path) -> Inspection:
    """From a folder that `maclaurin inspect` wrote, or its inspection.json."""
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"there is no inspection at {path}: make one with maclaurin inspect MODEL --out {path}."
        )
    try:
        data = json.loads(file.read_text("utf-8"))
        schema = data.pop("schema")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InputError(f"{file} is not an inspection.") from None
    if schema != SCHEMA:
        raise InputError(f"{file} has schema {schema}, and this version of maclaurin reads schema {SCHEMA}.")
    try:
        return _inspection(data)
    except (TypeError, KeyError) as problem:
        raise InputError(f"{file} is not a whole inspection: {problem}.") from None


def head_named(inspection: Inspection, layer: int, head: int) -> HeadRecord:
    """One head."""
    for record in inspection.heads:
        if (record.layer, record.head) == (layer, head):
            return record
    names = [f"{record.layer}.{record.head}" for record in inspection.heads]
    raise InputError(f"there is no head {layer}.{head}.{did_you_mean(f'{layer}.{head}', names)}")


def _inspection(data: dict[str, Any]) -> Inspection:
    return Inspection(
        **{
            **data,
            "model": ModelRecord(**_with_tuples(data["model"])),
            "text": TextRecord(**_with_tuples(data["text"])),
            "orders": tuple(data["orders"]),
            "windows": tuple(data["windows"]),
            "heads": tuple(_head(each) for each in data["heads"]),
            "perplexity": tuple(PerplexityRecord(**each) for each in data["perplexity"]),
        }
    )


def _head(data: dict[str, Any]) -> HeadRecord:
    spreads = {name: Spread(**data[name]) for name in ("scores", "row_means")}
    histograms = {
        name: Histogram(**_with_tuples(data[name])) for name in ("score_histogram", "row_mean_histogram")
    }
    return HeadRecord(**{**_with_tuples(data), **spreads, **histograms})


def _with_tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


def finite(data: Any) -> Any:
    """The same data with seven digits, and None for what is no number."""
    if isinstance(data, float):
        return float(f"{data:.7g}") if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [finite(value) for value in data]
    return data
