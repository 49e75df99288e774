"""From tallies to records."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from maclaurin.inspection.schema import HeadRecord, Histogram, Spread
from maclaurin.inspection.tally import FIRST_BIN, Moments, Tally


def head_records(layer: int, tally: Tally, ranks: Tensor) -> list[HeadRecord]:
    """The heads of one layer; ranks [2, Hkv] are means over contexts."""
    heads, kv_heads = tally.rows.shape[0], ranks.shape[1]
    terms = (tally.log_terms / tally.rows[:, None]).exp()
    zero, mean = (
        (squares / tally.squared_output[:, None]).sqrt()
        for squares in (tally.squared_error_zero, tally.squared_error_mean)
    )
    records = []
    for head in range(heads):
        kv_head = head * kv_heads // heads
        records.append(
            HeadRecord(
                layer=layer,
                head=head,
                kv_head=kv_head,
                scores=_spread(tally.scores, head),
                score_histogram=_histogram(tally.histogram[head]),
                row_means=_spread(tally.row_means, head),
                row_mean_histogram=_histogram(tally.row_histogram[head]),
                row_deviation=float(tally.row_deviation[head] / tally.rows[head]),
                terms=tuple(terms[head].tolist()),
                dominant_order=int(terms[head].argmax()),
                error_about_zero=_finite(zero[head]),
                error_about_mean=_finite(mean[head]),
                sink_mass=float(tally.sink_mass[head] / tally.sink_rows[head].clamp(min=1)),
                effective_rank_1=float(ranks[0, kv_head]),
                effective_rank_2=float(ranks[1, kv_head]),
            )
        )
    return records


def _spread(moments: Moments, head: int) -> Spread:
    values = (moments.mean, moments.deviation, moments.least, moments.largest)
    return Spread(*(float(value[head]) for value in values))


def _histogram(counts: Tensor) -> Histogram:
    """Without the empty bins at both ends."""
    filled = torch.nonzero(counts)[:, 0]
    first, last = int(filled[0]), int(filled[-1])
    return Histogram(FIRST_BIN + first, 1.0, tuple(int(n) for n in counts[first : last + 1].tolist()))


def _finite(errors: Tensor) -> tuple[float | None, ...]:
    return tuple(error if math.isfinite(error) else None for error in errors.tolist())
