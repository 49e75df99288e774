"""Synthetic tasks: the vocabulary, a row as a function of random numbers, and a task as a source of rows.

Multi-query associative recall   Arora et al. 2023, "Zoology", arXiv 2312.04927
Induction                        Fu et al. 2023, H3; Gu & Dao 2023, Mamba
Selective copying                Jing et al. 2019; Gu & Dao 2023, Mamba
State tracking                   Liu et al. 2023; Merrill et al. 2024
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, final

import numpy as np

from maclaurin.data.random_order import Draws
from maclaurin.data.source import NOT_SCORED, Row, Source
from maclaurin.data.splits import TEST, TRAIN, VALIDATION
from maclaurin.errors import DataError
from maclaurin.plain_data import digest


@dataclass(frozen=True)
class Task(ABC):
    """A frozen dataclass whose fields are the task's options; targets are set where an answer is scored."""

    notation: ClassVar[str]

    length: int = 256

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Vocabulary size, answers included."""

    @abstractmethod
    def row(self, draws: Draws) -> Row:
        """One row, a function of the draws only."""

    def _need(self, fulfilled: bool, problem: str) -> None:
        if not fulfilled:
            raise DataError(f"{self.notation}: {problem}")

    def _need_length(self, least: int, because: str) -> None:
        self._need(
            self.length >= least, f"length={self.length} is too short: {because}. Use length={least} or more."
        )


@final
@dataclass(frozen=True)
class Recall(Task):
    """k₁ v₁ k₂ v₂ … then noise in which keys occur again: the target at each is its value.

    Keys come from the lower half of the vocabulary, values from the upper, all distinct within a row.
    Query g of the slots 1, 2, … after the pairs (two tokens each) is drawn with p(g) ∝ g^(distance − 1):
    distance=0.01, as in Zoology, puts most queries soon after the pairs; distance=1 is uniform. Noise comes
    from the upper half, so that only queries look like queries.
    """

    notation = "mqar"

    pairs: int = 8
    vocab: int = 256
    queries: int = 0  # 0: as many as pairs; keys repeat only after all were used
    distance: float = 0.01

    def __post_init__(self) -> None:
        self._need(self.pairs >= 1, f"pairs={self.pairs} leaves nothing to recall. Use pairs=1 or more.")
        self._need(self.queries >= 0, f"queries={self.queries} must not be negative.")
        self._need(self.distance > 0, f"distance={self.distance:g} must be above 0; 1 is uniform.")
        self._need(
            self.vocab >= 2 * self.pairs,
            f"vocab={self.vocab} is too small for {self.pairs} keys and as many values. "
            f"Use vocab={2 * self.pairs} or more.",
        )
        least = 2 * self.pairs + 2 * self._asked - 1
        self._need_length(least, f"{self.pairs} pairs and {self._asked} queries need {least} positions")

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: keys and values."""
        return self.vocab

    def row(self, draws: Draws) -> Row:
        """Pairs, then queries in noise."""
        keys = draws.distinct_below(self._half, self.pairs)
        values = self._half + draws.distinct_below(self.vocab - self._half, self.pairs)
        tokens = self._half + draws.below(self.vocab - self._half, self.length)
        tokens[0 : 2 * self.pairs : 2] = keys
        tokens[1 : 2 * self.pairs : 2] = values
        places = 2 * self.pairs + 2 * draws.distinct_weighted(self._weights, self._asked)
        which = draws.distinct_below(self.pairs, self.pairs)[np.arange(self._asked) % self.pairs]
        targets = np.full(self.length, NOT_SCORED)
        tokens[places], targets[places] = keys[which], values[which]
        return Row(tokens, targets)

    @property
    def _half(self) -> int:
        return self.vocab // 2

    @property
    def _asked(self) -> int:
        return self.queries or self.pairs

    @property
    def _weights(self) -> np.ndarray:
        slots = (self.length - 2 * self.pairs + 1) // 2
        return np.arange(1, slots + 1) ** (self.distance - 1.0)


@final
@dataclass(frozen=True)
class Induction(Task):
    """… 0 a … 0 → a: token 0 occurs once and again at the end; the target is what followed it before."""

    notation = "induction"

    vocab: int = 64

    def __post_init__(self) -> None:
        self._need(self.vocab >= 3, f"vocab={self.vocab} leaves no choice of answers. Use vocab=3 or more.")
        self._need_length(3, "it must hold the token, the token after it and the token again")

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: the special token 0 and the ordinary ones."""
        return self.vocab

    def row(self, draws: Draws) -> Row:
        """Ordinary tokens, with the special one at two positions."""
        tokens = 1 + draws.below(self.vocab - 1, self.length)
        place = int(draws.below(self.length - 2, 1)[0])
        tokens[[place, -1]] = 0
        targets = np.full(self.length, NOT_SCORED)
        targets[-1] = tokens[place + 1]
        return Row(tokens, targets)


BLANK, ASK = 0, 1


@final
@dataclass(frozen=True)
class SelectiveCopy(Task):
    """_ a _ _ b _ c ? ? ? → a b c: tokens are scattered among blanks; the targets are the tokens in order."""

    notation = "copy"

    tokens: int = 16
    vocab: int = 18

    def __post_init__(self) -> None:
        self._need(self.tokens >= 1, f"tokens={self.tokens} leaves nothing to copy. Use tokens=1 or more.")
        self._need(
            self.vocab >= 4,
            f"vocab={self.vocab} is too small: a blank, a question mark and two tokens are "
            "the least. Use vocab=4 or more.",
        )
        self._need_length(
            2 * self.tokens, f"{self.tokens} tokens need a position each and a position to be copied to"
        )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: blank, question mark and the tokens to copy."""
        return self.vocab

    def row(self, draws: Draws) -> Row:
        """Blanks with tokens among them, then question marks."""
        seen = self.length - self.tokens
        copied = 2 + draws.below(self.vocab - 2, self.tokens)
        row = np.full(self.length, BLANK)
        row[np.sort(draws.distinct_below(seen, self.tokens))] = copied
        row[seen:] = ASK
        targets = np.full(self.length, NOT_SCORED)
        targets[seen:] = copied
        return Row(row, targets)


