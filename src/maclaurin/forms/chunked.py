"""The chunked form: a state between chunks, the parallel form within them.

    S_c = (Π f) S_{c−1} + Σ_{s∈c} D_s φ(k_s) [v_s, 1]ᵀ          one state per chunk, scanned
    y_t = a·φ(q_t)ᵀ S_{c−1} + Σ_{s∈c, s≤t} D_ts κ(q_t, k_s) [v_s, 1]

Linear in T. Chunks are handled together in spans whose features fit a fixed amount of memory; with
gradients and features beyond that, a span's features are computed again in the backward pass.
Kernels that are not polynomials have no such state: their chunks are blocks of queries, each against
all the keys it sees — the parallel form in O(chunk·T) memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maclaurin.forms.features import feature_slices, symmetric_powers
from maclaurin.forms.parallel import parallel_rows, weights_of
from maclaurin.forms.stream import Rows, Stream, decay_matrix, running_totals, split_count, values_with_count
from maclaurin.spec import AttentionSpec, RowStatistics

#: the most numbers that the features of one span hold
SPAN_BUDGET = 1 << 24
#: chunks in a span; their states are combined by a matrix of this size
CHUNKS_IN_SPAN = 32


def chunk_size_for(spec: AttentionSpec, d: int) -> int:
    """Tokens per chunk: more where the state is larger, so that fewer states are formed.

    Measured on a CPU at d = 16 and 64: 64 is best at first order, 128 at second (docs/LOG.md).
    """
    if spec.window is not None and spec.window.kept:
        return 256  # each piece reads all kept keys, so few pieces are best
    return 64 if spec.features(d) <= 2 * d else 128


# -------------------------------------------------------------------------- polynomial kernels


def chunked_rows(
    spec: AttentionSpec,
    stream: Stream,
    moments: Tensor,
    chunk: int,
    *,
    causal: bool = True,
    keeps_state: bool = True,
    needs_moments: bool = True,
) -> tuple[Rows, RowStatistics | None, Tensor]:
    """(rows, row statistics, final moments) from the moments [B, K, F, E] before the first token.

    If nobody needs the final moments, they lack the keys of the last chunk: those may be so large that their
    features overflow, and zero gradients of infinite features are NaN.

    Without a state before or after, a common key is subtracted from all keys for kernels that depend on their
    row. It does not change their result, and smaller scores lose less precision in re-centring.
    """
    if not causal:
        return _all_keys_rows(spec, stream, values_with_count(spec, stream), moments, chunk)
    head = (spec.window.size + spec.window.sinks if spec.window else 0) // chunk * chunk + chunk
    if spec.kernel.depends_on_row and not keeps_state and stream.k.shape[-2] > head:
        return _centred_rows(spec, stream, moments, chunk, head, needs_moments)
    return _spans(spec, stream, moments, chunk, needs_moments)


def _centred_rows(
    spec: AttentionSpec, stream: Stream, moments: Tensor, chunk: int, head: int, needs_moments: bool
) -> tuple[Rows, RowStatistics | None, Tensor]:
    """The first `head` tokens unchanged; after them, the mean key of the head is subtracted from all keys.

    Rows in the head must not depend on later keys, which the mean contains; with so few keys they lose little
    precision.
    """
    first, rest = stream.tokens(0, head), stream.tokens(head, stream.k.shape[-2])
    rows, statistics, _ = _spans(spec, first, moments, chunk, needs_moments=False)
    columns = values_with_count(spec, first)
    seen = columns[..., -1:].detach()  # [B, K, head, 1]: the mass of each key
    offset = (first.k.detach() * seen).sum(-2, keepdim=True) / seen.sum(-2, keepdim=True).clamp(min=1)
    moments = symmetric_powers(first.k - offset, spec.orders).mT @ _decayed(columns, first.log_forget)
    later, later_statistics, moments = _spans(
        spec, dataclasses.replace(rest, k=rest.k - offset), moments, chunk, needs_moments
    )
    assert statistics is not None
    assert later_statistics is not None
    shift = rest.q @ offset[:, :, None].mT  # the common key's share of every score in a row
    moved = dataclasses.replace(later_statistics, mean=later_statistics.mean + shift)
    joined = RowStatistics.joined([statistics, moved], lambda tensors: torch.cat(tensors, dim=-2))
    return Rows.concatenate([rows, later]), joined, moments


def _decayed(columns: Tensor, log_forget: Tensor | None) -> Tensor:
    """Columns [B, K, T, E], each times the decay from its token to the last."""
    if log_forget is None:
        return columns
    total = running_totals(log_forget)
    return columns * (total[..., -1:] - total).exp().to(columns.dtype)[..., None]


def _spans(
    spec: AttentionSpec, stream: Stream, moments: Tensor, chunk: int, needs_moments: bool
) -> tuple[Rows, RowStatistics | None, Tensor]:
    """Chunks in spans whose features fit in memory, one span after the other."""
    columns = values_with_count(spec, stream)
    may_overflow = stream.mass is not None and stream.log_forget is not None
    tokens = stream.k.shape[-2]
    if torch.compiler.is_compiling():  # lengths are symbolic there, and a loop would fix the number of spans
        sums, statistics, moments = _span_sums(
            spec, stream.q, stream.k, columns, stream.log_forget, moments, chunk, may_overflow, needs_moments
        )
        return Rows(*split_count(spec, sums)), statistics, moments
    span = _span(spec, stream, chunk)
    features = stream.q[..., 0].numel() * spec.features_of_mapped(stream.key_size)
    again = torch.is_grad_enabled() and features > SPAN_BUDGET
    sums, found = [], []
    for start in range(0, tokens, span):
        stop = min(start + span, tokens)
        part, values = stream.tokens(start, stop), columns[..., start:stop, :]
        continues = needs_moments or stop < tokens
        arguments = (spec, part.q, part.k, values, part.log_forget, moments, chunk, may_overflow, continues)
        if again:
            y, row, moments = checkpoint(_span_sums, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            y, row, moments = _span_sums(*arguments)
        sums.append(y)
        found.append(row)
    return Rows(*split_count(spec, _joined(sums, -2))), _joined_statistics(found), moments


def _span_sums(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    log_forget: Tensor | None,
    moments: Tensor,
    chunk: int,
    may_overflow: bool,
    continues: bool,
) -> tuple[Tensor, RowStatistics | None, Tensor]:
    """Σ_s w_ts [v_s, 1] for the queries of a span, row statistics, and the moments after it.

    `may_overflow`: values have a mass that may be infinite. `continues`: the moments after it are needed;
    else they are those before its last chunk.
    """
    tokens, orders = k.shape[-2], spec.orders
    chunk = min(chunk, tokens)
    q, k, values = (in_chunks(u, chunk) for u in (q, k, values))  # [B, K, (G), C, L, …]
    total = None if log_forget is None else running_totals(in_chunks(log_forget[..., None], chunk)[..., 0])
    read = k.shape[2] if continues else k.shape[2] - 1  # chunks whose keys a later one reads, or the caller
    decays = None if total is None else total[:, :, :read]
    states = _scan(symmetric_powers(k[:, :, :read], orders), values[:, :, :read], decays, moments)
    before, after = states[:, :, None, : k.shape[2]], states[:, :, -1]

    x = (q @ k[:, :, None].mT).tril()  # [B, K, G, C, L, L]; a later key may be infinite, and ∞·0 is not 0
    if total is None:
        within: Tensor = torch.ones(chunk, chunk, dtype=x.dtype, device=x.device).tril()
        reach = None
    else:
        within = decay_matrix(total, x.dtype)[:, :, None]
        reach = total.exp().to(x.dtype)[
            :, :, None, ..., None
        ]  # [B, K, 1, C, L, 1], decay since the chunk began
    features = symmetric_powers(q, orders)
    statistics = None
    if spec.kernel.depends_on_row:
        counts = values[:, :, None, ..., -1:]
        z_state = _moments_of_state(features, before, q.shape[-1], orders)
        z_chunk = _moments_within(x, within, counts, len(orders), may_overflow)
        far = z_state if reach is None else [z * reach for z in z_state]
        statistics = spec.kernel.statistics([a + b for a, b in zip(far, z_chunk, strict=True)])
    features = _times_coefficients(features, spec, statistics, q.shape[-1])
    far_sums = features @ before
    far_sums = far_sums if reach is None else far_sums * reach
    near_sums = _sums_so_far(
        weights_of(spec.kernel, x, statistics) * within, values[:, :, None], may_overflow
    )
    sums = out_of_chunks(far_sums + near_sums, tokens)
    return sums, None if statistics is None else statistics.map(lambda u: out_of_chunks(u, tokens)), after


def _scan(features: Tensor, values: Tensor, total: Tensor | None, initial: Tensor) -> Tensor:
    """The states before each of C chunks and after the last, [B, K, C+1, F, E].

    S_c = e^{P_c} S_0 + Σ_{c'<c} e^{P_c − P_{c'+1}} U_{c'},  P the decay up to the start of a chunk.
    """
    if total is not None:
        values = values * (total[..., -1:] - total).exp().to(values.dtype)[..., None]
    updates = features.mT @ values
    pieces = torch.cat([initial[:, :, None], updates], dim=2)
    if total is None:
        return pieces.cumsum(2)
    starts = torch.nn.functional.pad(total[..., -1].cumsum(-1), (1, 0))
    return _without_the_future(decay_matrix(starts, pieces.dtype), pieces)


def _without_the_future(decay: Tensor, pieces: Tensor) -> Tensor:
    """Σ_{c'≤c} decay_{cc'} pieces_{c'}, where an infinite piece reaches only the sums that include it."""
    finite = pieces.isfinite()
    sums = (decay @ torch.where(finite, pieces, 0.0).flatten(-2)).unflatten(-1, pieces.shape[-2:])
    return sums + torch.where(finite, 0.0, pieces).cumsum(2)


def _moments_of_state(features: Tensor, state: Tensor, d: int, orders: Sequence[int]) -> list[Tensor]:
    """zₙ of the keys in the state: φₙ(q)ᵀ times the count column of order n."""
    count = state[..., -1:]
    return [features[..., s] @ count[..., s, :] for s in feature_slices(d, orders)]


def _moments_within(
    x: Tensor, within: Tensor, counts: Tensor, number: int, may_overflow: bool
) -> list[Tensor]:
    """zₙ of the keys of the chunk."""
    result, powers = [], within
    for n in range(number):
        powers = powers * x if n else powers
        result.append(_sums_so_far(powers, counts, may_overflow))
    return result


def _sums_so_far(weights: Tensor, values: Tensor, may_overflow: bool) -> Tensor:
    """Σ_{s≤t} w_ts v_s for weights that are 0 for later keys, without ∞·0 for those."""
    if not may_overflow:
        return weights @ values
    finite = values.isfinite()
    return weights @ torch.where(finite, values, 0.0) + torch.where(finite, 0.0, values).cumsum(-2)


def _times_coefficients(
    features: Tensor, spec: AttentionSpec, statistics: RowStatistics | None, d: int
) -> Tensor:
    """aₙ φₙ(q) for every order, so that one product with the state is Σ aₙ φₙ(q)ᵀ S⁽ⁿ⁾."""
    orders = spec.orders
    coefficients = spec.kernel.coefficients(statistics)
    if statistics is None and all(coefficients[n] == 1.0 for n in orders):
        return features
    pieces = zip(orders, feature_slices(d, orders), strict=True)
    return torch.cat([features[..., s] * coefficients[n] for n, s in pieces], dim=-1)


# ----------------------------------------------------------------------------------- non-causal


def _all_keys_rows(
    spec: AttentionSpec, stream: Stream, columns: Tensor, moments: Tensor, chunk: int
) -> tuple[Rows, RowStatistics | None, Tensor]:
    """Every query reads the one state of all keys: two passes, linear in T and in S."""
    orders, span = spec.orders, _span(spec, stream, chunk)
    for start in range(0, stream.k.shape[-2], span):
        keys = symmetric_powers(stream.k[..., start : start + span, :], orders)
        moments = moments + keys.mT @ columns[..., start : start + span, :]
    state, sums = moments[:, :, None], []
    for start in range(0, stream.q.shape[-2], span):
        features = symmetric_powers(stream.q[..., start : start + span, :], orders)
        sums.append(read_state(spec, features, state, stream.key_size)[0])
    return Rows(*split_count(spec, _joined(sums, -2))), None, moments


def read_state(
    spec: AttentionSpec, features: Tensor, state: Tensor, d: int
) -> tuple[Tensor, RowStatistics | None]:
    """Σ aₙ φₙ(q)ᵀ S⁽ⁿ⁾ and the row statistics used, for features [..., T, F] of the queries."""
    statistics = None
    if spec.kernel.depends_on_row:
        statistics = spec.kernel.statistics(_moments_of_state(features, state, d, spec.orders))
    return _times_coefficients(features, spec, statistics, d) @ state, statistics


# ------------------------------------------------------------------------------- other kernels


def blocked_rows(spec: AttentionSpec, stream: Stream, chunk: int, *, causal: bool = True) -> Rows:
    """The parallel form, a block of queries at a time."""
    tokens = stream.q.shape[-2]
    hidden = stream.k.shape[-2] - tokens
    parts = []
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        block = stream.keys_until(hidden + stop) if causal else stream
        q = stream.q[..., start:stop, :]
        arguments = (spec, q, block.k, block.v, block.log_forget, block.present, causal)
        if torch.is_grad_enabled() and tokens > chunk:
            parts.append(checkpoint(_block, *arguments, use_reentrant=False))
        else:
            parts.append(_block(*arguments))
    return Rows.concatenate([Rows(*part) for part in parts])


def _block(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    present: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows = parallel_rows(spec, Stream(q, k, v, log_forget, present), causal=causal)
    return rows.numerator, rows.row_sum, rows.log_scale


# ------------------------------------------------------------------------------------- details


def _span(spec: AttentionSpec, stream: Stream, chunk: int) -> int:
    """Tokens handled at once: a whole number of chunks whose features fit the budget."""
    per_token = stream.q[..., 0, 0].numel() * max(spec.features_of_mapped(stream.key_size), 1)
    chunks = SPAN_BUDGET // (per_token * chunk)
    return chunk * min(CHUNKS_IN_SPAN, max(1, chunks))


def in_chunks(u: Tensor, chunk: int) -> Tensor:
    """[..., T, n] → [..., C, L, n], zeros after the last token: they have no weight and no decay."""
    missing = -u.shape[-2] % chunk
    u = torch.nn.functional.pad(u, (0, 0, 0, missing)) if missing else u
    return u.unflatten(-2, (-1, chunk))


def out_of_chunks(u: Tensor, tokens: int) -> Tensor:
    """[..., C, L, n] → [..., T, n], the inverse of in_chunks."""
    return u.flatten(-3, -2)[..., :tokens, :]


def _joined_statistics(parts: list[RowStatistics | None]) -> RowStatistics | None:
    known = [p for p in parts if p is not None]
    return RowStatistics.joined(known, lambda tensors: _joined(tensors, -2)) if known else None


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
