"""What a synthetic task must say: its vocabulary, and a row from random numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from maclaurin.data.batch import Row
from maclaurin.data.errors import DataError
from maclaurin.data.tasks.draws import Draws


@dataclass(frozen=True)
class Task(ABC):
    """A frozen dataclass whose fields are the task's options; targets stand where an answer is due."""

    notation: ClassVar[str]

    length: int = 256

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens and answers are below this."""

    @abstractmethod
    def row(self, draws: Draws) -> Row:
        """One row, a function of the draws alone."""

    def _need(self, fulfilled: bool, problem: str) -> None:
        if not fulfilled:
            raise DataError(f"{self.notation}: {problem}")

    def _need_length(self, least: int, because: str) -> None:
        self._need(
            self.length >= least, f"length={self.length} is too short: {because}. Use length={least} or more."
        )
