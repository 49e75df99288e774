"""What should be seen, as data: the report holds the runs against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence about cells of one experiment.

    says    the claim
    source  who claims it, with the place
    paper   the numbers or the ordering published there, as read off
    """

    kind: ClassVar[str]

    says: str
    source: str
    paper: str
    experiment: str
    cells: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.__dataclass_fields__}}


@final
@dataclass(frozen=True, kw_only=True)
class Tied(Claim):
    """All cells perform alike: each differs from the first by less than `within`."""

    kind = "tied"
    within: float


@final
@dataclass(frozen=True, kw_only=True)
class Behind(Claim):
    """Every cell but the first performs worse than the first."""

    kind = "behind"


@final
@dataclass(frozen=True, kw_only=True)
class Ordered(Claim):
    """Each cell performs better than the one before it, or like it."""

    kind = "ordered"


KINDS: dict[str, type[Claim]] = {kind.kind: kind for kind in (Tied, Behind, Ordered)}


def claim_from_json(data: dict[str, Any]) -> Claim:
    """The claim `to_json` wrote."""
    values = dict(data)
    kind = KINDS[values.pop("kind")]
    return kind(**{**values, "cells": tuple(values["cells"])})
