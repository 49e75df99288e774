"""A study as a list of runs, each with its whole config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from maclaurin.errors import InputError
from maclaurin.models.sizes import size_named
from maclaurin.study.attention_facts import AttentionFacts, attention_facts
from maclaurin.study.budget import scaled
from maclaurin.study.canonical import canonical
from maclaurin.study.design import Cell, Study
from maclaurin.training.config import TrainConfig, config_from


@final
@dataclass(frozen=True)
class PlannedRun:
    """One cell with one seed."""

    experiment: str
    cell: Cell
    seed: int
    config: TrainConfig
    facts: AttentionFacts


def plan_runs(study: Study, scale: float = 1.0, device: str | None = None) -> list[PlannedRun]:
    """Every run in the order it is started; a config that cannot be is an error here, before any begins."""
    runs = []
    for experiment in study.experiments:
        for cell, seed, keys in experiment.points():
            place = f"study {study.name!r}, experiment {experiment.name!r}, cell {cell.name!r}"
            try:
                config = scaled(config_from(keys), scale)
                wanted = device_of(device or config.device)
                config = canonical(config, size_named(config.size).length, wanted)
                facts = attention_facts(config)
            except ValueError as problem:
                raise InputError(f"{place}: {problem}") from None
            runs.append(PlannedRun(experiment.name, cell, seed, config, facts))
    return runs


def device_of(wanted: str) -> str:
    """cpu or cuda."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
