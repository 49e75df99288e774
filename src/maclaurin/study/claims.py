"""Claims about the results of a study, as data; the report tests them on the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from maclaurin.errors import InputError
from maclaurin.wording import did_you_mean, listed_names

#: unit → (its metric, how to convert a value to that metric)
UNITS: dict[str, tuple[str, Callable[[float], float]]] = {
    "nats": ("loss", lambda value: value),
    "ln CE": ("loss", math.exp),
    "bits": ("loss", lambda value: value * math.log(2)),
    "perplexity": ("loss", math.log),
    "accuracy": ("accuracy", lambda value: value),
    "percent": ("accuracy", lambda value: value / 100),
}


@final
@dataclass(frozen=True, kw_only=True)
class Published:
    """Published numbers, in their unit.

    where    the place and the setting: "300M on the Pile, 90k steps"
    unit     one of UNITS; "ln CE" is the logarithm of the cross-entropy
    values   cell → number
    """

    where: str
    unit: str
    values: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            near = did_you_mean(self.unit, UNITS)
            raise InputError(f"unit={self.unit!r} is unknown; units are {', '.join(UNITS)}.{near}")

    @property
    def metric(self) -> str:
        """The metric of these numbers."""
        return UNITS[self.unit][0]

    @property
    def converted(self) -> dict[str, float]:
        """Cell → the number in our unit: nats per token, or accuracy between 0 and 1."""
        _, convert = UNITS[self.unit]
        return {cell: convert(value) for cell, value in self.values.items()}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence about cells of one experiment.

    says         the claim
    experiment   the experiment whose runs decide
    cells        which of its cells; their meaning depends on the kind of claim
    source       citation of the claim; empty for your own claim
    published    published numbers for it
    note         other published findings, in words
    """

    kind: ClassVar[str]

    says: str
    experiment: str
    cells: tuple[str, ...]
    source: str = ""
    published: tuple[Published, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.cells, str) or len(self.cells) < 2:
            raise InputError(
                f"the claim {self.says!r} needs at least two cells to compare, got cells={self.cells!r}."
            )
        if len(set(self.cells)) < len(self.cells):
            raise InputError(f"the claim {self.says!r} names a cell twice: {listed_names(self.cells)}.")


@final
@dataclass(frozen=True, kw_only=True)
class Alike(Claim):
    """Every cell differs from the first by less than `within`, up or down.

    within    the margin, in the unit of the experiment's metric
    because   why a difference of that size does not matter
    """

    kind = "alike"
    within: float
    because: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.within) and self.within > 0):
            raise InputError(
                f"within={self.within!r}: no finite number of runs can show that two cells differ by at most "
                "this. Give the largest difference that does not matter, such as 0.05."
            )
        if not self.because.strip():
            raise InputError(f"the margin {self.within:g} of {self.says!r} needs a reason: because='…'.")


@final
@dataclass(frozen=True, kw_only=True)
class Behind(Claim):
    """Every other cell is worse than the first."""

    kind = "behind"


@final
@dataclass(frozen=True, kw_only=True)
class Ordered(Claim):
    """Each cell is better than the one before it."""

    kind = "ordered"


AnyClaim = Alike | Behind | Ordered
