"""A study: a question, a grid over parts of attention, seeds, and claims to test.

    maclaurin.study.run("mini")            # or a Study of your own

Defining a study needs no torch; `run` imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maclaurin.study.claims import Alike, Behind, Claim, Ordered, Published
from maclaurin.study.design import Carried, Cell, Experiment, Study, Tasks, Tune, cells_of, grid
from maclaurin.study.metrics import Metric
from maclaurin.study.shapley import Combination, Waterfall, waterfall

if TYPE_CHECKING:
    from maclaurin.study.runner import run

__all__ = [
    "Alike",
    "Behind",
    "Carried",
    "Cell",
    "Claim",
    "Combination",
    "Experiment",
    "Metric",
    "Ordered",
    "Published",
    "Study",
    "Tasks",
    "Tune",
    "Waterfall",
    "cells_of",
    "grid",
    "run",
    "waterfall",
]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from maclaurin.study.runner import run

    return run
