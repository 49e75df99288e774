"""Padding and packed sequences, converted to the one layout that the forms take: padding on the right.

Every form then needs only the lengths of its rows; windows, sinks and positions count real tokens
only. Packed sequences become rows of a batch; those of similar length share one, so that
no more than about half of it is padding. Some programs read packed sequences in place instead
(`Packing`), without a copy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maclaurin.errors import InputError


class Packing(NamedTuple):
    """Sequences one after the other in one row of tokens."""

    cuts: Tensor  # [n + 1], 0 = c₀ ≤ c₁ ≤ … ≤ c_n = T, on the device of the tokens
    longest: int | None = None  # tokens of the longest, if known

    @property
    def sequences(self) -> int:
        return self.cuts.numel() - 1

    def length(self, tokens: int) -> int:
        """About how long they are: the longest, if known, else the mean; cu_seqlens is not read."""
        return max(1, self.longest or -(-tokens // self.sequences))

    def visible_keys(self, tokens: int, causal: bool) -> Tensor:
        """How many keys of its own sequence each token sees, [1, T], without a GPU synchronisation."""
        t = torch.arange(tokens, dtype=self.cuts.dtype, device=self.cuts.device)
        after = torch.searchsorted(self.cuts, t, right=True)  # the first cut after the token
        last = t + 1 if causal else self.cuts[after]
        return (last - self.cuts[after - 1])[None]


@dataclass(frozen=True)
class Batch:
    """Where the tokens of one right-padded batch come from: tokens[row, t] of the flat input."""

    tokens: Tensor  # [N, M]
    lengths: Tensor  # [N]
    sequences: Tensor | None = None  # [N], which packed sequences the rows are; None for all

    def take(self, u: Tensor) -> Tensor:
        """[B, T, …] → [N, M, …] with zeros for padding, whatever was there."""
        taken = u.flatten(0, 1)[self.tokens]
        absent = ~self.present
        return taken.masked_fill(absent.reshape(*absent.shape, *[1] * (taken.dim() - 2)), 0.0)

    @property
    def present(self) -> Tensor:
        """[N, M], True for real tokens."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


def put_back(batches: list[Batch], outputs: list[Tensor], shape: tuple[int, int]) -> Tensor:
    """[N, M, …] of each batch → [B, T, …], zeros where no real token was."""
    example = outputs[0]
    flat = example.new_zeros(shape[0] * shape[1] + 1, *example.shape[2:])  # the last slot is for padding
    for batch, output in zip(batches, outputs, strict=True):
        slots = torch.where(batch.present, batch.tokens, shape[0] * shape[1])
        flat = flat.index_put((slots,), output)
    return flat[:-1].unflatten(0, shape)


def from_padding_mask(mask: Tensor) -> Batch:
    """Real tokens (True) of each row, in their order, moved to its left end."""
    batch, length = mask.shape
    order = torch.argsort(~mask, dim=1, stable=True)
    return Batch(order + torch.arange(batch, device=mask.device)[:, None] * length, mask.sum(1))


def from_cu_seqlens(cu_seqlens: Tensor, tokens: int, max_seqlen: int | None) -> list[Batch]:
    """Packed sequences as rows, in batches of similar length.

    With max_seqlen (or inside torch.compile, where lengths cannot be read) there is one batch.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    if max_seqlen is not None or torch.compiler.is_compiling():
        return [_rows(starts, lengths, max_seqlen or tokens, tokens, None)]
    by_size: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths.tolist()):
        by_size.setdefault(max(length - 1, 0).bit_length(), []).append(sequence)
    batches = []
    for members in by_size.values():
        index = torch.tensor(members, device=cu_seqlens.device)
        longest = max(int(lengths[index].max()), 1)
        batches.append(_rows(starts[index], lengths[index], longest, tokens, index))
    return batches


def _rows(starts: Tensor, lengths: Tensor, longest: int, tokens: int, which: Tensor | None) -> Batch:
    index = starts[:, None] + torch.arange(longest, device=starts.device)
    return Batch(index.clamp(max=tokens - 1), lengths, which)


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, tokens: int, max_seqlen: int | None) -> None:
    """Raise unless they cut one row of tokens into consecutive sequences."""
    if not isinstance(cu_seqlens, Tensor):
        raise InputError(f"cu_seqlens must be a torch tensor of integers, not {type(cu_seqlens).__name__}.")
    if batch != 1:
        raise InputError(
            f"cu_seqlens packs sequences into one row, but the batch has {batch} rows. "
            "Reshape to [1, B·T, …] or use key_padding_mask."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise InputError(
            "cu_seqlens must be the integers 0 = c₀ ≤ c₁ ≤ … ≤ c_n = T, at least two of them; "
            f"got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}."
        )
    check_cuts(cu_seqlens, tokens, max_seqlen)


def check_cuts(cu_seqlens: Tensor, tokens: int, max_seqlen: int | None) -> None:
    """Raise unless they rise from 0 to the number of tokens.

    On a GPU the check runs without a synchronisation: wrong cuts fail an assertion on the device, and the
    next call that synchronises reports it.
    """
    if torch.compiler.is_compiling():
        return
    if cu_seqlens.is_cuda:
        _assert_on_device(cu_seqlens, tokens, max_seqlen)
        return
    cuts = cu_seqlens.tolist()
    if cuts[0] != 0 or cuts[-1] != tokens or any(a > b for a, b in itertools.pairwise(cuts)):
        raise InputError(f"cu_seqlens must rise from 0 to T = {tokens}; got {_shortened(cuts)}.")
    longest = max(b - a for a, b in itertools.pairwise(cuts))
    if max_seqlen is not None and longest > max_seqlen:
        raise InputError(f"max_seqlen is {max_seqlen}, but a sequence has {longest} tokens.")


def _assert_on_device(cu_seqlens: Tensor, tokens: int, max_seqlen: int | None) -> None:
    lengths = cu_seqlens.diff()
    rise = (lengths >= 0).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == tokens)
    torch._assert_async(rise, f"cu_seqlens must rise from 0 to T = {tokens}")  # type: ignore[attr-defined]
    if max_seqlen is not None:
        fit = (lengths <= max_seqlen).all()
        torch._assert_async(fit, f"a sequence has more than max_seqlen = {max_seqlen} tokens")  # type: ignore[attr-defined]


def _shortened(cuts: list[int]) -> str:
    return str(cuts) if len(cuts) <= 8 else f"[{', '.join(map(str, cuts[:4]))}, …, {cuts[-1]}]"
