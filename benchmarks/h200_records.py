"""Convert lines of `h200_runs.py` to the records of a study, so that `maclaurin report` can make its page.

    python benchmarks/h200_records.py studies/parts_h200 benchmarks/results/h200/*.jsonl

The study's cells are matched by attention, size and steps. A cell's learning rate is the one with the
smallest validation loss of the tuning runs. At a size where nothing was tuned it is the one that the rule of
the ladder gives (h200_runs.ladder), and the record says so; so it is at 5M until every cell has final runs at
its own best rate. A cell's results are the runs of the plan's last phase at that rate.

An experiment with tune=Tune(…, factors=…) has the runs at the tuned factor of the rate for the output
projections (h200_runs.py --factors); every other has those at one rate for all weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h200_runs import (
    FINAL_SEEDS,
    LADDER,
    SEARCHES,
    Record,
    _register_sizes,
    best_at_5m,
    carried,
    read_records,
    rule_exponent,
    tuned_factor,
    tuned_rate,
)

from maclaurin.code_version import NUMERICS_VERSION
from maclaurin.study.cost import attention_facts
from maclaurin.study.design import Cell, Experiment, Study, Tune
from maclaurin.study.find import read_study_file
from maclaurin.study.run_record import (
    FILE,
    CellTuning,
    Label,
    Run,
    RunRecord,
    StudyRecord,
    Trial,
    Tuning,
    write_study,
)
from maclaurin.study.runner import study_record
from maclaurin.training.config import config_from

#: of the provenance of a line, what says where it was made
MACHINE = ("python", "platform", "threads", "gpu")


#: spec → factor of the rate for its output projections; empty: one rate for all weights
Factors = Mapping[str, float]


@dataclass(frozen=True)
class Rule:
    """Learning rates at one size, carried from mini by the exponent that suits most specs at 5m."""

    rates: Mapping[str, float]
    exponent: int
    factor: float
    with_factors: bool = False

    def __str__(self) -> str:
        times = {2.0: "twice", 0.5: "half"}.get(self.factor, f"{self.factor:g} times")
        return (
            f"{times} the rate tuned at 17M parameters (rate ∝ width^−{self.exponent}, in factors of two; "
            "the exponent is the one that suits most cells at 5M parameters)"
            f"{'; the factors of the output projections are those of 17M' if self.with_factors else ''}"
        )


def rule_at(lines: Sequence[Record], size: str, factors: Factors) -> Rule | None:
    """The rule at a size; None at mini, where rates are tuned, and while tuning is unfinished."""
    settings = {"output_lr": factors}
    best = {spec: rate for spec in LADDER if (rate := tuned_rate(lines, spec, settings)) is not None}
    exponent = rule_exponent(lines, best, settings)
    if size == "mini" or len(best) < len(LADDER) or exponent is None:
        return None
    if size == "5m" and _is_tuned_at_5m(lines, best, factors):
        return None
    times = carried({"": 1.0}, size, exponent)[""]
    return Rule(carried(best, size, exponent), exponent, times, bool(factors))


def _is_tuned_at_5m(lines: Sequence[Record], best: Mapping[str, float], factors: Factors) -> bool:
    """Whether every spec has its final runs at the best of the rates tried at 5m."""
    own = {spec: best_at_5m(lines, spec, rate, {"output_lr": factors}) for spec, rate in best.items()}
    finals = {
        (line["attention"], line["lr"], line["seed"])
        for line in lines
        if line["size"] == "5m" and factor_of(line) == factors.get(line["attention"], 1.0)
    }
    return all((spec, rate, seed) in finals for spec, rate in own.items() for seed in FINAL_SEEDS)


def factor_of(line: Record) -> float:
    """The factor of the rate for the output projections in this run."""
    return line["run"].get("output_lr", 1.0)


def factors_for(experiment: Experiment, lines: Sequence[Record]) -> Factors | None:
    """Spec → tuned factor, without specs that are still searched; None if the experiment tunes no factor."""
    if not isinstance(experiment.tune, Tune) or not experiment.tune.factors:
        return None
    specs = [experiment.settings(cell)["attention"][0] for cell in experiment.cells]
    return {spec: found for spec in specs if (found := tuned_factor(lines, spec, {})) is not None}


def records_of(study: Study, lines: Iterable[Record]) -> StudyRecord:
    """The study with the runs of these lines."""
    lines = list(lines)
    plan: dict[Label, RunRecord] = {}
    tunings: dict[str, Tuning] = {}
    for experiment in study.experiments:
        tuned: dict[str, CellTuning] = {}
        factors = factors_for(experiment, lines)
        rule = rule_at(lines, experiment.common.get("size", ""), factors or {})
        for cell in experiment.cells:
            (spec,) = experiment.settings(cell)["attention"]
            factor = None if factors is None else factors.get(spec)
            if factors is not None and factor is None:
                continue  # its search is not finished
            every = [line for line in lines if _belongs(line, experiment, cell)]
            own = [line for line in every if factor_of(line) == (factor or 1.0)]
            tried = [line for line in (every if factors else own) if line["phase"] in SEARCHES]
            search = (
                _search(tried, factor)
                if rule is None
                else _by_rule(rule, experiment.settings(cell), tried, factor)
            )
            if search is not None:
                tuned[cell.name] = search
            for line in own:
                at_rate = search is None or line["lr"] == search.rate
                if line["phase"] not in SEARCHES and line["seed"] in experiment.seeds and at_rate:
                    plan[Label(experiment.name, cell.name, line["seed"])] = run_record(line)
        if tuned:
            words = "" if rule is None else str(rule)
            data = {line["data"]["fingerprint"] for line in lines if line["phase"] in SEARCHES}
            tunings[experiment.name] = Tuning(
                metric="validation_loss",
                source="this study",
                cells=tuned,
                rule=words,
                data=tuple(sorted(data)),
            )
    runs = {record.key: record for record in plan.values()}
    return study_record(study, plan, runs, scale=1.0, added={}, tunings=tunings, forms=None)


def _belongs(line: Record, experiment: Experiment, cell: Cell) -> bool:
    wanted = experiment.settings(cell)
    (attention,) = wanted["attention"]
    run = line["run"]
    same = all(run[key] == wanted[key] for key in ("size", "steps", "batch_size") if key in wanted)
    return same and line["attention"] == attention


def _search(lines: Sequence[Record], factor: float | None) -> CellTuning | None:
    """The search, with the best rate tried at the factor; None if there was none or all diverged."""
    losses = {
        line["lr"]: math.inf if (v := line["validation_loss"]) is None else v
        for line in lines
        if factor_of(line) == (factor or 1.0)
    }
    if not losses or min(losses.values()) == math.inf:
        return None
    best = min(sorted(losses), key=lambda rate: losses[rate])
    on_edge = best in (min(losses), max(losses))
    return CellTuning(rate=best, trials=_trials(lines), subject="", on_edge=on_edge, factor=factor)


def _by_rule(
    rule: Rule, settings: Mapping[str, Any], lines: Sequence[Record], factor: float | None = None
) -> CellTuning | None:
    """The rate that the rule gives, with the runs at other rates that test it."""
    (attention,) = settings["attention"]
    if attention not in rule.rates:
        return None
    rate = rule.rates[attention]
    if settings.get("lr", rate) != rate:
        raise ValueError(f"the study has lr={settings['lr']:g} for {attention}, but the rule gives {rate:g}.")
    return CellTuning(rate=rate, trials=_trials(lines), subject="", factor=factor)


def _trials(lines: Sequence[Record]) -> tuple[Trial, ...]:
    ordered = sorted(lines, key=lambda line: (line["lr"], factor_of(line)))
    return tuple(_trial(line) for line in ordered)


def _trial(line: Record) -> Trial:
    return Trial(
        rate=line["lr"],
        seed=line["seed"],
        value=line["validation_loss"],
        status=line["status"],
        key=line["key"],
        seconds=line["seconds"],
        tokens=line["tokens"],
        factor=factor_of(line),
    )


def run_record(line: Record) -> RunRecord:
    """One line as the record of a run. Speeds are left out: the runs shared the GPU.

    The text is recorded by its name, not by where it was on that machine.
    """
    machine = line["machine"] or {}
    versions = machine.get("versions", {})
    config = {**line["config"], "data": Path(line["config"]["data"]).name}
    order, state_bytes = attention_facts(config_from(line["config"]))
    flops = line["flops_per_token"]
    numbers = {
        "loss": line["test_loss"],
        "validation_loss": line["validation_loss"],
        "accuracy": line["accuracy"],
        "scored_tokens": line["test_tokens"],
        "validation_scored_tokens": line["validation_tokens"],
        "parameters": line["parameters"],
        "training_flops": None if flops is None else flops * line["tokens"],
        "peak_gpu_bytes": line["peak_gpu_bytes"],
    }
    version = ".".join(versions.get("torch", "0.0").split(".")[:2])
    return RunRecord(
        run=Run(config=config, data=line["data"]["fingerprint"], torch=version, numerics=NUMERICS_VERSION),
        status=line["status"],
        message=line["diverged"]["reason"] if line["diverged"] else None,
        step=line["diverged"]["step"] if line["diverged"] else line["run"]["steps"],
        order=order,
        state_bytes=state_bytes,
        metrics={name: float(value) for name, value in numbers.items() if value is not None},
        curves={
            name: tuple((int(step), float(value)) for step, value in line[curve])
            for name, curve in (("train_loss", "train_curve"), ("validation_loss", "validation_curve"))
            if line[curve]
        },
        loss_by_position=tuple((int(place), float(loss)) for place, loss in line["loss_by_position"]),
        seconds=line["seconds"],
        provenance={
            "data": line["data"]["name"],
            "commit": line["commit"],
            "machine": {key: machine[key] for key in MACHINE if key in machine},
            "versions": versions,
            "runs_at_once": line["workers"],
            "date": line["date"],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, help="folder with a study.py; records.json is written there")
    parser.add_argument("lines", type=Path, nargs="+", help="files of h200_runs.py")
    options = parser.parse_args()
    _register_sizes()
    record = records_of(read_study_file(options.study / "study.py"), read_records(options.lines).values())
    write_study(record, options.study / FILE)
    planned = sum(len(e.cells) * len(e.seeds) for e in record.experiments)
    print(f"{len(record.runs)} of {planned} runs in {options.study / FILE}")


if __name__ == "__main__":
    main()
