"""The learning rates of a study: known from earlier, searched now, or carried from other sizes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from maclaurin.errors import InputError
from maclaurin.study.carried_rates import carried_rates
from maclaurin.study.design import Carried, Experiment, Study, Tune
from maclaurin.study.run_record import CellTuning, Tuning
from maclaurin.study.tune import MakeRun, Train, tune_study
from maclaurin.study.tuned_rates import FILE, KnownRates, beside, data_of, known_rates


def learning_rates(
    study: Study, out: Path, make_run: MakeRun, train: Train, *, retune: bool = False
) -> tuple[Study, dict[str, Tuning]]:
    """The study with a learning rate in every cell, and where each rate comes from.

    Cells without a rate are tuned now. With `retune` all cells are, and rates are stored next to study.py.
    """
    if retune and all(e.tune is None for e in study.experiments):
        raise InputError(f"study {study.name!r} has no experiment with tune=…: there is nothing to tune.")
    file = _file_to_write(study, out, retune=retune)
    tunings = _searched(study, known_rates(study, out, retune=retune), file, make_run, train)
    tunings |= carried_rates(study, out, tunings, file, make_run, train, retune=retune)
    experiments = tuple(
        e
        if e.tune is None
        else e.with_chosen({name: c.settings for name, c in tunings[e.name].cells.items()})
        for e in study.experiments
    )
    return dataclasses.replace(study, experiments=experiments), tunings


def provisional(study: Study, known: Mapping[str, Mapping[str, CellTuning]]) -> Study:
    """The study with every cell at its known rate, else at the first of its grid, to plan it."""
    settings: dict[str, dict[str, dict[str, float]]] = {}
    for e in sorted(study.experiments, key=lambda e: isinstance(e.tune, Carried)):  # those come last
        if isinstance(e.tune, Carried):
            settings[e.name] = {cell.name: settings[e.tune.tuned[-1]][cell.name] for cell in e.cells}
        elif e.tune is not None:
            found, first = known.get(e.name, {}), {"lr": e.tune.rates[0]}
            settings[e.name] = {c.name: found[c.name].settings if c.name in found else first for c in e.cells}
    experiments = tuple(e if e.tune is None else e.with_chosen(settings[e.name]) for e in study.experiments)
    return dataclasses.replace(study, experiments=experiments)


def metric_of(study: Study, experiment: Experiment) -> str:
    """The metric that its tuning runs are compared by."""
    if isinstance(experiment.tune, Carried):
        origin = next(e for e in study.experiments if e.name == experiment.tune.tuned[-1])
        return metric_of(study, origin)
    return experiment.tune.metric if experiment.tune is not None else experiment.measure.name


def _file_to_write(study: Study, out: Path, *, retune: bool) -> Path:
    place = beside(study)
    return place if retune and place is not None and os.access(place.parent, os.W_OK) else out / FILE


def _searched(
    study: Study, rates: KnownRates, file: Path, make_run: MakeRun, train: Train
) -> dict[str, Tuning]:
    """Tunings of the experiments that search; cells without a rate are searched now."""
    known, sources = rates.cells, rates.sources
    if rates.missing:
        fresh = tune_study(study, rates.missing, make_run, train)
        fresh.add_to(file)
        for name, tuning in fresh.experiments.items():
            known[name] |= tuning.cells
            for cell in tuning.cells.values():
                rates.data[name] |= data_of(cell, fresh.runs)
            sources[name] = f"{sources[name]} and this study" if name in sources else "this study"
    return {
        e.name: Tuning(
            metric=e.tune.metric,
            source=sources[e.name],
            cells=known[e.name],
            data=tuple(sorted(rates.data[e.name])),
        )
        for e in study.experiments
        if isinstance(e.tune, Tune)
    }
