"""Which of the keys that have left the window are kept: those that received most attention in it.

    a_s = Σ_{s≤u<s+w} mean_g p_us,        p_us = softmax over the keys of u's window and the sinks

A key's score a_s is complete when it leaves. At time t the M best of the keys that have left are kept; of two
equal scores the later wins. Scores only choose keys and get no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def shares(logits: Tensor, near: Tensor) -> Tensor:
    """The softmax of logits [..., T, n] over the keys that are near, 0 for the others."""
    logits = torch.where(near, logits, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - torch.where(largest.isfinite(), largest, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    return torch.where(near, weights / torch.where(total == 0, 1.0, total), 0.0)


@torch.no_grad()
def kept_by_rank(logits: Tensor, near: Tensor, left: Tensor, present: Tensor | None, most: int) -> Tensor:
    """Which keys are kept at each query, [B, K, 1, T, S], for logits [B, K, G, T, S] of every pair.

    near    [B or 1, 1, 1, T, S], the keys of the window and the sinks
    left    the same for keys that have left the window and are not sinks
    present [B, S], False for queries that are padding
    """
    received = shares(logits, near).mean(2)  # [B, K, T, S]
    if present is not None:
        received = torch.where(present[:, None, :, None], received, 0.0)
    score = received.sum(-2).nan_to_num(0.0)  # [B, K, S]
    gone = left[:, :, 0]
    rank = gone.to(score.dtype) @ better(score, score).to(score.dtype)
    return (gone & (rank < most))[:, :, None]


def better(score: Tensor, than: Tensor, first: int = 0) -> Tensor:
    """[..., n, m]: whether the key of each score [..., n] is better than the key of each `than` [..., m].

    Both are in the order in which keys came; the first score belongs to key number `first`.
    """
    a, b = score[..., :, None], than[..., None, :]
    i = torch.arange(first, first + score.shape[-1], device=score.device)[:, None]
    later = i > torch.arange(than.shape[-1], device=score.device)
    return (a > b) | ((a == b) & later)
