"""State tracking: the running product in a group (Liu et al. 2023; Merrill et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import final

import numpy as np

from maclaurin.data.batch import Row
from maclaurin.data.tasks.draws import Draws
from maclaurin.data.tasks.groups import multiplication_table
from maclaurin.data.tasks.task import Task


@final
@dataclass(frozen=True)
class StateTracking(Task):
    """g₁ g₂ … g_T → g₁, g₂∘g₁, …, g_T∘…∘g₁: every place is asked. Z2 is parity; S5 cannot be unrolled."""

    notation = "state"

    group: str = "S3"

    def __post_init__(self) -> None:
        self._need_length(1, "a row holds at least one element")
        multiplication_table(self.group)

    @property
    def vocab_size(self) -> int:
        """The elements of the group."""
        return len(multiplication_table(self.group))

    def row(self, draws: Draws) -> Row:
        """Random elements and their running product."""
        table = multiplication_table(self.group)
        elements = draws.below(len(table), self.length)
        states = accumulate(elements.tolist(), lambda state, element: int(table[state, element]))
        return Row(elements, np.fromiter(states, dtype=np.int64, count=self.length))