@final
@dataclass(frozen=True)
class StateTracking(Task):
    """g₁ g₂ … g_T → g₁, g₂∘g₁, …, g_T∘…∘g₁: every position is scored. Z2 is parity, S5 is not solvable."""

    notation = "state"

    group: str = "S3"

    def __post_init__(self) -> None:
        self._need_length(1, "a row holds at least one element")
        multiplication_table(self.group)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: the elements of the group."""
        return len(multiplication_table(self.group))

    def row(self, draws: Draws) -> Row:
        """Random elements and their running product."""
        table = multiplication_table(self.group)
        elements = draws.below(len(table), self.length)
        states = itertools.accumulate(elements.tolist(), lambda state, element: int(table[state, element]))
        return Row(elements, np.fromiter(states, dtype=np.int64, count=self.length))


LARGEST_GROUP = 1000


@cache
def multiplication_table(name: str) -> np.ndarray:
    """table[a, b] = b∘a (first a, then b), element 0 being the identity."""
    match = re.fullmatch(r"([ZSA])(\d+)", name)
    order = _order(match[1], int(match[2])) if match else 0
    if match is None or not 2 <= order <= LARGEST_GROUP:
        raise DataError(
            f"there is no group {name!r} here with 2 to {LARGEST_GROUP} elements; use Zn (addition modulo n; "
            "Z2 is parity), Sn (all permutations, up to S6) or An (the even ones, up to A6)."
        )
    kind, degree = match[1], int(match[2])
    return _cyclic(degree) if kind == "Z" else _permutations(degree, even_only=kind == "A")


def _order(kind: str, degree: int) -> int:
    if kind == "Z" or degree > 7:
        return degree if kind == "Z" else LARGEST_GROUP + 1
    return math.factorial(degree) // (2 if kind == "A" else 1)


def _cyclic(degree: int) -> np.ndarray:
    numbers = np.arange(degree)
    return (numbers[:, None] + numbers) % degree


def _permutations(degree: int, even_only: bool) -> np.ndarray:
    elements = [p for p in itertools.permutations(range(degree)) if not even_only or _is_even(p)]
    number = {p: i for i, p in enumerate(elements)}
    return np.array([[number[tuple(b[i] for i in a)] for b in elements] for a in elements])


def _is_even(permutation: tuple[int, ...]) -> bool:
    inversions = sum(a > b for a, b in itertools.combinations(permutation, 2))
    return inversions % 2 == 0


STREAMS = {TRAIN: 0, TEST: 1, VALIDATION: 2}
"""The stream of random numbers of each split."""

HELD_OUT_ROWS = 1024


@final
@dataclass(frozen=True)
class TaskSource(Source):
    """Endless rows for training, and 1024 rows each for validation and test, from other random numbers.

    If a task has few possible rows (parity of a few bits), the same row can occur in several splits.
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
        """Vocabulary size of the task."""
        return self.task.vocab_size

    @property
    def length(self) -> int:
        """Tokens of a row of the task."""
        return self.task.length

    @property
    def fingerprint(self) -> str:
        """Digest of the task, its options and the seed."""
        return digest({"kind": "task", "row": self._key, "test_rows": HELD_OUT_ROWS, "version": 1})

    @property
    def tokens_per_epoch(self) -> None:
        """None: training rows never end."""
        return

    def held_out_rows(self, split: str) -> int:
        """A fixed number, enough for an accuracy within one or two percent."""
        return HELD_OUT_ROWS

    def train_row_numbers(self, first: int, count: int) -> np.ndarray:
        """The rows in the order of their numbers."""
        return first + np.arange(count)

    def train_row(self, number: int) -> Row:
        """A row from the random numbers of training."""
        return self.task.row(Draws(self._key, STREAMS[TRAIN], number))

    def held_out_row(self, split: str, number: int) -> Row:
        """A row from the random numbers of that split."""
        return self.task.row(Draws(self._key, STREAMS[split], number))

    @cached_property
    def _key(self) -> str:
        return digest([self.task.notation, dataclasses.asdict(self.task), self.seed])
