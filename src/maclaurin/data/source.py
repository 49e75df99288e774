"""A source of batches: the batch of any step, on any rank, without computing earlier batches.

B rows, T positions
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maclaurin.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


class Row(NamedTuple):
    """One row of a batch, still in numpy."""

    tokens: np.ndarray  # [T]
    targets: np.ndarray  # [T], NOT_SCORED where there is no target
    documents: np.ndarray | None = None  # [T], counting from 0
    answers: np.ndarray | None = None  # [T], 1 where the target is the answer to a question, else 0

    def unscored(self) -> Row:
        """The same row as padding: nothing in it is scored."""
        return self._replace(targets=np.full_like(self.targets, NOT_SCORED))


@dataclass(frozen=True)
class Batch:
    """Tokens, the target at each position, and the document each token belongs to."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64, the next token or the answer; NOT_SCORED where not scored
    documents: Tensor | None = None  # [B, T] int32, from 0 in each row; None: attention may cross them
    answers: Tensor | None = None  # [B, T] fp32, weight of the loss of an answer; 0 at other targets
    answers_at: Tensor | None = None  # [n] int64, places of the answers in B · T; set by StepBatch

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Batch:
        """Stack rows of equal length."""
        import torch

        documents = [row.documents for row in rows if row.documents is not None]
        none = np.zeros_like(rows[0].tokens)
        answers = [none if row.answers is None else row.answers for row in rows]
        any_answers = any(row.answers is not None for row in rows)
        return cls(
            torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64)),
            torch.from_numpy(np.stack([row.targets for row in rows]).astype(np.int64)),
            torch.from_numpy(np.stack(documents).astype(np.int32)) if documents else None,
            torch.from_numpy(np.stack(answers).astype(np.float32)) if any_answers else None,
        )

    @property
    def scored(self) -> int:
        """Number of scored positions, the weight of this batch in a mean over tokens."""
        return int((self.targets != NOT_SCORED).sum())

    def to(self, device: str | object, *, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        moved = [
            None if part is None else part.to(device, non_blocking=non_blocking)  # pyright: ignore
            for part in self.tensors
        ]
        return Batch(*moved)  # pyright: ignore[reportArgumentType]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields, in order."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class Source(ABC):
    """Training rows, in an order that depends only on seed and step; validation and test rows.

    The global batch of a step is the same for every number of processes; rank r of w gets the r-th of
    w equal, consecutive shares.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name the user gave."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Vocabulary size: tokens and targets are 0 … vocab_size − 1."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a row, T."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of everything that determines the numbers of every batch, the seed included."""

    @property
    def content(self) -> str:
        """The same for any seed: sources with this digest read the same data, in another order."""
        return dataclasses.replace(self, seed=0).fingerprint  # type: ignore[type-var]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the data, for the record of a run."""
        return {"data": self.name, "content": self.content}

    @property
    @abstractmethod
    def tokens_per_epoch(self) -> int | None:
        """Scored positions of the training rows, each once; None if training rows never end."""

    @abstractmethod
    def train_row_numbers(self, first: int, count: int) -> np.ndarray:
        """The training rows at positions first, first + 1, … of the endless training order."""

    @abstractmethod
    def train_row(self, number: int) -> Row:
        """One training row."""

    @abstractmethod
    def held_out_rows(self, split: str) -> int:
        """Rows of the whole validation or test split."""

    @abstractmethod
    def held_out_row(self, split: str, number: int) -> Row:
        """One row of the validation or test split; the order of numbers is the order of evaluation."""

    def train_batch(self, step: int, batch_size: int, *, rank: int = 0, world: int = 1) -> Batch:
        """This rank's share of the batch_size rows of a step (steps count from 0)."""
        _check_rank(rank, world)
        if step < 0:
            raise DataError(f"steps count from 0, so there is no batch of step {step}.")
        if batch_size < 1 or batch_size % world:
            raise DataError(
                f"a batch of {batch_size} rows cannot be shared equally by {world} "
                f"process{'es' if world > 1 else ''}. "
                f"Use a multiple of {world}, such as {max(1, -(-batch_size // world)) * world}."
            )
        share = batch_size // world
        numbers = self.train_row_numbers(step * batch_size + rank * share, share)
        return Batch.of_rows([self.train_row(int(number)) for number in numbers])

    def held_out_batches(
        self, split: str, batch_size: int, limit: int | None = None, *, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The whole split once (or its first `limit` rows), always in the same order.

        Every rank gets the same number of batches with the same shapes, as collective calls need: if the last
        rows cannot be shared equally, unscored rows are added.
        """
        _check_rank(rank, world)
        if batch_size < 1 or batch_size % world:
            raise DataError(
                f"{split} batches of {batch_size} rows cannot be shared equally by {world} processes."
            )
        all_rows = self.held_out_rows(split)
        rows = all_rows if limit is None else min(limit, all_rows)
        for first in range(0, rows, batch_size):
            count = min(batch_size, rows - first)
            share = -(-count // world)
            yield Batch.of_rows(self._held_out_share(split, first + rank * share, share, first + count))

    def _held_out_share(self, split: str, first: int, count: int, end: int) -> Sequence[Row]:
        """`count` rows from `first` on; those at `end` and beyond are padding."""
        real = [self.held_out_row(split, number) for number in range(first, min(first + count, end))]
        missing = count - len(real)
        return [*real, *[self.held_out_row(split, end - 1).unscored()] * missing]


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise DataError(f"rank {rank} of {world} processes does not exist; ranks are 0 … world − 1.")


NOT_SCORED = -100
"""The target of a position that is not scored; the default ignore_index of torch's cross_entropy."""
