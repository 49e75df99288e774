"""Prepared text as a source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from maclaurin.data.batch import Row
from maclaurin.data.fingerprint import digest
from maclaurin.data.permutation import Permutation
from maclaurin.data.rows import LAYOUTS, Rows
from maclaurin.data.source import Source
from maclaurin.data.splits import SPLITS, TRAIN
from maclaurin.data.tokenizing.tokenizer import Tokenizer
from maclaurin.data.tokens.prepare import PreparedTokens


@final
@dataclass(frozen=True)
class TextSource(Source):
    """Rows of text. Each epoch visits every training row once, in an order of its own.

    Validation and test rows come in one shuffled order that no seed changes, so that the first few are a
    fair sample and runs with different seeds are evaluated on the same rows.
    """

    corpus_name: str
    tokenizer: Tokenizer
    prepared: PreparedTokens
    row_length: int
    layout: str
    cross_documents: bool
    seed: int

    @property
    def name(self) -> str:
        """The corpus's name."""
        return self.corpus_name

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.vocab_size

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.row_length

    @property
    def fingerprint(self) -> str:
        """Digest of corpus, tokenizer, split, layout and seed."""
        return digest(
            {
                "made_from": self.prepared.manifest.made_from,
                "length": self.length,
                "layout": self.layout,
                "cross_documents": self.cross_documents,
                "seed": self.seed,
                "version": 1,
            }
        )

    @property
    def scores_accuracy(self) -> bool:
        """Text is judged by its loss."""
        return False

    @property
    def tokens_per_epoch(self) -> int:
        """Scored tokens of all training rows."""
        return self._train.scored

    def held_out_rows(self, split: str) -> int:
        """Rows of the split's documents."""
        return len(self._rows[split])

    def train_row_numbers(self, first: int, count: int) -> np.ndarray:
        """Epoch e = place // N has its own permutation of the N rows."""
        epochs, places = np.divmod(first + np.arange(count), len(self._train))
        numbers = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            members = epochs == epoch
            numbers[members] = self._order(f"train, seed {self.seed}, epoch {epoch}", self._train)(
                places[members]
            )
        return numbers

    def train_row(self, number: int) -> Row:
        """One row of the training documents."""
        return self._train[number]

    def held_out_row(self, split: str, number: int) -> Row:
        """One row of the split's documents, in shuffled order."""
        rows = self._rows[split]
        return rows[int(self._order(split, rows)(np.array([number]))[0])]

    @property
    def _train(self) -> Rows:
        return self._rows[TRAIN]

    @cached_property
    def _rows(self) -> dict[str, Rows]:
        return {split: self._rows_of(split) for split in SPLITS}

    def _rows_of(self, split: str) -> Rows:
        documents = self.prepared.manifest.documents(self.prepared.folder, split)
        return LAYOUTS[self.layout](documents, self.length, self.tokenizer.separator, self.cross_documents)

    @staticmethod
    def _order(key: str, rows: Rows) -> Permutation:
        return Permutation(len(rows), key)
