"""Induction: random words, the same words again up to one of them: which comes next?

    river lamp stone … boat wolf    river lamp stone …  →  boat

Nothing but the first time tells: the words are in no order a model could know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from maclaurin.evaluation.own_task import Item, OwnTask, Text, draws_for
from maclaurin.evaluation.words import THINGS

ITEMS = 200


@final
@dataclass(frozen=True)
class Induction(OwnTask):
    """A sequence of `period` different words, and so far of it again that each place is asked alike."""

    period: int

    @property
    def name(self) -> str:
        """`maclaurin_induction_64`."""
        return f"maclaurin_induction_{self.period}"

    @property
    def template(self) -> str:
        """The next word must be the likeliest of all."""
        return "induction.yaml"

    @property
    def measures(self) -> str:
        """One line for people."""
        return f"the next word when {self.period} random words return"

    @property
    def chance(self) -> float | None:
        """Any word there is."""
        return 1 / len(THINGS)

    def items(self, text: Text, seed: int) -> Iterator[Item]:
        """No text is needed."""
        for index in range(ITEMS):
            draws = draws_for("induction", seed, index)
            words = [THINGS[i] for i in draws.distinct_below(len(THINGS), self.period)]
            again = 1 + int(draws.below(self.period - 1, 1)[0])
            yield {
                "text": " ".join([*words, *words[:again]]),
                "value": words[again],
                "known_until": len(" ".join(words[: again + 1])),
            }
