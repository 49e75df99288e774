"""Perplexity: how likely is text of the standard library that no run of ours trained on?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from maclaurin.evaluation.own_task import Item, OwnTask, Text, draws_for

MOST_ITEMS = 32
CHARACTERS = 4000


@final
@dataclass(frozen=True)
class Perplexity(OwnTask):
    """Stretches of whole lines, in random order so that a few are already a sample of all."""

    @property
    def name(self) -> str:
        """`maclaurin_perplexity`."""
        return "maclaurin_perplexity"

    @property
    def template(self) -> str:
        """Every token counts."""
        return "perplexity.yaml"

    @property
    def measures(self) -> str:
        """One line for people."""
        return "source text of the standard library that runs of ours test on"

    @property
    def chance(self) -> float | None:
        """No choice, no chance."""
        return None

    def items(self, text: Text, seed: int) -> Iterator[Item]:
        """Every stretch of every file, of which a seed chooses some."""
        stretches = [stretch for source in text.held_out for stretch in _stretches(source)]
        order = draws_for("perplexity", seed, 0).distinct_below(len(stretches), MOST_ITEMS)
        for index in order:
            yield {"text": stretches[index]}


def _stretches(source: str) -> Iterator[str]:
    """Whole lines of at least CHARACTERS; the rest of a file that is less than half of it is left out."""
    lines: list[str] = []
    length = 0
    for line in source.splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= CHARACTERS:
            yield "".join(lines)
            lines, length = [], 0
    if length >= CHARACTERS / 2:
        yield "".join(lines)
