"""`--only SPEC…`: the study with some of its cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from maclaurin.errors import InputError, did_you_mean
from maclaurin.study.canonical import canonical_attention
from maclaurin.study.design import Cell, Experiment, Study


def select(study: Study, only: Sequence[str]) -> Study:
    """The cells called or written so, with the baselines they are compared with, and claims about them."""
    if not only:
        return study
    _refuse_unmatched(study, only)
    experiments = tuple(kept for e in study.experiments if (kept := _reduced(e, only)) is not None)
    left = {e.name: {cell.name for cell in e.cells} for e in experiments}
    claims = tuple(c for c in study.claims if set(c.cells) <= left.get(c.experiment, set()))
    return dataclasses.replace(study, experiments=experiments, claims=claims)


def _reduced(experiment: Experiment, only: Sequence[str]) -> Experiment | None:
    wanted = {cell.name for cell in experiment.cells if any(_matches(cell, experiment, w) for w in only)}
    if not wanted:
        return None
    cells = tuple(cell for cell in experiment.cells if cell.name in wanted | {experiment.baseline})
    return dataclasses.replace(experiment, cells=cells)


def _matches(cell: Cell, experiment: Experiment, wanted: str) -> bool:
    written = _attention(cell, experiment)
    return (
        wanted == cell.name
        or wanted in written
        or canonical_attention(wanted, strict=False) in {canonical_attention(text) for text in written}
    )


def _attention(cell: Cell, experiment: Experiment) -> tuple[str, ...]:
    found = {**experiment.common, **cell.settings}.get("attention", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _refuse_unmatched(study: Study, only: Sequence[str]) -> None:
    pairs = [(cell, e) for e in study.experiments for cell in e.cells]
    for wanted in only:
        if not any(_matches(cell, e, wanted) for cell, e in pairs):
            names = dict.fromkeys(cell.name for cell, _ in pairs)
            known = [*names, *dict.fromkeys(text for cell, e in pairs for text in _attention(cell, e))]
            raise InputError(
                f"--only {wanted}: study {study.name!r} has no such cell; it has {', '.join(names)}."
                f"{did_you_mean(wanted, known)}"
            )
