"""The tasks of our own, by name, and the groups they come in."""

from __future__ import annotations

from maclaurin.evaluation.cloze import Cloze
from maclaurin.evaluation.induction import Induction
from maclaurin.evaluation.own_task import OwnTask
from maclaurin.evaluation.perplexity import Perplexity
from maclaurin.evaluation.recall import Recall

#: changes whenever an item of any task does
VERSION = 1.0

DISTANCES = (64, 256, 1024)
PERIODS = (16, 64, 192)

OWN_TASKS: dict[str, OwnTask] = {
    task.name: task
    for task in (
        *(Recall(distance) for distance in DISTANCES),
        *(Recall(distance, exact=True) for distance in DISTANCES),
        *(Induction(period) for period in PERIODS),
        Cloze(),
        Perplexity(),
    )
}

OWN_GROUPS: dict[str, str] = {
    "maclaurin": "all of these",
    "maclaurin_recall": "recall by choice, all distances",
    "maclaurin_recall_exact": "recall by writing, all distances",
    "maclaurin_induction": "induction, all periods",
}


def is_own(name: str) -> bool:
    """Whether a name needs nothing but this package."""
    return name in OWN_TASKS or name in OWN_GROUPS
