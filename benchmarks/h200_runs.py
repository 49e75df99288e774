"""Many small training runs on one GPU, several at a time; resumable, within a time limit.

    python benchmarks/h200_runs.py parts --data prose.jsonl.xz --out OUT --records 'results/*.jsonl'

A plan lists the wanted runs, given the finished ones:

    parts    14 specs at mini size: two learning rates, more while the best is at the edge, three seeds
    ladder   seven of them at 5M, mini and 60M, at rates carried from mini by a rule, which is tested at
             60M; at 5M also at the best rate of each spec
    small    four of them at 275M, 150M tokens, one seed, at rates carried by the same rule, halved where a
             run diverges
    a JSON file with a list of runs

Runs that choose a rate do not use the test data.

With --factors the rate of the output projections of attention is chosen too, as a factor of the model's rate
(output_lr): at mini, rate and factor are searched in factors of two, until all neighbours are worse
(maclaurin.study.tune.Search). At other sizes a spec keeps the factor of mini: heads
have 64 channels at every size, and what the factor makes up for is the size of a head's output. This is a
rule, which nothing tests at other sizes. Factors that are known before are given as
--set 'output_lr={"exp/sum": 0.25}'; specs that it does not name have 1.

Each finished run is one line in OUT/records.jsonl, written at once, so that nothing finished is lost;
runs with a line there or in one of the --records files are not repeated. No run is started that would not
end before the time limit, except one with checkpoints (checkpoint_every, as in `small`): it saves one and
stops when the time is up, and the next call with the same --scratch continues it. Workers live as
long as the program: CUDA is started once in each of them.

The text is tokenised once per machine into --cache. Trained tokenizers in a folder `tokenizers` next to the
text are used if they fit it. Records of other tokens (another text, tokenizer or split) are ignored. Kernels
are deterministic where torch has a deterministic one (--fast: not), so that a run can be repeated. Speeds
come from runs that share the GPU: they are for planning and not a benchmark.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import glob
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maclaurin.study.tune import Search

Run = dict[str, Any]  # keys of TrainConfig, and `phase`
Record = dict[str, Any]
Plan = Callable[[Sequence[Record], Sequence[str], Run], list[Run]]

#: defaults for settings that a plan does not give; a run may have any key of TrainConfig
COMMON: Run = {
    "size": "mini",
    "tokenizer": "bpe:8192",
    "length": 512,
    "batch_size": 64,
    "steps": 300,
    "warmup": 30,
    "schedule": "linear",
    "final_lr": 0.0,
    "precision": "bf16",
    "equal_start": True,
    "eval_rows": 128,
    "checkpoint_every": 0,
    "log_every": 50,
    "keep": 1,
}
#: sizes of the ladder that are not in the library: width, width of the MLP, heads, layers, length
SIZES = {"5m": (192, 512, 3, 4, 512), "60m": (704, 1880, 11, 8, 512)}

PARTS = [
    "exp/sum",
    "exp/l2",
    "exp/rms",
    "exp/layer",
    "exp/len*out",
    "exp/len",
    "linear(elu1)/sum",
    "linear(relu)/sum",
    "linear(cosine)",
    "taylor(1,about=mean)/sum",
    "taylor(2)/sum",
    "taylor(4)/sum",
    "taylor(2,about=mean)/sum",
    "exp/l2*out",
]
RATES = [2e-3, 1e-3]  # to begin with; the next factor of two is tried while the best is on the edge
FACTORS = (0.25, 0.5, 1.0)  # of the rate of the output projections, to begin with; extended like the rates
MOST_EXTENSIONS = 5
TUNING_SEED, FINAL_SEEDS = 0, (1, 2, 3)

LADDER = [
    "exp/sum",
    "exp/l2",
    "exp/len*out",
    "linear(elu1)/sum",
    "taylor(2)/sum",
    "taylor(2,about=mean)/sum",
    "taylor(4)/sum",
]
WIDTHS = {"5m": 192, "mini": 384, "60m": 704, "small": 1024}
RULE_FACTORS = (1, 2, 4)  # times the rate of mini, tried at half its width
RULE_TESTS = (1, 0.5, 2)  # times the rate that the rule gives, tried at 60m
#: the default exponent of the rule: half the rate at twice the width
ASSUMED_EXPONENT = 1
SMALL = ["exp/sum", "exp/l2", "exp/len*out", "linear(elu1)/sum"]
#: 150M tokens: 6 · 275M · 150M FLOP, ten minutes at 420 TFLOP/s, so a checkpoint is about a minute of work
SMALL_SETTINGS: Run = {
    "size": "small",
    "batch_size": 128,
    "steps": 2290,
    "warmup": 229,
    "checkpoint_every": 229,
}

MOST_TRAIN_POINTS, MOST_POSITIONS = 200, 64
SPARE = 1.15  # of the expected time of a run must be left to start it
START_SECONDS, COMPILE_SECONDS = 8.0, 60.0
#: least time left to start a run that can be continued, and the most that it may take to save
CONTINUE_SECONDS, SAVE_SECONDS = 60.0, 30.0
#: phases that choose a rate: by validation loss, with the test data left alone
SEARCHES = ("tune", "rule")


# ------------------------------------------------------------------------------------------------------ plans


def tuned_parts(records: Sequence[Record], specs: Sequence[str], settings: Run) -> list[Run]:
    """Each spec at two rates, more while the best is at the edge, then new seeds at the best rate."""
    open_specs = [spec for spec in specs if searched_rate(records, spec, settings) is None]
    tuning = [_run(spec, rate, TUNING_SEED, "tune", settings) for rate in RATES for spec in open_specs]
    further = [run for spec in open_specs if (run := _beyond_edge(records, spec, settings)) is not None]
    best = {spec: rate for spec in specs if (rate := tuned_rate(records, spec, settings)) is not None}
    return [*tuning, *further, *_finals(best, settings)]


def ladder(records: Sequence[Record], specs: Sequence[str], settings: Run) -> list[Run]:
    """The specs at three sizes: tuned at mini, a rule for the rates from 5m, tested at 60m, three seeds each.

    The rule is one exponent for all specs: rate ∝ width^−p, in factors of two. At 5m the search goes on while
    the best rate is at its edge, and specs whose best rate is not that of the rule get final runs at it too.
    """
    runs = tuned_parts(records, specs, settings)
    best = {spec: rate for spec in specs if (rate := tuned_rate(records, spec, settings)) is not None}
    if len(best) < len(specs):
        return runs
    runs += [
        _run(spec, rate * factor, TUNING_SEED, "rule", {**settings, "size": "5m"})
        for factor in RULE_FACTORS
        for spec, rate in best.items()
    ]
    exponent = rule_exponent(records, best, settings)
    if exponent is None:
        return runs
    little = {**settings, "size": "5m"}
    runs += _finals(carried(best, "5m", exponent), little)
    large = carried(best, "60m", exponent)
    runs += [
        _run(spec, rate * factor, TUNING_SEED, "rule", {**settings, "size": "60m"})
        for spec, rate in large.items()
        for factor in RULE_TESTS
    ]
    runs += _finals(large, {**settings, "size": "60m"})
    further = [_beyond_rule(records, spec, rate, settings) for spec, rate in best.items()]
    runs += [run for run in further if run is not None]
    own = {spec: found for spec in best if (found := best_at_5m(records, spec, best[spec], settings))}
    return runs + _finals(own, little)


def with_factors(plan: Plan) -> Plan:
    """The plan at factors of the output projections that are tuned at mini first."""

    def planned(records: Sequence[Record], specs: Sequence[str], settings: Run) -> list[Run]:
        wanted = [run for spec in specs for run in _factor_runs(records, spec, settings)]
        factors = {spec: tuned_factor(records, spec, settings) for spec in specs}
        if None in factors.values():
            return wanted
        return [*wanted, *plan(records, specs, {**settings, "output_lr": factors})]

    return planned


def tuned_factor(records: Sequence[Record], spec: str, settings: Run) -> float | None:
    """The factor with the smallest validation loss beside the best rate; None while they are searched."""
    search = factor_search(records, spec, settings)
    return None if search.next_trials() else search.best.factor


def factor_search(records: Sequence[Record], spec: str, settings: Run) -> Search:
    """The search of rate and factor for a spec, with the trials that are known."""
    from maclaurin.study.design import Tune
    from maclaurin.study.run_record import Trial
    from maclaurin.study.tune import Search

    search = Search(Tune(rates=tuple(sorted(RATES)), factors=FACTORS, seeds=(TUNING_SEED,)))
    wanted = _run(spec, 0.0, TUNING_SEED, "tune", settings)
    for record in records:
        run = record["run"]
        if all(run.get(key) == value for key, value in wanted.items() if key != "lr"):
            loss = record["validation_loss"]
            trial = Trial(
                rate=run["lr"],
                factor=run.get("output_lr", 1.0),
                seed=TUNING_SEED,
                value=loss,
                status="diverged" if loss is None else "finished",
                key="",
            )
            search.add(trial)
    return search


def searched_rate(records: Sequence[Record], spec: str, settings: Run) -> float | None:
    """The rate that was found together with the factor of these settings; None if that was not its result."""
    factors = settings.get("output_lr")
    if not isinstance(factors, Mapping) or spec not in factors:
        return None
    others = {key: value for key, value in settings.items() if key != "output_lr"}
    search = factor_search(records, spec, others)
    is_done = search.trials and not search.next_trials()
    return search.best.rate if is_done and search.best.factor == factors[spec] else None


def _factor_runs(records: Sequence[Record], spec: str, settings: Run) -> list[Run]:
    """The next runs of the search of rate and factor: all first rates, before anything follows from them."""
    known = _losses(records, spec, settings)
    first = [_run(spec, rate, TUNING_SEED, "tune", settings) for rate in RATES if rate not in known]
    return first or [
        _run(spec, point.rate, seed, "tune", {**settings, "output_lr": point.factor})
        for point, seed in factor_search(records, spec, settings).next_trials()
    ]


def best_at_5m(records: Sequence[Record], spec: str, rate: float, settings: Run) -> float | None:
    """The best rate at 5m, given the rate of mini; None while there are rates left to try."""
    losses = _losses(records, spec, {**settings, "size": "5m"}, phase="rule")
    if not {rate * factor for factor in RULE_FACTORS} <= losses.keys():
        return None
    if _beyond_rule(records, spec, rate, settings) is not None:
        return None
    return min(sorted(losses), key=lambda each: losses[each])


def _beyond_rule(records: Sequence[Record], spec: str, rate: float, settings: Run) -> Run | None:
    little = {**settings, "size": "5m"}
    first = [rate * factor for factor in RULE_FACTORS]
    return _next_rate(_losses(records, spec, little, phase="rule"), first, spec, "rule", little)


def small(records: Sequence[Record], specs: Sequence[str], settings: Run) -> list[Run]:
    """Four specs at 275M with one seed, at rates carried from mini, or half of that where a run diverged.

    Nothing until mini is tuned.
    """
    best = {spec: rate for spec in specs if (rate := tuned_rate(records, spec, settings)) is not None}
    of_rule = {spec: rate for spec in LADDER if (rate := tuned_rate(records, spec, settings)) is not None}
    exponent = rule_exponent(records, of_rule, settings)
    rates = carried(best, "small", ASSUMED_EXPONENT if exponent is None else exponent)
    merged = {**settings, **SMALL_SETTINGS}
    first = [_run(spec, rate, FINAL_SEEDS[0], "final", merged) for spec, rate in rates.items()]
    return [again for run in first for again in _halved_while_diverging(records, run)]


def _halved_while_diverging(records: Sequence[Record], run: Run) -> list[Run]:
    """The run, and as long as it diverged the same at half the rate."""
    same = [r for r in records if {**r["run"], "phase": ""} == {**run, "phase": ""}]
    if not any(record["status"] == "diverged" for record in same):
        return [run]
    return [run, *_halved_while_diverging(records, {**run, "lr": run["lr"] / 2})]


def carried(rates: Mapping[str, float], size: str, exponent: int) -> dict[str, float]:
    """Rates of mini at another width, rate ∝ width^−exponent, to the next factor of two."""
    doublings = round(exponent * math.log2(WIDTHS[size] / WIDTHS["mini"]))
    return {spec: rate / 2**doublings for spec, rate in rates.items()}


def rule_exponent(records: Sequence[Record], best: Mapping[str, float], settings: Run) -> int | None:
    """The exponent that suits most specs at 5m; None until all of them were tried there."""
    found = []
    for spec, rate in best.items():
        losses = _losses(records, spec, {**settings, "size": "5m"}, phase="rule")
        if not {rate * factor for factor in RULE_FACTORS} <= losses.keys():
            return None
        chosen = min((rate * factor for factor in RULE_FACTORS), key=lambda each: losses[each])
        found.append(round(math.log2(chosen / rate)))
    return statistics.median_low(found) if found else None


def tuned_rate(records: Sequence[Record], spec: str, settings: Run) -> float | None:
    """The rate with the smallest validation loss; None while there are rates left to try."""
    if (found := searched_rate(records, spec, settings)) is not None:
        return found
    losses = _losses(records, spec, settings)
    if not set(RATES) <= losses.keys() or _beyond_edge(records, spec, settings) is not None:
        return None
    return min(sorted(losses), key=lambda rate: losses[rate])


def _beyond_edge(records: Sequence[Record], spec: str, settings: Run) -> Run | None:
    """The next rate to try if the best is the largest or the smallest so far."""
    return _next_rate(_losses(records, spec, settings), RATES, spec, "tune", settings)


def _next_rate(
    losses: Mapping[float, float], first: Sequence[float], spec: str, phase: str, settings: Run
) -> Run | None:
    if not set(first) <= losses.keys() or len(losses) >= len(first) + MOST_EXTENSIONS:
        return None
    rates = sorted(losses)
    best = min(rates, key=lambda rate: losses[rate])
    beyond = {rates[0]: best / 2, rates[-1]: best * 2}.get(best)
    return None if beyond is None else _run(spec, beyond, TUNING_SEED, phase, settings)


def _finals(rates: Mapping[str, float], settings: Run) -> list[Run]:
    """The final runs, ordered by seed, so that complete comparisons finish early."""
    return [_run(spec, rate, seed, "final", settings) for seed in FINAL_SEEDS for spec, rate in rates.items()]


def _run(spec: str, rate: float, seed: int, phase: str, settings: Run) -> Run:
    """One run. A factor of 1 is left out: the run is then the same as one without factors."""
    run = {**COMMON, **settings, "attention": spec, "lr": rate, "seed": seed, "phase": phase}
    factor = run.pop("output_lr", 1.0)
    own = factor.get(spec, 1.0) if isinstance(factor, Mapping) else factor
    return run if own == 1.0 else {**run, "output_lr": own}


def _losses(
    records: Sequence[Record], spec: str, settings: Run, *, phase: str = "tune"
) -> dict[float, float]:
    """Learning rate → validation loss of the tuning seed; infinite if the run diverged."""
    wanted = _run(spec, 0.0, TUNING_SEED, phase, settings)
    found = {}
    for record in records:
        run = record["run"]
        same_factor = run.get("output_lr", 1.0) == wanted.get("output_lr", 1.0)
        if same_factor and all(run.get(key) == value for key, value in wanted.items() if key != "lr"):
            loss = record["validation_loss"]
            found[run["lr"]] = float("inf") if loss is None else loss
    return found


def plan_named(
    name: str, settings: Run, only: Sequence[str], *, factors: bool = False
) -> Callable[[Sequence[Record]], list[Run]]:
    """The plan as a function from finished records to all wanted runs, the first to be run first."""
    named: dict[str, tuple[Plan, list[str]]] = {
        "parts": (tuned_parts, PARTS), "ladder": (ladder, LADDER), "small": (small, SMALL)
    }  # fmt: skip
    if factors and (name not in named or "output_lr" in settings):
        raise SystemExit(
            "--factors chooses output_lr for parts, ladder or small: give no other plan or factor."
        )
    if name in named:
        plan, everything = named[name]
        plan = with_factors(plan) if factors else plan
        specs = [spec for spec in everything if not only or spec in only]
        return lambda records: plan(records, specs, settings)
    listed = json.loads(Path(name).read_text(encoding="utf-8"))
    runs = [{**COMMON, **settings, "phase": "listed", **run} for run in listed]
    return lambda records: runs


def key_of(run: Run, data: str) -> str:
    """The identity of a run: its settings and the text."""
    plain = json.dumps([{k: v for k, v in run.items() if k != "phase"}, data], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:24]


def read_records(paths: Iterable[Path]) -> dict[str, Record]:
    """Key → record; a last line that was cut off is left out."""
    found = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            found[record["key"]] = record
    return found


# ---------------------------------------------------------------------------------------------------- one run


class _Reporter:
    """Sends the trainer's progress to the parent instead of a terminal."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, *problem: object) -> None:
        return None

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        self._connection.send(("step", done, loss))

    def recorded(self, step: int, loss: float) -> None:
        return None

    def say(self, text: str) -> None:
        return None


