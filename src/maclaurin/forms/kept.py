"""Exact slots for keys that leave the window, in constant memory.

    candidates    the M keys in the slots, then the keys that leave the window one by one
    kept at t     the M best of the candidates so far, by the attention they received (ranking.py)
    tail at t     all others: a key enters it when displaced, or when it leaves the window and is not kept

A text is read in pieces, each starting from the state after the one before. Within a piece every query has a
mask over slots, line (exact_keys.py) and sinks; the tail is the ordinary polynomial form over displaced keys.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maclaurin.forms.exact_keys import ExactKeys, Line, TailForm, take, window_rows
from maclaurin.forms.parallel import rows_with_exact_keys
from maclaurin.forms.ranking import better, shares
from maclaurin.forms.state import State
from maclaurin.forms.stream import Rows, Stream
from maclaurin.spec import AttentionSpec, Window


def rows_of_window_and_tail(
    spec: AttentionSpec,
    stream: Stream,
    count: Tensor,
    moments: Tensor,
    exact: ExactKeys,
    tail_form: TailForm,
    chunk: int,
    last_form: TailForm | None = None,
) -> tuple[Rows, Tensor, ExactKeys]:
    """Rows, moments and exact keys after the stream's tokens; `count` [B] tokens came before them.

    `last_form`: how to compute the tail of the last piece, if not like the others.
    """
    assert spec.window is not None
    last_form = tail_form if last_form is None else last_form
    if not spec.window.kept:
        return window_rows(spec, stream, count, moments, exact, last_form, chunk)
    parts, tokens = [], stream.q.shape[-2]
    again = torch.is_grad_enabled() and tokens > chunk
    for start in range(0, tokens, chunk):
        piece = stream.tokens(start, min(start + chunk, tokens))
        form = tail_form if start + chunk < tokens else last_form
        arguments = (spec, piece, count, moments, exact, form)
        if again:
            rows, moments, exact = checkpoint(_piece, *arguments, use_reentrant=False)
        else:
            rows, moments, exact = _piece(*arguments)
        count = count + piece.lengths
        parts.append(rows)
    return Rows.concatenate(parts), moments, exact


def _piece(
    spec: AttentionSpec,
    stream: Stream,
    count: Tensor,
    moments: Tensor,
    exact: ExactKeys,
    tail_form: TailForm,
) -> tuple[Rows, Tensor, ExactKeys]:
    window = spec.window
    assert window is not None
    line = Line.lay_out(window, stream, count, exact)
    columns = _Columns.lay_out(window, line, exact)
    near = columns.near(window)
    logits = columns.logits()
    score = _scores(window, line, exact, shares(logits, near[:, None, None]))
    slots = _Slots.fill(window, line, exact, score)
    tail, statistics, moments = tail_form(spec, _displaced(columns, slots), moments)
    reference = spec.kernel.reference(statistics)
    seen = near[:, None] | torch.nn.functional.pad(slots.kept, (0, near.shape[-1] - slots.kept.shape[-1]))
    rows = rows_with_exact_keys(
        tail,
        logits - reference if isinstance(reference, Tensor) else logits,
        seen[:, :, None],
        columns.v,
    )
    after = _after(line, columns, slots, exact, score, line.exact_after(window, exact))
    return rows, moments, after


@dataclass(frozen=True)
class _Columns:
    """All exact keys of a piece: M slots, the line of w + T, the sinks. The first M + T may be kept."""

    line: Line
    k: Tensor  # [B, K, M+w+T+s, d]
    v: Tensor
    log_decay: Tensor | None  # [B, K, M+w+T+s], log decay of each before the piece
    since_start: Tensor | None  # [B, K, T], log decay from there to each token

    @staticmethod
    def lay_out(window: Window, line: Line, exact: ExactKeys) -> _Columns:
        kept_k, kept_v, _ = _slots_of(exact)
        k = torch.cat([kept_k.to(line.k.dtype), line.k, line.sink_k], dim=-2)
        v = torch.cat([kept_v.to(line.v.dtype), line.v, line.sink_v], dim=-2)
        log_decay = since_start = None
        if line.decayed is not None:
            assert exact.kept_log_decay is not None
            assert line.sink_decay is not None
            start = line.decayed[..., window.size - 1 : window.size]
            of_line = start - line.decayed
            log_decay = torch.cat([exact.kept_log_decay.double(), of_line, line.sink_decay.double()], dim=-1)
            since_start = line.decayed[..., window.size :] - start
        return _Columns(line, k, v, log_decay, since_start)

    def near(self, window: Window) -> Tensor:
        """Which columns are in the window of each token, or are sinks up to it, [B, T, M+w+T+s]."""
        line, tokens = self.line, self.line.stream.q.shape[-2]
        t = torch.arange(tokens, device=line.k.device)[:, None]
        p = torch.arange(window.size + tokens, device=line.k.device)
        in_window = (p > t) & (p <= t + window.size) & line.held[:, None]
        first = line.sink_position[:, None] <= t + window.size
        return torch.cat([torch.nn.functional.pad(in_window, (window.kept, 0)), first], dim=-1)

    def logits(self) -> Tensor:
        """x + ln D [B, K, G, T, columns]; undefined where a column is not seen."""
        x = self.line.stream.q @ self.k[:, :, None].mT
        if self.log_decay is None or self.since_start is None:
            return x
        decay = self.since_start[..., None] + self.log_decay[..., None, :]
        return x + decay.to(x.dtype)[:, :, None]


@dataclass(frozen=True)
class _Slots:
    """Which of the M + T candidates are kept at each token, and which one is displaced there."""

    kept: Tensor  # [B, K, T, M+T]
    score: Tensor  # [B, K, M+T], −∞ for a column that is not a candidate
    displaces: Tensor  # [B, K, T], whether a key goes to the tail
    displaced: Tensor  # [B, K, T], the candidate that goes

    @staticmethod
    def fill(window: Window, line: Line, exact: ExactKeys, score: Tensor) -> _Slots:
        """With every token one key leaves the window; it is kept if fewer than M candidates are better."""
        tokens = line.stream.q.shape[-2]
        leaves = line.held[:, :tokens]
        if line.stream.present is not None:
            leaves = leaves & line.stream.present
        before = _slots_of(exact)[2]
        new = torch.where(leaves[:, None], score[..., :tokens], -torch.inf)
        every = torch.cat([before, new], dim=-1)
        beaten_by_new = better(new, every, window.kept) & leaves[:, None, :, None]
        rank = _rank_among(before, every)[..., None, :] + beaten_by_new.cumsum(-2)  # [B, K, T, M+T]
        t = torch.arange(tokens, device=score.device)
        came = torch.cat([t.new_full((window.kept,), -1), t])  # when each became a candidate
        valid = (every > -torch.inf)[..., None, :]
        kept = valid & (came <= t[:, None]) & (rank < window.kept)
        earlier = torch.cat([valid & (came < 0), kept[..., :-1, :]], dim=-2)
        gone = (earlier | (valid & (came == t[:, None]))) & ~kept
        return _Slots(kept, every, gone.any(-1), gone.to(torch.uint8).argmax(-1))


def _rank_among(slots: Tensor, every: Tensor) -> Tensor:
    """For each score in `every`, how many of the slots' scores [B, K, M], its first M, are better."""
    most = slots.shape[-1]
    ascending, order = slots.sort(dim=-1, stable=True)  # of two equal scores the later wins
    place = torch.arange(most, device=slots.device).expand_as(order)
    own = most - 1 - torch.empty_like(order).scatter_(-1, order, place)
    others = every[..., most:].contiguous()
    return torch.cat([own, most - torch.searchsorted(ascending, others, right=True)], dim=-1)


