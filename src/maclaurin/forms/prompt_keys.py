"""Which keys to keep of a prompt that was read in full: those that its last queries attend to.

    a_s = w/n Σ_u mean_g p_us        over the last n queries u, p_us = softmax over every key up to u

A memory that is small while it reads must decide when a key leaves its window of w tokens, by the queries
that the key met there (ranking.py). After a prompt was read with full attention every key is still
there, and its last queries say more about what the text after it will need. The factor w/n makes these
scores comparable with those of keys that leave the window later.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from maclaurin.forms.exact_keys import take
from maclaurin.forms.state import State

#: how many of the last queries decide
LAST_QUERIES = 256


@torch.no_grad()
def keep_attended_keys(state: State, q: Tensor, k: Tensor, v: Tensor, present: Tensor | None) -> State:
    """The state after a prompt q [B, T, H, d], k, v [B, T, K, ·], with its slots chosen by the last queries.

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