@dataclass(frozen=True)
class Machine:
    """Settings of the workers, which are not part of a run's identity.

    scratch   folder of this call, deleted at its end
    kept      folder of runs that the next call continues
    """

    scratch: str
    kept: str
    cache: str
    deterministic: bool
    compile: bool
    threads: int


def worker(connection: Connection, machine: Machine) -> None:
    """Train what the parent sends until it sends None."""
    os.environ |= {
        "MACLAURIN_CACHE": machine.cache,
        "TOKENIZERS_PARALLELISM": "false",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "TORCHINDUCTOR_CACHE_DIR": str(Path(machine.cache) / "inductor"),
    }
    import torch

    torch.set_num_threads(machine.threads)
    torch.set_float32_matmul_precision("high")
    unstable = _use_deterministic_kernels() if machine.deterministic else set[str]()
    _register_sizes()
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    connection.send(("ready",))
    last = None
    while (task := connection.recv()) is not None:
        number, run, data, key = task
        can_continue = run.get("checkpoint_every", 0) > 0
        own = Path(machine.kept) / key if can_continue else Path(machine.scratch)
        folder = own / "run" if can_continue else own / f"run-{os.getpid()}-{number}"
        if machine.compile and run["attention"] != last:
            torch._dynamo.reset()
        last = run["attention"]
        unstable.clear()
        try:
            record = train_one(run, data, folder, _Reporter(connection), machine.compile)
            if record is not None:
                record |= {
                    "deterministic": machine.deterministic,
                    "nondeterministic_kernels": sorted(unstable),
                }
            connection.send(("stopped", number) if record is None else ("finished", number, record))
            done = record is not None
        except Exception:
            connection.send(("failed", number, traceback.format_exc()))
            done = not any((folder / "checkpoints").glob("*"))
        if done:
            shutil.rmtree(own if can_continue else folder, ignore_errors=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _use_deterministic_kernels() -> set[str]:
    """Use deterministic kernels if torch has them; returns the warnings about others."""
    import torch

    unstable: set[str] = set()
    show = warnings.showwarning

    def collect(message: Any, *arguments: Any, **named: Any) -> None:
        if "deterministic" in str(message):
            unstable.add(str(message).split(" does not have")[0][:120])
        else:
            show(message, *arguments, **named)

    warnings.showwarning = collect
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return unstable


def _register_sizes() -> None:
    from maclaurin.models.configuration import SIZES as KNOWN
    from maclaurin.models.configuration import Size

    for name, (hidden, ffn, heads, layers, length) in SIZES.items():
        KNOWN.setdefault(name, Size(name, hidden, ffn, heads, layers, length))


def train_one(run: Run, data: str, folder: Path, display: Any, compiled: bool) -> Record | None:
    """Figures of one run; a diverged run is a result too. None if it was asked to stop and saved itself.

    A run that is in the folder already continues from its last checkpoint.
    """
    import torch

    from maclaurin.training.config import config_from
    from maclaurin.training.optimizer_step import Diverged
    from maclaurin.training.trainer import train

    defaults = {
        "eval_every": max(1, run["steps"] // 4),
        "final_rows": 0,
        "compile": compiled,
        "test": run["phase"] not in SEARCHES,
    }
    settings = {**defaults, **run, "data": data}
    settings.pop("phase")
    config = config_from(settings)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begun, diverged = time.perf_counter(), None
    earlier = folder.parent / "seconds.json"  # of each earlier call that trained a part of this run
    before: list[float] = json.loads(earlier.read_text(encoding="utf-8")) if earlier.exists() else []
    try:
        outcome = train(config, folder, resume=(folder / "config.json").exists(), display=display)
    except Diverged as problem:
        diverged = {"step": problem.step, "reason": str(problem).splitlines()[0]}
    else:
        if not outcome.finished:
            earlier.write_text(json.dumps([*before, time.perf_counter() - begun]), encoding="utf-8")
            return None
    record: Record = {
        "status": "diverged" if diverged else "finished",
        "diverged": diverged,
        "seconds": round(sum(before) + time.perf_counter() - begun, 2),
        "calls": len(before) + 1,
        "compiled": config.compile,
        "config": config.to_dict(),
    }
    return record | _figures(folder)


def _figures(folder: Path) -> Record:
    """The thinned records in the trainer's folder."""
    lines = read_lines(folder / "records.jsonl")
    summary = folder / "summary.json"
    facts: Record = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    finals = [line for line in lines if line["kind"] == "final"]
    machine = folder / "machine.json"  # missing if the first step diverged
    return {
        "validation_loss": facts.get("validation_loss"),
        "test_loss": facts.get("test_loss"),
        "accuracy": facts.get("accuracy"),
        "validation_tokens": facts.get("validation_tokens"),
        "test_tokens": facts.get("tokens"),
        "parameters": facts.get("parameters"),
        "flops_per_token": facts.get("flops_per_token"),
        "peak_gpu_bytes": facts.get("peak_gpu_bytes"),
        "tokens_per_second_shared": facts.get("tokens_per_second"),
        "validation_curve": [[x["step"], round(x["loss"], 5)] for x in lines if x["kind"] == "validation"],
        "train_curve": _thin(
            [[x["step"], round(x["loss"], 4)] for x in lines if x["kind"] == "train"], MOST_TRAIN_POINTS
        ),
        "gradient_norms": _thin(
            [[x["step"], round(x["gradient_norm"], 4)] for x in lines if x["kind"] == "train"], 50
        ),
        "loss_by_position": _thin(
            [[i, round(x, 4)] for i, x in enumerate(finals[-1]["loss_by_position"])], MOST_POSITIONS
        )
        if finals
        else [],
        "machine": json.loads(machine.read_text(encoding="utf-8")) if machine.exists() else None,
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def _thin(points: list[Any], most: int) -> list[Any]:
    """Evenly spaced points, the last among them."""
    if len(points) <= most:
        return points
    return [points[round((i + 1) * len(points) / most) - 1] for i in range(most)]


# ------------------------------------------------------------------------------------------------- the parent


@dataclass
class Worker:
    """A process and what it is doing."""

    process: Any
    connection: Connection
    run: Run | None = None
    key: str = ""
    step: int = 0
    step_time: float = 0.0
    first_step: int = 0
    first_time: float = 0.0
    ready: bool = False
    last: str = ""  # spec of its last run, which it has compiled


class Pool:
    """Keeps workers busy until the plan is done or the time is up."""

    def __init__(self, options: argparse.Namespace, plan: Callable[[Sequence[Record]], list[Run]]) -> None:
        self.options, self.plan = options, plan
        self.begun = time.monotonic()
        self.deadline = self.begun + options.seconds
        self.records = read_records(_record_files(options))
        self.failed: dict[str, int] = {}
        self.data_hash = _sha256(options.data)
        self.tokens: dict[str, str] = {}
        self.workers: list[Worker] = []
        self.number = 0
        self.written = 0
        self.stopping = False
        self.scratch = tempfile.mkdtemp(prefix="runs-", dir=options.scratch)
        self.kept = (options.scratch or Path(tempfile.gettempdir())) / "maclaurin-unfinished"

    def run(self) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        wanted = self.plan(list(self.records.values()))
        if not wanted:
            self._say("the plan has no run to start: it needs the records of another plan first (--records)")
            return
        self.workers = [self._start_worker() for _ in range(min(self.options.workers, len(wanted)))]
        try:
            self._prepare(wanted[0])
            self._leave_out_other_tokens()
            left = len(self._wanted())
            self._say(f"{len(self.records)} records known, {left} runs wanted now")
            if left:
                self._work()
        finally:
            for each in self.workers:
                each.process.kill()
            for each in self.workers:
                each.process.join(10)
            shutil.rmtree(self.scratch, ignore_errors=True)
        left, failures = len(self._wanted()), sum(self.failed.values())
        self._say(f"{self.written} runs finished, {left} left, {failures} failures")

    def _leave_out_other_tokens(self) -> None:
        """Ignore records of another text, tokenizer or split."""
        mine = self.tokens["fingerprint"]
        others = [key for key, record in self.records.items() if record["data"]["fingerprint"] != mine]
        for key in others:
            del self.records[key]
        if others:
            self._say(f"{len(others)} records are of other tokens and do not count")

    def _prepare(self, run: Run) -> None:
        """Prepare tokens and tokenizer in the cache with all cores, while the workers start."""
        os.environ["MACLAURIN_CACHE"] = str(self.options.cache)
        given = self.options.data.parent / "tokenizers"
        here = self.options.cache / "tokenizers"
        here.mkdir(parents=True, exist_ok=True)
        for file in given.glob("*.json"):
            if not (here / file.name).exists():
                shutil.copy(file, here)
        from maclaurin.data.data_config import DataConfig, open_source
        from maclaurin.data.text_source import TextSource

        known = {field.name for field in dataclasses.fields(DataConfig)}
        settings = {key: value for key, value in run.items() if key in known}
        settings |= {"data": str(self.options.data), "seed": 0}  # the fingerprint contains the seed
        source = open_source(DataConfig(**settings), progress=False)
        assert isinstance(source, TextSource)
        self.tokens = {
            "fingerprint": source.fingerprint,
            "tokenizer": source.tokenizer.fingerprint,
            "train_tokens_sha256": source.prepared.manifest.arrays["train-tokens"].sha256,
        }
        size = f"{source.tokens_per_epoch / 1e6:.1f}M training tokens"
        self._say(f"text ready: {size}, tokenizer {source.tokenizer.fingerprint[:12]}")

    def _work(self) -> None:
        while True:
            for idle in [w for w in self.workers if w.ready and w.run is None]:
                self._assign(idle)
            if all(w.run is None for w in self.workers if w.ready) and self._nothing_to_start():
                return
            left = self.deadline - time.monotonic()
            if left <= 0:
                busy = [w.run["attention"] for w in self.workers if w.run]
                self._say(f"time is up; unfinished: {', '.join(busy) or 'none'}")
                self._stop_and_save()
                return
            ready = wait([w.connection for w in self.workers], timeout=min(left, 5.0))
            for each in [w for w in self.workers if w.connection in ready]:
                self._receive(each)

    def _stop_and_save(self) -> None:
        """Ask the runs that can be continued to save a checkpoint, and wait for them."""
        self.stopping = True
        saving = [w for w in self.workers if w.run and w.run.get("checkpoint_every")]
        for each in saving:
            each.process.terminate()  # the trainer saves and returns
        end = time.monotonic() + SAVE_SECONDS
        while (left := end - time.monotonic()) > 0 and (saving := [w for w in saving if w.run]):
            for each in [w for w in saving if w.connection in wait([w.connection for w in saving], left)]:
                self._receive(each)

    def _nothing_to_start(self) -> bool:
        starting = [w for w in self.workers if not w.ready]
        return not starting and (not self.workers or not any(self._fits(run) for run in self._wanted()))

    def _wanted(self) -> list[Run]:
        """Wanted runs that are neither finished nor running nor failed here."""
        running = {w.key for w in self.workers if w.run}
        found = {}
        for run in self.plan(list(self.records.values())):
            key = key_of(run, self.data_hash)
            if key not in self.records and key not in running and self.failed.get(key, 0) < 2:
                found.setdefault(key, run)
        return list(found.values())

    def _assign(self, to: Worker) -> None:
        wanted = self._wanted()
        if self.options.compile:  # first what this worker has compiled, then what no other has
            others = {w.last for w in self.workers if w is not to}
            wanted.sort(key=lambda run: (run["attention"] != to.last, run["attention"] in others))
        for run in wanted:
            if self._fits(run, to):
                self.number += 1
                to.last = run["attention"]
                to.run, to.key, to.step, to.first_step = run, key_of(run, self.data_hash), 0, 0
                to.connection.send((self.number, run, str(self.options.data), to.key))
                return

    def _fits(self, run: Run, on: Worker | None = None) -> bool:
        expected = self._expected(run, on)
        left = self.deadline - time.monotonic()
        if run.get("checkpoint_every"):
            start = COMPILE_SECONDS if self.options.compile else 0.0
            return left > START_SECONDS + start + CONTINUE_SECONDS
        return left > (0.4 * self.options.seconds if expected is None else SPARE * expected + 3)

    def _expected(self, run: Run, on: Worker | None) -> float | None:
        """Expected seconds, from the most similar running and finished runs; None if there are none."""
        paces: dict[int, list[float]] = {}  # likeness → seconds per row of a batch
        for each in self.workers:
            if each.run and each.step > each.first_step and (alike := _likeness(run, each.run)):
                pace = (each.step_time - each.first_time) / (each.step - each.first_step)
                paces.setdefault(alike, []).append(pace / each.run["batch_size"])
        for record in self.records.values():
            conditions = (record["workers"], record.get("compiled", False))
            if conditions == (self.options.workers, self.options.compile) and record.get("seconds_per_step"):
                other = record["run"]
                if alike := _likeness(run, other):
                    paces.setdefault(alike, []).append(record["seconds_per_step"] / other["batch_size"])
        if not paces:
            return None
        closest = sorted(paces[max(paces)])
        start = COMPILE_SECONDS if self.options.compile and (on is None or on.last != run["attention"]) else 0
        return closest[-1 - len(closest) // 4] * run["steps"] * run["batch_size"] + START_SECONDS + start

    def _receive(self, sender: Worker) -> None:
        try:
            message = sender.connection.recv()
        except (EOFError, OSError):
            self._replace(sender)
            return
        kind = message[0]
        if kind == "ready":
            sender.ready = True
        elif kind == "step":
            sender.step, sender.step_time = message[1], time.monotonic()
            if not sender.first_step:
                sender.first_step, sender.first_time = sender.step, sender.step_time
        elif kind == "finished":
            self._write(sender, message[2])
            sender.run = None
        elif kind == "stopped":
            assert sender.run is not None
            steps = f"{sender.step} of {sender.run['steps']} steps"
            self._say(f"{sender.run['attention']}: saved after {steps}; the next call here continues it")
            sender.run = None
        elif kind == "failed":
            self._fail(sender, message[2])
            sender.run = None

    def _write(self, sender: Worker, figures: Record) -> None:
        run = sender.run
        assert run is not None
        record = {
            "key": sender.key,
            "run": run,
            "attention": run["attention"],
            "size": run["size"],
            "lr": run["lr"],
            "seed": run["seed"],
            "phase": run["phase"],
            "tokens": run["steps"] * run["batch_size"] * run["length"],
            **figures,
            "seconds_per_step": _pace(sender),
            "workers": self.options.workers,
            "commit": self.options.commit,
            "data": {
                "name": self.options.data.name,
                "sha256": self.data_hash,
                **self.tokens,
            },
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        with (self.options.out / "records.jsonl").open("a", encoding="utf-8") as file:
            line = json.dumps(record).replace(
                json.dumps(str(self.options.data)), json.dumps(self.options.data.name)
            )
            file.write(line + "\n")  # no path of this machine
            file.flush()
            os.fsync(file.fileno())
        self.records[sender.key] = record
        self.written += 1
        loss = record["validation_loss"]
        shown = f"validation {loss:.4f}" if loss is not None else f"diverged {record['diverged']}"
        self._say(
            f"{run['attention']} lr {run['lr']:g} seed {run['seed']}: {shown}, {record['seconds']:.0f} s"
        )

    def _fail(self, sender: Worker, why: str) -> None:
        assert sender.run is not None
        self.failed[sender.key] = self.failed.get(sender.key, 0) + 1
        entry = {"key": sender.key, "run": sender.run, "why": why}
        with (self.options.out / "failures.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._say(
            f"FAILED {sender.run['attention']} lr {sender.run['lr']:g}: {' / '.join(why.split(chr(10))[-5:])}"
        )

    def _replace(self, dead: Worker) -> None:
        """A worker died: note what it was doing, start another unless workers die at once."""
        dead.process.join(5)
        if self.stopping:  # it was asked to stop before its run had begun
            dead.run = None
            return
        if dead.run is not None:
            self._fail(dead, f"the worker ended with {dead.process.exitcode}")
        self.workers.remove(dead)
        if dead.ready:
            self.workers.append(self._start_worker())

    def _start_worker(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        options = self.options
        threads = max(1, (os.cpu_count() or 1) // (2 * options.workers))
        machine = Machine(
            self.scratch, str(self.kept), str(options.cache), not options.fast, options.compile, threads
        )
        process = context.Process(target=worker, args=(theirs, machine), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)


def _pace(worker: Worker) -> float | None:
    """Seconds per step after the first ones, evaluations included."""
    steps = worker.step - worker.first_step
    return round((worker.step_time - worker.first_time) / steps, 5) if steps else None


def _likeness(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """2 for the same spec and shape, 1 for the same shape, 0 for another."""
    if any(one.get(key) != other.get(key) for key in ("size", "length", "precision", "compile")):
        return 0
    return 1 + (one["attention"] == other["attention"])


def _record_files(options: argparse.Namespace) -> list[Path]:
    found = [Path(path) for pattern in options.records for path in glob.glob(pattern)]  # noqa: PTH207
    own = options.out / "records.jsonl"
    return [*found, own] if own.exists() else found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------ results


def table(records: Iterable[Record]) -> str:
    """Validation loss by rate, the best rate, and test loss over the final seeds."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        factor = f" × {record['run']['output_lr']:g}" if "output_lr" in record["run"] else ""
        row = rows.setdefault(f"{record['size']} {record['attention']}{factor}", {"tune": {}, "test": []})
        loss = record["validation_loss"]
        if record["phase"] == "tune":
            row["tune"][record["lr"]] = float("inf") if loss is None else loss
        elif record["test_loss"] is not None:
            row["test"].append(record["test_loss"])
    lines = []
    for name, row in rows.items():
        best = min(row["tune"], key=lambda rate: row["tune"][rate], default=None)
        rates = "  ".join(
            f"{rate:g}:{loss:.4f}{'*' if rate == best else ''}" for rate, loss in sorted(row["tune"].items())
        )
        tests = " ".join(f"{loss:.4f}" for loss in row["test"])
        lines.append(f"{name:32} {rates}  test {tests or '-'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", help="parts, ladder, small, or a JSON file with a list of runs")
    parser.add_argument("--data", type=Path, required=True, help="text: .jsonl.xz, .jsonl.gz, .txt …")
    parser.add_argument("--out", type=Path, required=True, help="folder for records.jsonl")
    parser.add_argument("--records", nargs="*", default=[], help="files or patterns of finished records")
    parser.add_argument("--seconds", type=float, default=560.0, help="time limit, preparation included")
    parser.add_argument("--workers", type=int, default=6, help="runs at a time")
    parser.add_argument("--factors", action="store_true", help="choose output_lr of each spec too")
    parser.add_argument("--only", nargs="*", default=[], help="specs of the plan")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run, as JSON"
    )
    parser.add_argument("--commit", default="unknown", help="commit to record")
    parser.add_argument("--compile", action="store_true", help="torch.compile; a worker keeps to its spec")
    parser.add_argument("--fast", action="store_true", help="allow kernels that are not deterministic")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "maclaurin-cache")
    parser.add_argument(
        "--scratch", type=Path, default=None, help="folder for the runs' own files and checkpoints"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs that are left and end")
    options = parser.parse_args(arguments)
    options.data = options.data.absolute()
    settings = dict(_setting(text) for text in options.set)
    pool = Pool(options, plan_named(options.plan, settings, options.only, factors=options.factors))
    if options.dry_run:
        for run in pool._wanted():
            factor = f"× {run['output_lr']:g}" if "output_lr" in run else ""
            print(run["phase"], run["attention"], run["lr"], run["seed"], run["size"], run["steps"], factor)
        shutil.rmtree(pool.scratch, ignore_errors=True)
        return
    pool.run()
    print(table(pool.records.values()))


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    sys.exit(main())
