"""One run: what to train (Run), its result (RunRecord), and a study as labels on such records.

A report reads only records.json. Curves are thinned, so a study of a hundred runs stays below a few
megabytes. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from maclaurin.code_version import FREE_KEYS
from maclaurin.plain_data import digest, read_or_none, read_record, significant, write_json
from maclaurin.study.claims import AnyClaim
from maclaurin.study.shapley import Waterfall

SCHEMA = 2
FILE = "records.json"

Status = Literal["waiting", "running", "stopped", "finished", "diverged", "crashed"]
#: statuses that are results: such a run is not trained again unless --retry is given
SETTLED: tuple[Status, ...] = ("finished", "diverged", "crashed")

MOST_POINTS = 200
MOST_POSITIONS = 64
#: significant digits of points of a curve, more than any figure shows
DIGITS = 6


class Label(NamedTuple):
    """The name of a run in a study."""

    experiment: str
    cell: str
    seed: int

    def __str__(self) -> str:
        return f"{self.experiment} · {self.cell} · seed {self.seed}"


@final
@dataclass(frozen=True, kw_only=True)
class TaskItems:
    """Items of an offline task for the trained model.

    items         largest number of items
    fingerprint   digest of the items, so it depends on their number, the seed and the code that makes them
    """

    name: str
    items: int
    seed: int
    fingerprint: str


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """What to train: everything that can change a number, and nothing else.

    config     every key of the training config, resolved
    data       fingerprint of the data
    torch      major and minor version
    numerics   NUMERICS_VERSION of the code
    parts      digest of the source of parts that are not maclaurin's own; None if there are none
    tasks      tasks for the trained model; part of the key if there are any
    """

    config: Mapping[str, Any]
    data: str
    torch: str
    numerics: int
    parts: str | None = None
    tasks: tuple[TaskItems, ...] = ()

    @functools.cached_property
    def key(self) -> str:
        """The name of the run; runs with the same numbers have the same key."""
        decisive = {
            name: value for name, value in without_default_keys(self.config).items() if name not in FREE_KEYS
        }
        rest = {"data": self.data, "torch": self.torch, "numerics": self.numerics, "parts": self.parts}
        if self.tasks:
            rest["tasks"] = sorted([task.name, task.fingerprint] for task in self.tasks)
        return digest({"config": decisive, **rest})[:32]

    @property
    def attention(self) -> tuple[str, ...]:
        """Notations, one for all layers or one for each."""
        return tuple(self.config["attention"])

    @property
    def seed(self) -> int:
        """Seed of initialisation and data order."""
        return self.config["seed"]

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.config["steps"]

    @property
    def tokens(self) -> int:
        """Number of training tokens."""
        return self.config["steps"] * self.config["batch_size"] * self.config["length"]


@final
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run and its result.

    status             finished, diverged and crashed are results; waiting, running and stopped are not yet
    step               steps taken
    order              highest power of the score in the kernel; None if it has all powers (exp)
    state_bytes        size of the recurrent state of all layers in fp32; None if it grows with the text
    memory_bytes       what a decoder keeps after a row of the trained length, in fp32: the state, or keys and
                       values where it grows; None in records of earlier versions
    metrics            every number recorded at the end, by name (metrics.METRICS); loss is the test loss
    curves             name → (step, value): train_loss, and every number recorded at evaluations
    loss_by_position   (first position, mean loss) of ranges of positions; None where nothing is scored
    seconds            duration of the whole run with evaluation, without tasks
    provenance         data name, digest of the data for any seed (content), commit, machine, versions, date,
                       how many runs shared the machine
    """

    run: Run
    status: Status
    message: str | None = None
    step: int = 0
    order: int | None = None
    state_bytes: int | None = None
    memory_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    loss_by_position: tuple[tuple[int, float | None], ...] = ()
    seconds: float | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of the run in the pool."""
        return self.run.key

    @property
    def content(self) -> str:
        """Digest of the data for any seed; empty in records of earlier versions."""
        return self.provenance.get("content", "")

    def of_data(self, fingerprint: str, facts: Mapping[str, Any]) -> RunRecord:
        """The record with the fingerprint of its data, which completes its key, and facts about the data."""
        run = dataclasses.replace(self.run, data=fingerprint)
        return dataclasses.replace(self, run=run, provenance={**self.provenance, **facts})

    def value(self, metric: str) -> float | None:
        """The metric of this name; None if the run did not record it."""
        own = {
            "seconds": self.seconds,
            "state_bytes": self.state_bytes,
            "memory_bytes": self.memory_bytes,
        }
        found = self.metrics.get(metric, own.get(metric))
        return None if found is None else float(found)


#: the runs of a study by their labels; two labels may have the same run
Plan = Mapping[Label, RunRecord]
#: from the results so far, by key, to further runs; empty while there are none
NextRuns = Callable[[Mapping[str, RunRecord]], Plan]


@final
@dataclass(frozen=True, kw_only=True)
class Trial:
    """One tuning run: the rate, the seed, and the value it was judged by; None if it diverged.

    factor   of the rate for the output projections of attention
    tokens   training tokens, which say how many steps it took: tokens per step are those of the final runs
    """

    rate: float
    seed: int
    value: float | None
    status: Status
    key: str
    seconds: float | None = None
    tokens: int | None = None
    factor: float = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class CellTuning:
    """How the learning rate of a cell was chosen.

    rate      the chosen rate
    factor    the chosen factor of the rate for the output projections; None if only the rate was chosen
    on_edge   whether rate or factor is the largest or smallest tried, because the limit was reached
    subject   digest of what was tuned: config without rate and seed, data, versions
    diverged  larger rates of a rule at which a final run diverged, so that the rate was halved
    """

    rate: float
    trials: tuple[Trial, ...]
    subject: str
    on_edge: bool = False
    factor: float | None = None
    diverged: tuple[float, ...] = ()

    @property
    def settings(self) -> dict[str, float]:
        """Keys of the config that were chosen."""
        return {"lr": self.rate} | ({} if self.factor is None else {"output_lr": self.factor})


@final
@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The learning rates of an experiment.

    metric   the metric they were chosen by
    source   where they come from: a file, or this study
    cells    cell → how its rate was chosen
    rule     the rule that gave all rates, in words; the trials of a cell, if any, then only test it
    data     digests of the data they were chosen on, for any seed, if known
    """

    metric: str
    source: str
    cells: Mapping[str, CellTuning]
    rule: str = ""
    data: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Speed:
    """Training speed of a config, measured alone on a machine (study/timing.py).

    subject   digest of what it depends on: the config without seed, rate and steps, and versions
    """

    tokens_per_second: float
    subject: str
    machine: Mapping[str, Any]
    commit: str | None
    date: str


