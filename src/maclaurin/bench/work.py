"""The operations a forward pass must do and the bytes it must move at least: where it lies under the roofs.

    every pair of query and visible key     2 (d + e) operations
    every token, where a state is carried   4 F (e + 1): written once, read once, F features

Bytes are those of inputs and outputs, each moved once; of a step also those of its state, read and written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from maclaurin.bench.size import Size
from maclaurin.spec import AttentionSpec

STATE_ITEM_BYTES = 4


@final
@dataclass(frozen=True)
class Work:
    """Of one forward pass."""

    flops: float
    moved_bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.moved_bytes


def work_of_call(spec: AttentionSpec, form: str, size: Size, item_bytes: int) -> Work:
    """The form decides between all pairs and a state."""
    rows = size.batch * size.heads
    is_linear = spec.has_finite_state and form in ("chunked", "recurrent")
    flops = 2.0 * rows * _pairs(spec, size.tokens, is_linear) * (size.d + size.e)
    if is_linear:
        flops += rows * size.tokens * _flops_of_state(spec, size)
    return Work(flops, float(item_bytes * rows * size.tokens * _numbers_per_token(spec, size)))


def work_of_step(spec: AttentionSpec, size: Size, item_bytes: int) -> Work:
    """One token of every sequence: the state is written and read once."""
    rows = size.batch * size.heads
    state = STATE_ITEM_BYTES * rows * spec.state_size(size.d, size.e)
    moved = 2.0 * state + item_bytes * rows * _numbers_per_token(spec, size)
    return Work(float(rows * _flops_of_state(spec, size)), moved)


def _pairs(spec: AttentionSpec, tokens: int, is_linear: bool) -> int:
    """Pairs that are weighed one by one."""
    alone = spec.window is not None and spec.has_finite_state and spec.features(1) == 0
    if spec.window is not None and (is_linear or alone):
        exact = min(tokens, spec.window.size)
        return exact * (exact + 1) // 2 + (tokens - exact) * exact
    return 0 if is_linear else tokens * (tokens + 1) // 2


def _flops_of_state(spec: AttentionSpec, size: Size) -> int:
    return 4 * spec.features(size.d) * (size.e + int(spec.needs_row_sum))


def _numbers_per_token(spec: AttentionSpec, size: Size) -> int:
    """q, k, v, y and the gates."""
    return 2 * size.d + 2 * size.e + len(spec.gates)