def _scores(window: Window, line: Line, exact: ExactKeys, share: Tensor) -> Tensor:
    """The attention received so far by every position of the line, [B, K, w+T]."""
    received = share[..., window.kept : window.kept + line.k.shape[-2]].mean(2)
    if line.stream.present is not None:
        received = torch.where(line.stream.present[:, None, :, None], received, 0.0)
    assert exact.recent_score is not None
    new = received.sum(-2).nan_to_num(0.0)
    return new + torch.nn.functional.pad(exact.recent_score, (0, new.shape[-1] - window.size))


def _displaced(columns: _Columns, slots: _Slots) -> Stream:
    """The stream of the tail: for every token the key that it displaces, if any."""
    stream, at = columns.line.stream, slots.displaced
    there = slots.displaces[..., None]
    mass = slots.displaces.to(columns.k.dtype)
    if columns.log_decay is not None and columns.since_start is not None:
        log_mass = columns.since_start + columns.log_decay.gather(-1, at)
        log_mass = torch.where(slots.displaces, log_mass, -torch.inf)  # before exp: ∞·0 is not 0
        mass = log_mass.exp().to(mass.dtype)
    return dataclasses.replace(
        stream,
        k=torch.where(there, take(columns.k, at), 0.0),
        v=torch.where(there, take(columns.v, at), 0.0),
        present=None,
        mass=mass,
    )


