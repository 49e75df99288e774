"""An exact window with sinks next to a polynomial tail, in constant memory.

    w_ts = D_ts e^{x_ts − r_t}   for the last w keys and the first few, the sinks
    w_ts = D_ts κ(x_ts)          for the tail between them, κ approximating e^{x − r}

A key enters the tail when it leaves the window, w tokens after it came. The tail is therefore the ordinary
polynomial form over keys delayed by w, and any form can compute it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maclaurin.forms.chunked import in_chunks, out_of_chunks
from maclaurin.forms.features import symmetric_powers
from maclaurin.forms.parallel import rows_with_exact_keys
from maclaurin.forms.stream import Rows, Stream, running_totals, values_with_count
from maclaurin.spec import AttentionSpec, RowStatistics, Window

#: a polynomial form: (spec, stream, moments) → (rows, row statistics, moments)
TailForm = Callable[[AttentionSpec, Stream, Tensor], tuple[Rows, RowStatistics | None, Tensor]]
#: the token number of a slot without a key
_NONE = -(1 << 62)


@dataclass(frozen=True)
class ExactKeys:
    """The keys a state keeps exactly: the last w (right-aligned), the first s, and M of those between.

    Keys and values have the dtype they came in; scores and decays have the dtype of the moments.
    """

    recent_k: Tensor  # [B, K, w, d]
    recent_v: Tensor  # [B, K, w, e]
    sink_k: Tensor  # [B, K, s, d]
    sink_v: Tensor  # [B, K, s, e]
    recent_log_forget: Tensor | None = None  # [B, K, w]
    sink_log_decay: Tensor | None = None  # [B, K, s], log decay of each sink so far
    #: if keys that leave the window may be kept (kept.py): the attention received so far, and the slots
    recent_score: Tensor | None = None  # [B, K, w]
    kept_score: Tensor | None = None  # [B, K, M], −∞ for an empty slot; the older key first
    kept_k: Tensor | None = None  # [B, K, M, d]
    kept_v: Tensor | None = None  # [B, K, M, e]
    kept_log_decay: Tensor | None = None  # [B, K, M]

    @staticmethod
    def empty(window: Window, stream: Stream, key_dtype: torch.dtype, value_dtype: torch.dtype) -> ExactKeys:
        """The window before the first token, for keys and values of these dtypes."""
        batch, heads = stream.k.shape[:2]

        def numbers(length: int, value: float = 0.0) -> Tensor:
            return stream.k.new_full((batch, heads, length), value)

        def keys(length: int) -> Tensor:
            return stream.k.new_zeros(batch, heads, length, stream.key_size, dtype=key_dtype)

        def values(length: int) -> Tensor:
            return stream.v.new_zeros(batch, heads, length, stream.value_size, dtype=value_dtype)

        size, sinks, kept = window.size, window.sinks, window.kept
        forget = stream.log_forget is not None
        return ExactKeys(
            keys(size),
            values(size),
            keys(sinks),
            values(sinks),
            numbers(size) if forget else None,
            numbers(sinks) if forget else None,
            numbers(size) if kept else None,
            numbers(kept, -torch.inf) if kept else None,
            keys(kept) if kept else None,
            values(kept) if kept else None,
            numbers(kept) if kept and forget else None,
        )

    @property
    def number(self) -> int:
        """How many keys it holds when it is full."""
        kept = 0 if self.kept_k is None else self.kept_k.shape[2]
        return self.recent_k.shape[2] + self.sink_k.shape[2] + kept

    def map(self, change: Callable[[Tensor], Tensor]) -> ExactKeys:
        """Apply `change` to every tensor."""
        held = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed: dict[str, Any] = {n: None if t is None else change(t) for n, t in held.items()}
        return ExactKeys(**changed)


def window_rows(
    spec: AttentionSpec,
    stream: Stream,
    count: Tensor,
    moments: Tensor,
    exact: ExactKeys,
    tail_form: TailForm,
    chunk: int,
) -> tuple[Rows, Tensor, ExactKeys]:
    """Rows, moments and exact keys after the stream's tokens; `count` [B] tokens came before them."""
    window = spec.window
    assert window is not None
    line = Line.lay_out(window, stream, count, exact)
    tail, statistics, moments = tail_form(spec, line.tail(window), moments)
    reference = spec.kernel.reference(statistics)
    logits, seen, values = line.exact_logits(window, chunk)
    if isinstance(reference, Tensor):
        logits = logits - in_chunks(reference, chunk)
    tail_sum = None if tail.row_sum is None else in_chunks(tail.row_sum[..., None], chunk)[..., 0]
    rows = rows_with_exact_keys(Rows(in_chunks(tail.numerator, chunk), tail_sum), logits, seen, values)
    return _rows_of_tokens(rows, stream.q.shape[-2]), moments, line.exact_after(window, exact)