@final
@dataclass(frozen=True, kw_only=True)
class CellRecord:
    """A cell, the key of its run with each seed, and its speed if it was measured."""

    name: str
    runs: Mapping[int, str]
    levels: Mapping[str, str] = field(default_factory=dict)
    speed: Speed | None = None


@final
@dataclass(frozen=True, kw_only=True)
class ExperimentRecord:
    """What a report needs to know about an experiment; see design.Experiment."""

    name: str
    title: str
    metric: str
    metric_title: str
    higher_is_better: bool
    scale: str
    baseline: str
    seeds: tuple[int, ...]
    cells: tuple[CellRecord, ...]
    added_seeds: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    equal: str = "steps"
    tuning: Tuning | None = None
    waterfalls: tuple[Waterfall, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class FormsRecord:
    """How well the forms agree and how the series converges to softmax, as measured by `maclaurin check`.

    agreement   {"spec", "form", "error"}: largest relative difference to the parallel form, float64
    series      {"order", "error"}: relative error of taylor(order)/sum against softmax, same inputs
    """

    agreement: tuple[Mapping[str, Any], ...]
    series: tuple[Mapping[str, Any], ...]


@final
@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A whole study in its present state, finished or not.

    source   the file that defines it, by its recorded name
    scale    factor on the steps in its file
    runs     key → record; two cells with the same run share one
    ladder   names of experiments with the same cells at several sizes, the smallest first
    """

    name: str
    title: str
    question: str
    budget: str
    source: str
    scale: float
    experiments: tuple[ExperimentRecord, ...]
    claims: tuple[AnyClaim, ...]
    runs: Mapping[str, RunRecord]
    forms: FormsRecord | None = None
    ladder: tuple[str, ...] = ()

    def labelled(self) -> Iterator[tuple[Label, RunRecord]]:
        """Every recorded run, under each label the study has for it."""
        for experiment in self.experiments:
            for cell in experiment.cells:
                for seed, key in cell.runs.items():
                    if key in self.runs:
                        yield Label(experiment.name, cell.name, seed), self.runs[key]

    @property
    def keys(self) -> set[str]:
        """The keys of all its runs, those that chose learning rates too."""
        runs = {key for e in self.experiments for cell in e.cells for key in cell.runs.values()}
        tunings = [e.tuning for e in self.experiments if e.tuning is not None]
        return runs | {t.key for tuning in tunings for cell in tuning.cells.values() for t in cell.trials}

    def having(self, *statuses: Status) -> list[tuple[Label, RunRecord]]:
        """The runs with one of these statuses, each once: experiments may share runs."""
        first = {record.run.key: (label, record) for label, record in reversed(list(self.labelled()))}
        return [pair for pair in reversed(first.values()) if pair[1].status in statuses]


#: keys added to the training config later, and the values under which a run is unchanged
LATER_KEYS: dict[str, Any] = {
    "equal_start": False,
    "test": True,
    "output_lr": 1.0,
    "mix": 0.0,
    "reach": None,
    "answer_weight": 0.1,
}


def without_default_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without later keys that change nothing, so that runs keep their earlier keys."""
    return {
        name: value for name, value in config.items() if name not in LATER_KEYS or value != LATER_KEYS[name]
    }


def error_line(message: str | None) -> str:
    """The most useful line of the message of a failed run.

    That is our own error if there is one, else how its process ended, with the last line of its log.
    """
    lines = [line.strip() for line in (message or "").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    if errors:
        return errors[-1].removeprefix("error:").strip()
    if len(lines) > 1 and lines[0].startswith("the process"):
        return f"{lines[0]}: {lines[-1]}"
    return lines[0] if lines else ""


# ------------------------------------------------------------------------------------------ files


def write_study(record: StudyRecord, path: Path) -> None:
    """Write records.json atomically."""
    write_json(path, record, SCHEMA, indent=None)


def read_study(path: Path) -> StudyRecord:
    """The study in a file, or in the records.json of a folder."""
    file = path / FILE if path.is_dir() else path
    return read_record(
        StudyRecord,
        file,
        SCHEMA,
        "the records.json of a study",
        missing=(
            f"{path} holds no records of a study: run one with 'maclaurin study mini --out {path}', or give "
            "the folder of one."
        ),
    )


def write_run(record: RunRecord, path: Path) -> None:
    """Write the record of one run atomically."""
    write_json(path, record, indent=None)


def read_run(path: Path) -> RunRecord | None:
    """The record of one run; None if it is missing or cannot be read: the run is repeated."""
    return read_or_none(RunRecord, path)


# ----------------------------------------------------------------------------------------- curves


def thinned(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> tuple[tuple[int, float], ...]:
    """At most `most` points: the mean of each part of the curve, at its last step; finite values only."""
    kept = [point for point in points if math.isfinite(point[1])]
    return tuple((part[-1][0], _mean([y for _, y in part])) for part in _parts(kept, most))


def by_position(losses: Sequence[float | None]) -> tuple[tuple[int, float | None], ...]:
    """Loss by position, in at most 64 ranges named by their first position; None where nothing is scored."""
    found = []
    for part in _parts(list(enumerate(losses)), MOST_POSITIONS):
        scored = [y for _, y in part if y is not None and math.isfinite(y)]
        found.append((part[0][0], _mean(scored) if scored else None))
    return tuple(found)


def _parts(points: list[Any], most: int) -> list[list[Any]]:
    """Consecutive parts whose lengths differ by at most one point."""
    count = min(most, len(points))
    ends = [len(points) * (i + 1) // count for i in range(count)]
    return [points[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _mean(values: Sequence[float]) -> float:
    return significant(sum(values) / len(values), DIGITS)
