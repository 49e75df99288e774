"""A synthetic task as a source."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from maclaurin.data.batch import Row
from maclaurin.data.fingerprint import digest
from maclaurin.data.random_draws import Draws
from maclaurin.data.source import Source
from maclaurin.data.splits import TEST, TRAIN, VALIDATION
from maclaurin.data.tasks import Task

STREAMS = {TRAIN: 0, TEST: 1, VALIDATION: 2}
"""Each split draws from random numbers of its own."""

HELD_OUT_ROWS = 1024


@final
@dataclass(frozen=True)
class TaskSource(Source):
    """Rows that never end for training, and 1024 each for validation and test, from other random numbers.

    Where a task has few possible rows at all (parity of a few bits), the same one can come up in several
    splits.
    """

    written: str
    task: Task
    seed: int

    @property
    def name(self) -> str:
        """The name the user gave."""
        return self.written

    @property
    def vocab_size(self) -> int:
        """The task's."""
        return self.task.vocab_size

    @property
    def length(self) -> int:
        """The task's."""
        return self.task.length

    @property
    def fingerprint(self) -> str:
        """Digest of the task, its options and the seed."""
        return digest({"kind": "task", "row": self._key, "test_rows": HELD_OUT_ROWS, "version": 1})

    @property
    def scores_accuracy(self) -> bool:
        """Tasks are judged by accuracy."""
        return True

    @property
    def tokens_per_epoch(self) -> None:
        """Training rows never end."""
        return

    def held_out_rows(self, split: str) -> int:
        """Enough for an accuracy within one or two percent."""
        return HELD_OUT_ROWS

    def train_row_numbers(self, first: int, count: int) -> np.ndarray:
        """Rows in their order."""
        return first + np.arange(count)

    def train_row(self, number: int) -> Row:
        """From the random numbers of training."""
        return self.task.row(Draws(self._key, STREAMS[TRAIN], number))

    def held_out_row(self, split: str, number: int) -> Row:
        """From the random numbers of that split."""
        return self.task.row(Draws(self._key, STREAMS[split], number))

    @cached_property
    def _key(self) -> str:
        return digest([self.task.notation, dataclasses.asdict(self.task), self.seed])