def _after(
    line: Line, columns: _Columns, slots: _Slots, before: ExactKeys, score: Tensor, near: ExactKeys
) -> ExactKeys:
    """The exact keys after the piece: those near its end, and the kept ones, oldest first."""
    kept_k, kept_v, kept_score = _slots_of(before)
    most, size = kept_k.shape[-2], near.recent_k.shape[-2]
    last = slots.kept[..., -1, :]
    number = torch.arange(last.shape[-1], device=last.device)
    chosen = torch.where(last, number, -1).sort(dim=-1).values[..., -most:]
    at, filled = chosen.clamp(min=0), chosen >= 0
    kept_log_decay = None
    if columns.log_decay is not None and columns.since_start is not None:
        decay = columns.log_decay.gather(-1, at) + columns.since_start[..., -1:]
        kept_log_decay = torch.where(filled, decay, 0.0).to(score.dtype)
    first = line.stream.lengths[:, None] + torch.arange(size, device=score.device)
    return dataclasses.replace(
        near,
        recent_score=score.gather(-1, first[:, None].expand(*score.shape[:2], -1)),
        kept_score=torch.where(filled, slots.score.gather(-1, at), -torch.inf).to(kept_score.dtype),
        kept_k=torch.where(filled[..., None], take(columns.k, at), 0.0).to(kept_k.dtype),
        kept_v=torch.where(filled[..., None], take(columns.v, at), 0.0).to(kept_v.dtype),
        kept_log_decay=kept_log_decay,
    )


def _slots_of(exact: ExactKeys) -> tuple[Tensor, Tensor, Tensor]:
    assert exact.kept_k is not None
    assert exact.kept_v is not None
    assert exact.kept_score is not None
    return exact.kept_k, exact.kept_v, exact.kept_score


# ----------------------------------------------------------------- after a prompt that was read in full


#: how many of a prompt's last queries choose its kept keys
LAST_QUERIES = 256


@torch.no_grad()
def keep_attended_keys(state: State, q: Tensor, k: Tensor, v: Tensor, present: Tensor | None) -> State:
    """The state after a prompt q [B, T, H, d], k, v [B, T, K, ·], with its slots chosen by the last queries.

        a_s = w/n Σ_u mean_g p_us        over the last n queries u, p_us = softmax over every key up to u

    If memory is small while a text is read, a key is kept or dropped when it leaves the window of w tokens,
    by the attention it received there. After a prompt was read with full attention every key is still
    available, and its last queries predict better which keys the text after it needs. The factor w/n makes
    these scores comparable with those of keys that leave the window later.

    present [B, T] is False for padding. A state without slots, or with a tail, is returned as it is: a tail
    holds the keys that were not kept, so the choice cannot be changed afterwards.
    """
    spec, exact = state.spec, state.exact
    window = spec.window
    if window is None or not window.kept or exact is None or spec.features(1):
        return state
    assert exact.kept_k is not None
    assert exact.kept_v is not None
    assert exact.kept_score is not None
    there = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if present is None else present
    number = there.cumsum(1)  # the first real token has number 1
    left = there & (number > window.sinks) & (number <= number[:, -1:] - window.size)
    received = _received(q, k, there, spec.kernel.default_scale(k.shape[-1])) * window.size
    score = torch.where(left[:, None], received, -torch.inf)  # [B, K, T]
    best = score.topk(min(window.kept, score.shape[-1]), dim=-1)
    chosen = torch.where(best.values > -torch.inf, best.indices, -1)
    chosen = torch.nn.functional.pad(chosen, (window.kept - chosen.shape[-1], 0), value=-1)
    chosen = chosen.sort(dim=-1).values  # empty slots, then the older key first
    at, filled = chosen.clamp(min=0), chosen >= 0
    kept = {
        name: torch.where(filled[..., None], take(u.transpose(1, 2), at), 0.0).to(slots.dtype)
        for name, u, slots in (("kept_k", k, exact.kept_k), ("kept_v", v, exact.kept_v))
    }
    kept["kept_score"] = torch.where(filled, score.gather(-1, at), -torch.inf).to(exact.kept_score.dtype)
    return dataclasses.replace(state, exact=dataclasses.replace(exact, **kept))


def _received(q: Tensor, k: Tensor, there: Tensor, scale: float) -> Tensor:
    """The mean attention that each key gets from the last real queries, [B, K, T]; one head at a time."""
    tokens, heads = k.shape[1:3]
    place = torch.arange(tokens, device=k.device)
    last = torch.where(there, place, -1).topk(min(LAST_QUERIES, tokens), dim=1).values  # [B, n]
    real, last = last >= 0, last.clamp(min=0)
    queries = q.gather(1, last[..., None, None].expand(-1, -1, *q.shape[2:])).unflatten(2, (heads, -1))
    seen = (place <= last[..., None]) & there[:, None]  # [B, n, T]
    found = []
    for head in range(heads):
        x = torch.einsum("bngd,btd->bgnt", queries[:, :, head].float(), k[:, :, head].float()) * scale
        shares = x.masked_fill(~seen[:, None], -torch.inf).softmax(-1).mean(1).nan_to_num(0.0)
        found.append((shares * real[..., None]).sum(1))
    return torch.stack(found, dim=1) / real.sum(1).clamp(min=1)[:, None, None]
