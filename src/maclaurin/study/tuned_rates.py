"""tuned.json: learning rates that were chosen earlier, and the runs they were chosen from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from maclaurin.code_version import FREE_KEYS
from maclaurin.plain_data import digest, read_record, write_json
from maclaurin.study.design import Carried, Cell, Experiment, Study, Tune
from maclaurin.study.find import source_name
from maclaurin.study.plan_runs import resolved
from maclaurin.study.run_record import CellTuning, RunRecord, Tuning, without_default_keys

FILE = "tuned.json"
SCHEMA = 1
#: keys that are not part of what a rate is tuned for. The best rate depends on the steps, but a rate is kept
#: for other steps; the page then says at how many it was tuned
NOT_TUNED = (
    *FREE_KEYS,
    "lr",
    "seed",
    "device",
    "steps",
    "warmup",
    "decay_steps",
    "eval_every",
    "eval_rows",
    "largest_loss",
    "test",
)


@final
@dataclass(frozen=True, kw_only=True)
class TunedFile:
    """tuned.json: the rates of a study, and the runs they were chosen from (without their curves).

    Experiments that differ only in their metric have the same searches: the first of them has the cells.
    """

    study: str
    experiments: Mapping[str, Tuning]
    runs: Mapping[str, RunRecord] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write it atomically."""
        write_json(path, dataclasses.replace(self, experiments=self._without_repeats()), SCHEMA, indent=None)

    def add_to(self, path: Path) -> None:
        """Add these entries to the file; cells that were not tuned now keep theirs."""
        before = TunedFile.read(path)
        (self if before is None else before._with(self)).write(path)

    @classmethod
    def read(cls, path: Path) -> TunedFile | None:
        """The file, if there is one."""
        if not path.exists():
            return None
        what = "a file of tuned learning rates"
        return read_record(cls, path, SCHEMA, what, missing=f"{path} is not {what}: it is a folder.")

    def _with(self, fresh: TunedFile) -> TunedFile:
        experiments = dict(self.experiments)
        for name, tuning in fresh.experiments.items():
            old = experiments[name].cells if name in experiments else {}
            experiments[name] = dataclasses.replace(tuning, cells={**old, **tuning.cells})
        keys = {t.key for e in experiments.values() for cell in e.cells.values() for t in cell.trials}
        runs = {key: record for key, record in {**self.runs, **fresh.runs}.items() if key in keys}
        return TunedFile(study=fresh.study, experiments=experiments, runs=runs)

    def _without_repeats(self) -> dict[str, Tuning]:
        """The experiments without cells that an earlier one has."""
        seen: set[tuple[str, CellTuning]] = set()
        kept = {}
        for name, tuning in self.experiments.items():
            cells = {n: cell for n, cell in tuning.cells.items() if (tuning.metric, cell) not in seen}
            seen |= {(tuning.metric, cell) for cell in cells.values()}
            if cells:
                kept[name] = dataclasses.replace(tuning, cells=cells)
        return kept


@final
@dataclass(frozen=True)
class KnownRates:
    """Learning rates that were tuned earlier for the same subject.

    cells     experiment → cell → its tuning
    sources   experiment → the file the rates come from
    data      experiment → digests of the data they were chosen on, for any seed
    missing   experiment → cell → subject, for cells without a rate
    """

    cells: dict[str, dict[str, CellTuning]]
    sources: dict[str, str]
    data: dict[str, set[str]]
    missing: dict[str, dict[str, str]]


def known_rates(study: Study, out: Path, *, retune: bool = False) -> KnownRates:
    """Rates from OUT/tuned.json, then from the tuned.json next to study.py; none with `retune`."""
    wanted = {e.name: (e, e.tune) for e in study.experiments if isinstance(e.tune, Tune)}
    known: dict[str, dict[str, CellTuning]] = {name: {} for name in wanted}
    sources: dict[str, str] = {}
    data: dict[str, set[str]] = {name: set() for name in wanted}
    for file in () if retune else (out / FILE, beside(study)):
        found = TunedFile.read(file) if file is not None else None
        if found is None:
            continue
        for name, (e, tune) in wanted.items():
            tuned = _searched_for(found, tune)
            for cell in e.cells:
                old = tuned.get(subject(e, cell))
                if cell.name not in known[name] and old is not None:
                    known[name][cell.name] = old
                    sources.setdefault(name, source_name(file))
                    data[name] |= data_of(old, found.runs)
    missing = {
        name: {cell.name: subject(e, cell) for cell in e.cells if cell.name not in known[name]}
        for name, (e, _) in wanted.items()
    }
    return KnownRates(known, sources, data, {name: cells for name, cells in missing.items() if cells})


def subject(experiment: Experiment, cell: Cell) -> str:
    """What a rate is tuned for: the config without rate, seed and length of training."""
    config = without_default_keys(resolved(experiment.settings(cell)).to_dict())
    return digest({name: value for name, value in config.items() if name not in NOT_TUNED})[:32]


def known_tests(study: Study, out: Path) -> dict[str, CellTuning]:
    """Subject → the test of a carried rate, from OUT/tuned.json or the tuned.json next to study.py."""
    files = [TunedFile.read(file) for file in (beside(study), out / FILE) if file is not None]
    return {
        cell.subject: cell
        for file in files
        for tuning in (file.experiments.values() if file is not None else ())
        if tuning.rule
        for cell in tuning.cells.values()
    }


def missing_tests(study: Study, out: Path) -> dict[str, dict[str, str]]:
    """Experiment → cell → subject, for cells with a carried rate whose test is unknown."""
    known = known_tests(study, out)
    missing = {
        e.name: {cell.name: found for cell in e.cells if (found := subject(e, cell)) not in known}
        for e in study.experiments
        if isinstance(e.tune, Carried) and e.tune.tests
    }
    return {name: cells for name, cells in missing.items() if cells}


def beside(study: Study) -> Path | None:
    """The tuned.json next to study.py."""
    return None if study.file is None else study.file.parent / FILE


def data_of(tuning: CellTuning, runs: Mapping[str, RunRecord]) -> set[str]:
    """Digests of the data of its trials, for any seed, where known."""
    known = (runs[trial.key].content for trial in tuning.trials if trial.key in runs)
    return {content for content in known if content}


def _searched_for(file: TunedFile, tune: Tune) -> dict[str, CellTuning]:
    """Subject → searches of the file that chose what `tune` chooses, by the same metric.

    The experiment may be another: two that differ only in their metric have the same runs.
    """
    return {
        cell.subject: cell
        for tuning in file.experiments.values()
        if tuning.metric == tune.metric and not tuning.rule
        for cell in tuning.cells.values()
        if (cell.factor is not None) == bool(tune.factors)
    }
