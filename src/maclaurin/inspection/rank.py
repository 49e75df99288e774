"""How many directions a state uses: e^entropy of its normalised singular values."""

from __future__ import annotations

import torch
from torch import Tensor


def effective_rank(singular_values: Tensor) -> Tensor:
    """e^{−Σ p ln p}, p = σ/Σσ, over the last dimension."""
    share = singular_values / singular_values.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.special.entr(share).sum(-1).exp()


def state_ranks(k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """[2, Hkv]: ranks of Σ k vᵀ and Σ k^⊗2 vᵀ for k [T, Hkv, d], v [T, Hkv, e].

    The second has d² rows, but its singular values are the roots of the eigenvalues of
    Σ_st (k_s·k_t)² v_s v_tᵀ, an e × e matrix.
    """
    k, v = (u.double().transpose(0, 1) for u in (k, v))
    first = torch.linalg.svdvals(k.mT @ v)
    gram = v.new_zeros(v.shape[0], v.shape[2], v.shape[2])
    for start in range(0, k.shape[1], chunk):
        rows = slice(start, start + chunk)
        gram += v[:, rows].mT @ ((k[:, rows] @ k.mT).square() @ v)
    second = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return torch.stack([effective_rank(first), effective_rank(second)])
