"""What a task of our own is: items that follow from a seed and a text alone, no tokenizer, no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from maclaurin.data.random_draws import Draws

Item = dict[str, Any]


class Text(NamedTuple):
    """What tasks are made of.

    prose      docstrings, one line per paragraph
    held_out   whole files that no run of ours with the usual test_fraction trains on
    """

    prose: Sequence[str]
    held_out: Sequence[str]


@dataclass(frozen=True)
class OwnTask(ABC):
    """name       as the harness knows it
    template   file in tasks/ that tells the harness how to ask
    measures   in one line
    chance     accuracy of guessing; None where there is none
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """`maclaurin_…`."""

    @property
    @abstractmethod
    def template(self) -> str:
        """Name of the file in tasks/."""

    @property
    @abstractmethod
    def measures(self) -> str:
        """One line for people."""

    @property
    @abstractmethod
    def chance(self) -> float | None:
        """What a model scores that has not seen what is asked for."""

    @abstractmethod
    def items(self, text: Text, seed: int) -> Iterator[Item]:
        """The same ones for the same text and seed, on every machine."""


def draws_for(task: str, seed: int, index: int) -> Draws:
    """Random numbers of one item."""
    return Draws(f"evaluation {task} {seed}", 1, index)
