"""hypothesis strategies: shapes small enough for a spec's state, cuts of a sequence, seeds."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from maclaurin.spec import AttentionSpec
from maclaurin.testing.cases import Shape

#: features a state may have in a test
MOST_FEATURES = 700

seeds = st.integers(0, 2**31 - 1)
chunk_sizes = st.integers(1, 9)


@st.composite
def shapes(draw: st.DrawFn, spec: AttentionSpec, *, longest: int = 12, shortest: int = 1) -> Shape:
    """Any batch, length, heads and sizes for which the state stays small."""
    fitting = [d for d in (1, 2, 3, 4) if not spec.has_finite_state or spec.features(d) <= MOST_FEATURES]
    return Shape(
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.integers(shortest, longest)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        d=draw(st.sampled_from(fitting if spec.highest_order <= 12 else fitting[:1])),
        e=draw(st.integers(3, 5)),
    )


@st.composite
def cuts(draw: st.DrawFn, tokens: int) -> list[tuple[int, int]]:
    """A sequence of this many tokens cut into consecutive, non-empty pieces."""
    inner = draw(st.sets(st.integers(1, tokens - 1), max_size=3)) if tokens > 1 else set()
    ends = [0, *sorted(inner), tokens]
    return list(itertools.pairwise(ends))
