"""A source: the batch of any step, on any rank, without computing those before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from maclaurin.data.batch import Batch, Row
from maclaurin.data.data_errors import DataError
from maclaurin.data.splits import TEST, VALIDATION


class Source(ABC):
    """Training rows, in an order that is a function of seed and step alone; validation and test rows.

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
        """Tokens and targets are below this."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a row, T."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of everything that determines the numbers of every batch."""

    @property
    @abstractmethod
    def scores_accuracy(self) -> bool:
        """Whether accuracy, rather than the loss, is the metric of this data."""

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

    def validation_batches(
        self, batch_size: int, limit: int | None = None, *, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """For evaluation during training, and for all choosing."""
        return self.held_out_batches(VALIDATION, batch_size, limit, rank=rank, world=world)

    def test_batches(
        self, batch_size: int, limit: int | None = None, *, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """For the final number alone."""
        return self.held_out_batches(TEST, batch_size, limit, rank=rank, world=world)

    def held_out_batches(
        self, split: str, batch_size: int, limit: int | None = None, *, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The whole split once (or its first `limit` rows), always in the same order.

        Every rank gets equally many batches of equal shapes, as collective calls need it: where the last
        rows cannot be shared equally, unscored rows fill the gaps.
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