@dataclass(frozen=True)
class Line:
    """The w recent keys and, after them, the new tokens: token t is at position w + t of this line."""

    stream: Stream
    k: Tensor  # [B, K, w+T, d]
    v: Tensor  # [B, K, w+T, e]
    decayed: Tensor | None  # [B, K, w+T], running total of the log forget gate
    held: Tensor  # [B, w+T], which positions hold a key that is not a sink
    sink_k: Tensor  # [B, K, s, d], sinks that came before or come now
    sink_v: Tensor  # [B, K, s, e]
    sink_decay: Tensor | None  # [B, K, s], log decay of each sink before the first new token
    sink_position: Tensor  # [B, s], position of each sink on the line (negative: before it)
    lengths: Tensor | None  # [B], new tokens per row; None for all T
    log_forget: Tensor | None  # [B, K, w+T]

    @staticmethod
    def lay_out(window: Window, stream: Stream, count: Tensor, exact: ExactKeys) -> Line:
        size, tokens = window.size, stream.k.shape[-2]
        k = torch.cat([exact.recent_k.to(stream.k.dtype), stream.k], dim=-2)
        v = torch.cat([exact.recent_v.to(stream.v.dtype), stream.v], dim=-2)
        log_forget = decayed = None
        if stream.log_forget is not None and exact.recent_log_forget is not None:
            log_forget = torch.cat([exact.recent_log_forget, stream.log_forget], dim=-1)
            decayed = running_totals(log_forget)
        position = torch.arange(size + tokens, device=k.device)
        index = count[:, None] - size + position  # the token's number at each position, from 0
        held = index >= window.sinks
        lengths = None
        if stream.present is not None:
            held = held & torch.nn.functional.pad(stream.present, (size, 0), value=True)
            lengths = stream.present.sum(-1)
        sinks = torch.arange(window.sinks, device=k.device) - count[:, None]  # new token's number
        is_old = sinks < 0
        pick = (sinks.clamp(min=0, max=tokens - 1) + size)[:, None, :]
        sink_k = torch.where(is_old[:, None, :, None], exact.sink_k.to(k.dtype), take(k, pick))
        sink_v = torch.where(is_old[:, None, :, None], exact.sink_v.to(v.dtype), take(v, pick))
        sink_decay = None
        if decayed is not None and exact.sink_log_decay is not None:
            since_start = decayed[..., size - 1 : size] - take(decayed[..., None], pick)[..., 0]
            sink_decay = torch.where(is_old[:, None, :], exact.sink_log_decay, since_start.to(k.dtype))
        return Line(
            stream, k, v, decayed, held, sink_k, sink_v, sink_decay, sinks + size, lengths, log_forget
        )

    def tail(self, window: Window) -> Stream:
        """The keys delayed by w, each decayed by the gates of its time in the window."""
        tokens = self.stream.q.shape[-2]
        entering = self.held[:, :tokens]
        if self.stream.present is not None:
            entering = entering & self.stream.present
        mass = None
        if self.decayed is not None:
            log_mass = self.decayed[..., window.size :] - self.decayed[..., :tokens]
            log_mass = torch.where(entering[:, None], log_mass, -torch.inf)  # before exp: ∞·0 is not 0
            mass = log_mass.exp().to(self.k.dtype)
        return Stream(
            self.stream.q,
            torch.where(
                entering[:, None, :, None], self.k[..., :tokens, :], 0.0
            ),  # a sink may be infinite, and ∞·0 is not 0
            self.v[..., :tokens, :],
            self.stream.log_forget,
            entering,
            mass,
        )

    def exact_logits(self, window: Window, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        """x + ln D, visibility and values of the exact keys, for queries in chunks of L.

        Token i of a chunk sees i … i+w−1 of the L+w−1 positions laid out for it, and the sinks.
        """
        size, width = window.size, chunk + window.size - 1
        q = in_chunks(self.stream.q, chunk)  # [B, K, G, C, L, d]
        missing = -self.stream.q.shape[-2] % chunk

        def bands(u: Tensor) -> Tensor:
            """[B, (K), w+T, n] → [B, (K), C, L+w−1, n]"""
            return torch.nn.functional.pad(u, (0, 0, 0, missing))[..., 1:, :].unfold(-2, width, chunk).mT

        i = torch.arange(chunk, device=q.device)[:, None]
        j = torch.arange(width, device=q.device)[None, :]
        near = (j >= i) & (j < i + size) & bands(self.held[..., None].to(q.dtype))[..., 0][:, :, None].bool()
        now = size + in_chunks(torch.arange(self.stream.q.shape[-2], device=q.device)[:, None], chunk)
        first = self.sink_position[:, None, None, :] <= now  # [B, C, L, s]
        chunks = q.shape[-3]
        keys = torch.cat([bands(self.k), _per_chunk(self.sink_k, chunks)], dim=-2)
        values = torch.cat([bands(self.v), _per_chunk(self.sink_v, chunks)], dim=-2)
        logits = q @ keys[:, :, None].mT
        bias = window.log_bias(self._ages(size - 1 + i - j, now).to(q.dtype))
        logits = logits if bias is None else logits + bias[:, None, None]
        if self.decayed is not None and self.sink_decay is not None:
            here = in_chunks(self.decayed[..., size:, None], chunk)
            start = self.decayed[..., size - 1, None, None, None]
            to_band = here - bands(self.decayed[..., None]).mT
            to_band = torch.where(near[:, None], to_band.to(q.dtype), 0.0)
            to_sink = (here - start).to(q.dtype) + self.sink_decay[:, :, None, None, :]
            to_sink = torch.where(first[:, None], to_sink, 0.0)
            logits = logits + torch.cat([to_band, to_sink], dim=-1)[:, :, None]
        return logits, torch.cat([near, first], dim=-1)[:, None, None], values

    def _ages(self, in_band: Tensor, now: Tensor) -> Tensor:
        """How many tokens ago each exact key came, [B, C, L, L+w−1+s], for queries at `now`."""
        of_sinks = now - self.sink_position[:, None, None, :]
        return torch.cat([in_band.expand(*of_sinks.shape[:2], -1, -1), of_sinks], dim=-1)

    def exact_after(self, window: Window, like: ExactKeys) -> ExactKeys:
        """What the state keeps after the last token of each row, in the dtypes it kept before."""
        tokens = self.stream.q.shape[-2]
        if self.lengths is None:
            keep = slice(tokens, None)
            recent_k, recent_v = self.k[..., keep, :], self.v[..., keep, :]
            recent_log_forget = None if self.log_forget is None else self.log_forget[..., keep]
        else:
            pick = (self.lengths[:, None] + torch.arange(window.size, device=self.k.device))[:, None]
            recent_k, recent_v = take(self.k, pick), take(self.v, pick)
            recent_log_forget = None
            if self.log_forget is not None:
                recent_log_forget = take(self.log_forget[..., None], pick)[..., 0]
        sink_log_decay = None
        if self.sink_decay is not None and self.decayed is not None:
            since_start = self.decayed[..., -1:] - self.decayed[..., window.size - 1 : window.size]
            sink_log_decay = self.sink_decay + since_start.to(self.sink_decay.dtype)
        k_type, v_type = like.recent_k.dtype, like.recent_v.dtype
        return ExactKeys(
            recent_k.to(k_type, copy=True),  # a copy, so that the memory of the longer line can be freed
            recent_v.to(v_type, copy=True),
            self.sink_k.to(k_type),
            self.sink_v.to(v_type),
            recent_log_forget,
            sink_log_decay,
        )


def merge_exact(
    spec: AttentionSpec,
    first: tuple[Tensor, Tensor, ExactKeys],
    second: tuple[Tensor, Tensor, ExactKeys],
    log_decay: Tensor | None,
) -> tuple[Tensor, ExactKeys]:
    """Moments and exact keys of a concatenation, from (count, moments, exact keys) of its halves.

    Every exact key gets its number in the whole text; keys that are neither among its first s nor among
    its last w are folded into the tail. `log_decay` [B, K] is the log decay over the second half.
    """
    window = spec.window
    assert window is not None
    (count_a, moments_a, a), (count_b, moments_b, b) = first, second
    total = count_a + count_b
    held_a = _held_keys(window, count_a, a, torch.zeros_like(count_a))
    held_b = _held_keys(window, count_b, b, count_a)
    decay_a = held_a.log_decay
    if decay_a is not None and log_decay is not None:
        decay_a = decay_a + log_decay[..., None]
        moments_a = moments_a * log_decay[..., None, None].exp()
    number = torch.cat([held_a.number, held_b.number], dim=-1)  # [B, n]
    k, v = torch.cat([held_a.k, held_b.k], -2), torch.cat([held_a.v, held_b.v], -2)
    folded = (number >= window.sinks) & (number < (total - window.size)[:, None])
    decay = mass = None
    if decay_a is not None and held_b.log_decay is not None:
        decay = torch.cat([decay_a, held_b.log_decay], dim=-1)
        mass = decay.exp()
    wide_k, wide_v = k.to(moments_a.dtype), v.to(moments_a.dtype)
    leaving = Stream(wide_k[:, :, None], wide_k, wide_v, None, folded, mass)
    entering = symmetric_powers(wide_k, spec.orders).mT @ values_with_count(spec, leaving)

    last = torch.arange(window.size, device=k.device) + (total - window.size)[:, None]
    early = torch.arange(window.sinks, device=k.device).expand(k.shape[0], -1)
    recent_log_forget = sink_log_decay = None
    if decay is not None and a.recent_log_forget is not None and b.recent_log_forget is not None:
        sink_log_decay = _placed(early, number, decay[..., None])[..., 0]
        later = _recent_numbers(window, count_b) + count_a[:, None]
        gate_number = torch.cat([_recent_numbers(window, count_a), later], dim=-1)
        gates = torch.cat([a.recent_log_forget, b.recent_log_forget], dim=-1)
        recent_log_forget = _placed(last, gate_number, gates[..., None])[..., 0]
    exact = ExactKeys(
        _placed(last, number, k),
        _placed(last, number, v),
        _placed(early, number, k),
        _placed(early, number, v),
        recent_log_forget,
        sink_log_decay,
    )
    return moments_a + moments_b + entering, exact


@dataclass(frozen=True)
class _HeldKeys:
    """Sinks and recent keys of one state as one list, numbered in the whole text."""

    k: Tensor
    v: Tensor
    number: Tensor
    log_decay: Tensor | None


def _recent_numbers(window: Window, count: Tensor) -> Tensor:
    """Which tokens the recent slots hold; far below zero where they hold none yet."""
    recent = count[:, None] - window.size + torch.arange(window.size, device=count.device)
    return torch.where(recent >= 0, recent, _NONE)


def _held_keys(window: Window, count: Tensor, exact: ExactKeys, before: Tensor) -> _HeldKeys:
    sinks = torch.arange(window.sinks, device=count.device).expand(count.shape[0], -1)
    recent = _recent_numbers(window, count)
    number = torch.cat(
        [
            torch.where(sinks < count[:, None], sinks + before[:, None], _NONE),
            torch.where(recent >= window.sinks, recent + before[:, None], _NONE),
        ],
        dim=-1,
    )
    log_decay = None
    if exact.recent_log_forget is not None and exact.sink_log_decay is not None:
        totals = exact.recent_log_forget.cumsum(-1)
        log_decay = torch.cat([exact.sink_log_decay, totals[..., -1:] - totals], dim=-1)
    return _HeldKeys(
        torch.cat([exact.sink_k, exact.recent_k], dim=-2),
        torch.cat([exact.sink_v, exact.recent_v], dim=-2),
        number,
        log_decay,
    )


def _placed(slots: Tensor, number: Tensor, u: Tensor) -> Tensor:
    """For each slot, the entry of u [B, K, n, c] with the slot's number, or zeros."""
    chosen = slots[:, :, None] == number[:, None, :]  # [B, slots, n]
    return chosen[:, None].to(u.dtype) @ u


def take(u: Tensor, positions: Tensor) -> Tensor:
    """u[b, k, positions[b, k, i], :] for u [B, K, n, c] and positions [B, K or 1, m]."""
    index = positions[..., None].expand(u.shape[0], u.shape[1], -1, u.shape[-1])
    return u.gather(-2, index)


def _per_chunk(u: Tensor, chunks: int) -> Tensor:
    """[B, K, s, n] → [B, K, C, s, n], the same for every chunk."""
    return u[:, :, None].expand(-1, -1, chunks, -1, -1)


def _rows_of_tokens(rows: Rows, tokens: int) -> Rows:
    """Rows in chunks as rows of tokens."""

    def flat(u: Tensor | None) -> Tensor | None:
        return None if u is None else out_of_chunks(u[..., None], tokens)[..., 0]

    return Rows(out_of_chunks(rows.numerator, tokens), flat(rows.row_sum), flat(rows.log_scale))
