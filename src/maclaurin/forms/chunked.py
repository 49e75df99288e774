"""The chunked form: a state between chunks, the parallel form within them.

    S_c = (Π f) S_{c−1} + Σ_{s∈c} D_s φ(k_s) [v_s, 1]ᵀ          one state per chunk, scanned
    y_t = a·φ(q_t)ᵀ S_{c−1} + Σ_{s∈c, s≤t} D_ts κ(q_t, k_s) [v_s, 1]

Linear in T. Chunks are handled together in spans whose features fit a fixed amount of memory; with
gradients and features beyond that, a span's features are computed again in the backward pass.
Kernels that are no polynomial have no such state: their chunks are blocks of queries, each against
all the keys it sees — the parallel form in O(chunk·T) memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maclaurin.forms.features import feature_slices, symmetric_powers
from maclaurin.forms.parallel import parallel_rows
from maclaurin.forms.stream import Rows, Stream, decay_matrix, running_totals, split_count, values_with_count
from maclaurin.spec import AttentionSpec

#: numbers that the features of one span may take
SPAN_BUDGET = 1 << 24
#: chunks in a span; their states are combined by a matrix of this size
CHUNKS_IN_SPAN = 32


def chunk_size_for(spec: AttentionSpec, d: int) -> int:
    """Tokens per chunk: more where the state is larger, so that fewer states are formed.

    Measured on a CPU at d = 16 and 64: 64 is best at first order, 128 at second (docs/LOG.md).
    """
    return 64 if spec.features(d) <= 2 * d else 128


# -------------------------------------------------------------------------- polynomial kernels


def chunked_rows(
    spec: AttentionSpec, stream: Stream, moments: Tensor, chunk: int, *, causal: bool = True
) -> tuple[Rows, Any, Tensor]:
    """(rows, row statistics, final moments) from the moments [B, K, F, E] before the first token."""
    columns = values_with_count(spec, stream)
    if not causal:
        return _all_keys_rows(spec, stream, columns, moments, chunk)
    tokens = stream.k.shape[-2]
    if torch.compiler.is_compiling():  # lengths are symbols there, and a loop would fix their number
        sums, statistics, moments = _span_sums(
            spec, stream.q, stream.k, columns, stream.log_forget, moments, chunk
        )
        return Rows(*split_count(spec, sums)), statistics, moments
    span = _span(spec, stream, chunk)
    features = stream.q[..., 0].numel() * spec.features(stream.key_size)
    again = torch.is_grad_enabled() and features > SPAN_BUDGET
    sums, statistics = [], []
    for start in range(0, tokens, span):
        stop = min(start + span, tokens)
        part, values = stream.tokens(start, stop), columns[..., start:stop, :]
        arguments = (spec, part.q, part.k, values, part.log_forget, moments, chunk)
        if again:
            y, row, moments = checkpoint(_span_sums, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            y, row, moments = _span_sums(*arguments)
        sums.append(y)
        statistics.append(row)
    numerator, row_sum = split_count(spec, _joined(sums, -2))
    return Rows(numerator, row_sum), _joined_statistics(statistics), moments


def _span_sums(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    log_forget: Tensor | None,
    moments: Tensor,
    chunk: int,
) -> tuple[Tensor, Any, Tensor]:
    """Σ_s w_ts [v_s, 1] for the queries of a span, row statistics, and the moments after it."""
    tokens, orders = k.shape[-2], spec.orders or ()
    chunk = min(chunk, tokens)
    q, k, values = (in_chunks(u, chunk) for u in (q, k, values))  # [B, K, (G), C, L, …]
    total = None if log_forget is None else running_totals(in_chunks(log_forget[..., None], chunk)[..., 0])
    states = _scan(symmetric_powers(k, orders), values, total, moments)
    before, after = states[:, :, None, :-1], states[:, :, -1]

    x = q @ k[:, :, None].mT  # [B, K, G, C, L, L]
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
        z_chunk = _moments_within(x, within, counts, len(orders))
        far = z_state if reach is None else [z * reach for z in z_state]
        statistics = spec.kernel.statistics([a + b for a, b in zip(far, z_chunk, strict=True)])
    features = _times_coefficients(features, spec, statistics, q.shape[-1])
    far_sums = features @ before
    far_sums = far_sums if reach is None else far_sums * reach
    near_sums = (spec.kernel.weight(x, statistics) * within) @ values[:, :, None]
    sums = (far_sums + near_sums).flatten(-3, -2)[..., :tokens, :]
    return sums, _per_token(statistics, tokens), after


def _scan(features: Tensor, values: Tensor, total: Tensor | None, initial: Tensor) -> Tensor:
    """The states before each chunk and after the last, [B, K, C+1, F, E].

    S_c = e^{P_c} S_0 + Σ_{c'<c} e^{P_c − P_{c'+1}} U_{c'},  P the decay up to the start of a chunk.
    """
    if total is not None:
        values = values * (total[..., -1:] - total).exp().to(values.dtype)[..., None]
    updates = features.mT @ values
    pieces = torch.cat([initial[:, :, None], updates], dim=2)
    if total is None:
        return pieces.cumsum(2)
    starts = torch.nn.functional.pad(total[..., -1].cumsum(-1), (1, 0))
    return (decay_matrix(starts, pieces.dtype) @ pieces.flatten(-2)).unflatten(-1, pieces.shape[-2:])


def _moments_of_state(features: Tensor, state: Tensor, d: int, orders: Sequence[int]) -> list[Tensor]:
    """zₙ of the keys in the state: φₙ(q)ᵀ times the count column of order n."""
    count = state[..., -1:]
    return [features[..., s] @ count[..., s, :] for s in feature_slices(d, orders)]


def _moments_within(x: Tensor, within: Tensor, counts: Tensor, number: int) -> list[Tensor]:
    """zₙ of the keys of the chunk."""
    result, powers = [], within
    for n in range(number):
        powers = powers * x if n else powers
        result.append(powers @ counts)
    return result


def _times_coefficients(features: Tensor, spec: AttentionSpec, statistics: Any, d: int) -> Tensor:
    """aₙ φₙ(q) for every order, so that one product with the state is Σ aₙ φₙ(q)ᵀ S⁽ⁿ⁾."""
    orders = spec.orders or ()
    coefficients = spec.kernel.coefficients(statistics)
    if statistics is None and all(coefficients[n] == 1.0 for n in orders):
        return features
    pieces = zip(orders, feature_slices(d, orders), strict=True)
    return torch.cat([features[..., s] * coefficients[n] for n, s in pieces], dim=-1)


# ----------------------------------------------------------------------------------- non-causal


def _all_keys_rows(
    spec: AttentionSpec, stream: Stream, columns: Tensor, moments: Tensor, chunk: int
) -> tuple[Rows, Any, Tensor]:
    """Every query reads the one state of all keys: two passes, linear in T and in S."""
    orders, span = spec.orders or (), _span(spec, stream, chunk)
    for start in range(0, stream.k.shape[-2], span):
        keys = symmetric_powers(stream.k[..., start : start + span, :], orders)
        moments = moments + keys.mT @ columns[..., start : start + span, :]
    state, sums = moments[:, :, None], []
    for start in range(0, stream.q.shape[-2], span):
        features = symmetric_powers(stream.q[..., start : start + span, :], orders)
        sums.append(read_state(spec, features, state, stream.key_size)[0])
    return Rows(*split_count(spec, _joined(sums, -2))), None, moments


def read_state(spec: AttentionSpec, features: Tensor, state: Tensor, d: int) -> tuple[Tensor, Any]:
    """Σ aₙ φₙ(q)ᵀ S⁽ⁿ⁾ and the row statistics it took, for features [..., T, F] of the queries."""
    statistics = None
    if spec.kernel.depends_on_row:
        statistics = spec.kernel.statistics(_moments_of_state(features, state, d, spec.orders or ()))
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
    per_token = stream.q[..., 0, 0].numel() * max(spec.features(stream.key_size), 1)
    chunks = SPAN_BUDGET // (per_token * chunk)
    return chunk * min(CHUNKS_IN_SPAN, max(1, chunks))


def in_chunks(u: Tensor, chunk: int) -> Tensor:
    """[..., T, n] → [..., C, L, n], zeros behind the last token: they weigh and decay nothing."""
    missing = -u.shape[-2] % chunk
    u = torch.nn.functional.pad(u, (0, 0, 0, missing)) if missing else u
    return u.unflatten(-2, (-1, chunk))


def _per_token(statistics: Any, tokens: int) -> Any:
    """Row statistics [..., C, L, 1] as [..., T, 1]."""
    if isinstance(statistics, Tensor):
        return statistics.flatten(-3, -2)[..., :tokens, :]
    if isinstance(statistics, tuple):
        return tuple(_per_token(s, tokens) for s in statistics)
    return statistics


def _joined_statistics(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return _joined(parts, -2)
    if isinstance(parts[0], tuple):
        return tuple(_joined_statistics(list(column)) for column in zip(*parts, strict=True))
    return parts[0]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
