"""The plan of many runs on one GPU (benchmarks/h200_runs.py) and their corpus (benchmarks/corpus.py)."""

import importlib.util
import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest

from maclaurin.models.configuration import SIZES
from maclaurin.plain_data import to_plain
from maclaurin.progress_bar import Display
from maclaurin.study.find import load_study
from maclaurin.training.config import config_from


def load(name):
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


ROOT = Path(__file__).parents[2]
runs, corpus = load("h200_runs"), load("corpus")
sys.modules["h200_runs"] = runs  # as for a script in the same folder
lines_as_records = load("h200_records")


def finished(plan, loss_of, rounds=20):
    """All records once the plan wants nothing more."""
    records, keys = [], set()
    for _ in range(rounds):
        wanted = [run for run in plan(records) if runs.key_of(run, "data") not in keys]
        if not wanted:
            return records
        run = wanted[0]
        keys.add(runs.key_of(run, "data"))
        records.append({"run": run, "validation_loss": loss_of(run["lr"])})
    return pytest.fail("the plan never ends")


def test_the_rate_with_the_smallest_validation_loss_gets_fresh_seeds():
    plan = runs.plan_named("parts", {"steps": 5}, ["exp/sum"])
    records = finished(plan, lambda rate: abs(rate - 2.1e-3))
    tuned = [record["run"] for record in records[:3]]
    final = [record["run"] for record in records[3:]]
    assert [run["lr"] for run in tuned] == [2e-3, 1e-3, 4e-3]
    assert {run["seed"] for run in tuned} == {0}
    assert [(run["lr"], run["seed"]) for run in final] == [(2e-3, 1), (2e-3, 2), (2e-3, 3)]


@pytest.mark.parametrize(
    ("loss_of", "beyond"),
    [
        (lambda r: -r, [0.004, 0.008, 0.016, 0.032, 0.064]),
        (lambda r: r, [5e-4, 2.5e-4, 1.25e-4, 6.25e-5, 3.125e-5]),
    ],
)
def test_the_grid_is_extended_while_the_best_rate_is_on_its_edge(loss_of, beyond):
    records = finished(runs.plan_named("parts", {}, ["exp/l2"]), loss_of)
    assert [record["run"]["lr"] for record in records[2:7]] == beyond
    assert {record["run"]["lr"] for record in records[7:]} == {beyond[-1]}


def test_the_factor_of_the_output_projection_is_searched_at_the_best_rate_and_the_rate_again():
    """The best is 4e-3 and 1/8, and 2e-3 at factor 1."""
    records, keys = [], set()
    plan = runs.plan_named("parts", {}, ["exp/sum"], factors=True)
    while wanted := [run for run in plan(records) if runs.key_of(run, "data") not in keys]:
        run = wanted[0]
        keys.add(runs.key_of(run, "data"))
        factor = run.get("output_lr", 1.0)
        rate = math.log2(run["lr"] / (2e-3 if factor > 0.2 else 4e-3))
        records.append({"run": run, "validation_loss": rate**2 + math.log2(8 * factor) ** 2})
    tried = [(run["run"]["lr"], run["run"].get("output_lr", 1.0)) for run in records]
    assert tried[:4] == [(2e-3, 1.0), (1e-3, 1.0), (4e-3, 1.0), (2e-3, 0.25)]
    assert {(4e-3 * rate, 0.125 * factor) for rate, factor in [(0.5, 1), (2, 1), (1, 0.5), (1, 2)]} < set(
        tried
    )
    assert [record["run"]["phase"] for record in records[-4:]] == ["tune", "final", "final", "final"]
    assert [
        (*setting, run["run"]["seed"]) for setting, run in zip(tried[-3:], records[-3:], strict=True)
    ] == [(4e-3, 0.125, seed) for seed in (1, 2, 3)]


def test_the_largest_runs_take_rate_and_factor_that_were_found_together():
    """The best is 4e-3 and 1/8; the rates of the first grid were never tried at that factor."""
    runs = load("h200_runs")
    plan, records = runs.plan_named("small", {}, ["linear(elu1)/sum"], factors=True), []
    while trials := [
        run for run in plan(records) if run["phase"] == "tune" and run not in [r["run"] for r in records]
    ]:
        for run in trials:
            own, rate = math.log2(run.get("output_lr", 1.0) * 8), math.log2(run["lr"] / 4e-3)
            records.append({"run": run, "validation_loss": rate**2 + own**2 + rate * own})
    (found,) = [run for run in plan(records) if run["phase"] == "final"]
    assert (found["lr"], found["output_lr"], found["size"]) == (2e-3, 0.125, "small")


def test_a_largest_run_that_diverges_is_repeated_at_half_the_rate():
    runs = load("h200_runs")
    plan = runs.plan_named("small", {}, ["exp/sum"])
    records = [
        {"run": runs._run("exp/sum", rate, 0, "tune", {}), "validation_loss": loss}
        for rate, loss in [(1e-3, 2.0), (2e-3, 1.0), (4e-3, 2.0)]
    ]
    (first,) = plan(records)
    diverged = {"run": first, "status": "diverged", "validation_loss": None}
    assert [run["lr"] for run in plan([*records, diverged])] == [first["lr"], first["lr"] / 2]
    assert plan([*records, {**diverged, "status": "finished", "validation_loss": 1.0}]) == [first]


def test_a_spec_keeps_its_factor_at_other_sizes_and_a_factor_of_one_changes_no_run():
    given = {"output_lr": {"exp/sum": 0.25}}
    at_one = runs.plan_named("parts", {}, ["exp/sum", "exp/l2"])([])
    at_given = runs.plan_named("parts", given, ["exp/sum", "exp/l2"])([])
    assert [run.get("output_lr", 1.0) for run in at_given] == [0.25, 1.0, 0.25, 1.0]
    assert [run for run in at_given if run["attention"] == "exp/l2"] == at_one[1::2]
    tuned = [
        searched(run, abs(math.log2(run["lr"] / 2e-3)))
        for spec in runs.SMALL
        for rate in (1e-3, 2e-3, 4e-3)
        if (run := runs._run(spec, rate, 0, "tune", given))
    ]
    assert {run["attention"]: run.get("output_lr", 1.0) for run in runs.small(tuned, runs.SMALL, given)} == {
        "exp/sum": 0.25, "exp/l2": 1.0, "exp/len*out": 1.0, "linear(elu1)/sum": 1.0,
    }  # fmt: skip
    with pytest.raises(SystemExit, match="--factors"):
        runs.plan_named("parts", given, [], factors=True)
    runs._register_sizes()
    assert {SIZES[name].hidden // SIZES[name].heads for name in runs.WIDTHS} == {64}


def test_a_diverged_run_is_never_the_best():
    records = finished(
        runs.plan_named("parts", {}, ["exp/l2"]), lambda rate: None if rate > 3e-3 else 1 - rate
    )
    assert {record["run"]["lr"] for record in records[3:]} == {2e-3}


def test_other_settings_are_other_runs():
    run = runs.plan_named("parts", {}, ["exp/sum"])([])[0]
    assert runs.key_of(run, "a") == runs.key_of({**run, "phase": "other"}, "a")
    assert len({runs.key_of(run, "a"), runs.key_of(run, "b"), runs.key_of({**run, "seed": 9}, "a")}) == 3


def test_half_a_line_is_not_a_record(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"key": "a", "x": 1}\n{"key": "b", "x', encoding="utf-8")
    assert list(runs.read_records([path])) == ["a"]


def test_html_becomes_its_text_without_navigation():
    html = (
        b"<html class='sidebar-visible'><nav>Menu</nav><p>One\n two</p>"
        b"<div class='footer'>Foot</div><pre>a\n  b</pre>"
    )
    text = "".join(corpus.from_html(html))
    assert "One two" in text
    assert "a\n  b" in text
    assert "Menu" not in text
    assert "Foot" not in text


def test_paragraphs_are_kept_once():
    paragraphs = corpus.Paragraphs()
    sentence = "A sentence that is long enough to be counted as a paragraph of its own."
    assert paragraphs.clean(f"{sentence}\n\nShort.\n\n1 2 3 4 5 6 7 8") == f"{sentence}\n\nShort.\n"
    assert paragraphs.clean(f"**{sentence}**\n\nShort.") == "Short.\n"


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("usr/share/doc/x/html/intro.html", True),
        ("usr/share/doc/x/html/fr/intro.html", False),
        ("usr/share/doc/x/html/de-DE/intro.html", False),
        ("usr/share/doc/x/changelog.html", False),
        ("usr/share/doc/x/copyright.txt", False),
        ("usr/share/info/x.info.gz", True),
        ("usr/lib/x.so", False),
    ],
)
def test_translations_change_logs_and_licences_are_left_out(path, kept):
    assert (corpus.reader_of(path) is not None) == kept


# ------------------------------------------------------------------------------------------------ the ladder


def searched(run, loss):
    return {"run": run, "validation_loss": loss}


def best_at(rate):
    """A validation loss that is smallest at one rate."""
    return lambda tried: abs(math.log2(tried / rate))


def run_all(name, loss_of, most=400):
    plan, records, done = runs.plan_named(name, {}, []), [], set()
    for _ in range(most):
        wanted = [run for run in plan(records) if runs.key_of(run, "data") not in done]
        if not wanted:
            return records
        done.add(runs.key_of(wanted[0], "data"))
        records.append(searched(wanted[0], loss_of(wanted[0])))
    return pytest.fail("the plan never ends")


@pytest.mark.parametrize(("factor", "at_60m"), [(1, 2e-3), (2, 1e-3), (4, 5e-4)])
def test_the_rule_that_suits_half_the_width_is_carried_to_twice_the_width(factor, at_60m):
    best = {"mini": 2e-3, "5m": 2e-3 * factor, "60m": at_60m}
    records = run_all("ladder", lambda run: best_at(best[run["size"]])(run["lr"]))
    finals = [r["run"] for r in records if r["run"]["phase"] == "final"]
    assert {(run["size"], run["lr"]) for run in finals} == set(best.items())
    assert {(run["attention"], run["seed"]) for run in finals if run["size"] == "60m"} == {
        (spec, seed) for spec in runs.LADDER for seed in runs.FINAL_SEEDS
    }
    tested = {r["run"]["lr"] for r in records if (r["run"]["phase"], r["run"]["size"]) == ("rule", "60m")}
    assert tested == {at_60m / 2, at_60m, at_60m * 2}


@pytest.mark.parametrize(("own", "tried"), [(1e-3, [1e-3, 5e-4]), (3.2e-2, [1.6e-2, 3.2e-2, 6.4e-2])])
def test_at_the_smallest_size_the_search_goes_on_and_each_spec_has_runs_at_its_own_best_rate(own, tried):
    def loss(run):
        best = {"mini": 2e-3, "5m": own if run["attention"] == "exp/l2" else 4e-3, "60m": 1e-3}
        return best_at(best[run["size"]])(run["lr"])

    records = run_all("ladder", loss)
    little = [r["run"] for r in records if (r["run"]["size"], r["run"]["attention"]) == ("5m", "exp/l2")]
    assert [r["lr"] for r in little if r["phase"] == "rule"] == pytest.approx([2e-3, 4e-3, 8e-3, *tried])
    assert {r["lr"] for r in little if r["phase"] == "final"} == {4e-3, own}
    others = [r["run"] for r in records if r["run"]["size"] == "5m" and r["run"]["attention"] != "exp/l2"]
    assert {r["lr"] for r in others if r["phase"] == "final"} == {4e-3}


def test_the_rule_is_tested_with_every_spec_at_the_largest_size_of_the_ladder():
    best = {"mini": 2e-3, "5m": 4e-3, "60m": 1e-3}
    records = run_all("ladder", lambda run: best_at(best[run["size"]])(run["lr"]))
    tests = {
        (r["run"]["attention"], r["run"]["lr"])
        for r in records
        if (r["run"]["size"], r["run"]["phase"]) == ("60m", "rule")
    }
    assert tests == {(spec, rate) for spec in runs.LADDER for rate in (5e-4, 1e-3, 2e-3)}


def test_the_known_ladder_lacks_only_the_tests_of_its_rates():
    found = runs.read_records(sorted((ROOT / "benchmarks" / "results" / "h200").glob("*.jsonl"))).values()
    lines = [line for line in found if line["data"]["name"].startswith("prose")]
    known = {
        json.dumps({k: v for k, v in line["run"].items() if k != "phase"}, sort_keys=True) for line in lines
    }
    wanted = [
        run
        for run in runs.plan_named("ladder", {}, [])(lines)
        if json.dumps({k: v for k, v in run.items() if k != "phase"}, sort_keys=True) not in known
    ]
    assert {(run["size"], run["phase"]) for run in wanted} == {("60m", "rule"), ("5m", "rule")}


def test_the_largest_runs_have_150_million_tokens_and_checkpoints():
    run = {**runs.COMMON, **runs.SMALL_SETTINGS}
    assert run["steps"] * run["batch_size"] * run["length"] >= 150e6
    assert 0 < run["checkpoint_every"] <= run["steps"] / 10


class Interrupting(Display):
    """A display that asks the process to stop after some steps, as the end of a call does."""

    def __init__(self, after):
        self.after = after

    def step(self, done, loss, tokens_per_second):
        if done >= self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_with_checkpoints_continues_in_the_next_call(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(400)))
    small = {"size": "pico", "length": 16, "batch_size": 2, "steps": 8, "warmup": 1, "log_every": 1}
    run = {**runs.COMMON, **small, "tokenizer": "bytes", "eval_rows": 4, "precision": "fp32", "device": "cpu"}
    run |= {"attention": "exp/sum", "lr": 1e-3, "seed": 1, "phase": "final", "checkpoint_every": 3}
    never = runs.train_one(run, str(text), tmp_path / "a" / "run", Interrupting(99), False)
    assert runs.train_one(run, str(text), tmp_path / "b" / "run", Interrupting(4), False) is None
    resumed = runs.train_one(run, str(text), tmp_path / "b" / "run", Interrupting(99), False)
    assert (never["calls"], resumed["calls"]) == (1, 2)
    assert resumed["test_loss"] == never["test_loss"]
    assert resumed["train_curve"] == never["train_curve"]


def test_a_run_that_chooses_a_rate_does_not_look_at_the_test_data(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(400)))
    run = {**runs.COMMON, "size": "pico", "length": 16, "batch_size": 2, "steps": 2, "warmup": 1}
    run |= {"tokenizer": "bytes", "eval_rows": 4, "precision": "fp32", "device": "cpu"}
    run |= {"attention": "exp/sum", "lr": 1e-3, "seed": 1, "phase": "tune"}
    record = runs.train_one(run, str(text), tmp_path / "run", Interrupting(99), False)
    assert record["validation_loss"] > 0
    assert record["test_loss"] is None


def test_the_ladder_shares_its_middle_size_with_the_parts():
    assert {runs.key_of(run, "x") for run in runs.plan_named("ladder", {}, [])([])} <= {
        runs.key_of(run, "x") for run in runs.plan_named("parts", {}, [])([])
    }


def test_the_largest_size_waits_for_tuned_rates_and_then_takes_them_by_the_rule():
    assert runs.plan_named("small", {}, [])([]) == []
    records = run_all("parts", lambda run: best_at(2e-3)(run["lr"]))
    planned = runs.plan_named("small", {}, [])(records)
    assert [run["attention"] for run in planned] == runs.SMALL
    assert {(run["size"], run["lr"], run["seed"]) for run in planned} == {("small", 1e-3, 1)}


# ------------------------------------------------------------------------------------- lines as records


def line(attention, lr, seed, phase, loss):
    run = {**runs.COMMON, "attention": attention, "lr": lr, "seed": seed}
    settings = {key: value for key, value in run.items() if key != "phase"}
    return {
        "key": runs.key_of(run, "d"), "run": {**run, "phase": phase}, "attention": attention, "lr": lr,
        "seed": seed, "phase": phase, "size": run["size"], "tokens": 9_830_400, "diverged": None,
        "status": "finished" if loss else "diverged", "seconds": 30.0, "validation_loss": loss,
        "config": config_from({**settings, "attention": (attention,), "data": "stdlib"}).to_dict(),
        "test_loss": loss, "accuracy": 0.3, "validation_tokens": 10, "test_tokens": 10, "parameters": 14e6,
        "flops_per_token": 8e7, "peak_gpu_bytes": 10**9, "train_curve": [[3, 9.0]], "validation_curve": [],
        "loss_by_position": [[7, 5.0]], "machine": {"versions": {"torch": "2.11.0"}, "gpu": "H200"},
        "workers": 6, "commit": "abc", "date": "2026-11-16", "data": {"name": "prose", "fingerprint": "f"},
    }  # fmt: skip


def test_lines_of_the_gpu_become_the_records_of_a_study():
    lines = [line("exp/sum", rate, 0, "tune", 3 + rate) for rate in (1e-3, 2e-3, 4e-3)]
    lines.append(line("exp/sum", 8e-3, 0, "tune", None) | {"diverged": {"step": 9, "reason": "loss is nan"}})
    lines += [line("exp/sum", 1e-3, seed, "final", 3.0 + seed) for seed in (1, 2, 3)]
    lines.append(line("exp/sum", 2e-3, 1, "final", 9.0))  # of a rate that is no longer the best
    lines += [line("exp/l2", 1e-3, 1, "final", 3.2)]
    study = load_study(Path(__file__).parents[2] / "studies" / "parts_h200")
    record = lines_as_records.records_of(study, lines)
    found = {(label.cell, label.seed): run.value("loss") for label, run in record.labelled()}
    assert found == {("softmax", 1): 4.0, ("softmax", 2): 5.0, ("softmax", 3): 6.0, ("norm l2", 1): 3.2}
    tuned = record.experiments[0].tuning.cells["softmax"]
    assert (tuned.rate, len(tuned.trials), tuned.on_edge) == (1e-3, 4, True)
    assert json.loads(json.dumps(to_plain(record)))["name"] == "parts-h200"


def test_an_experiment_that_tunes_factors_has_the_runs_at_the_tuned_factor():
    study = load_study(ROOT / "studies" / "parts_h200")
    lines, keys = [], set()
    for factors in (False, True):
        plan = runs.plan_named("parts", {}, [], factors=factors)
        while found := [run for run in plan(lines) if runs.key_of(run, "d") not in keys]:
            for run in found:
                keys.add(runs.key_of(run, "d"))
                factor = run.get("output_lr", 1.0)
                loss = 3 + math.log2(run["lr"] / 2e-3) ** 2 + math.log2(factor / 0.5) ** 2
                made = line(run["attention"], run["lr"], run["seed"], run["phase"], loss)
                config = {**made["config"], "output_lr": factor}
                key = runs.key_of(run, "d")
                lines.append({**made, "run": run, "config": config, "key": key})
    record = lines_as_records.records_of(study, lines)
    one, both = record.experiments
    assert {(cell.rate, cell.factor) for cell in one.tuning.cells.values()} == {(2e-3, None)}
    assert {(cell.rate, cell.factor) for cell in both.tuning.cells.values()} == {(2e-3, 0.5)}
    assert {trial.factor for trial in one.tuning.cells["softmax"].trials} == {1.0}
    assert (2e-3, 0.25) in {(trial.rate, trial.factor) for trial in both.tuning.cells["softmax"].trials}
    used = sorted(run.run.config["output_lr"] for run in record.runs.values())
    assert used == [0.5] * 3 * len(both.cells) + [1.0] * 3 * len(one.cells)


def test_the_ladder_asks_for_what_the_plan_trains():
    study = load_study(ROOT / "studies" / "ladder_h200")
    for experiment, size in zip(study.experiments, ("5m", "mini", "60m"), strict=True):
        assert experiment.common["size"] == size
        assert [cell.settings["attention"][0] for cell in experiment.cells] == runs.LADDER
        assert experiment.seeds == runs.FINAL_SEEDS
        shared = experiment.common.keys() & runs.COMMON.keys() - {"eval_every", "size"}
        assert {key: experiment.common[key] for key in shared} == {key: runs.COMMON[key] for key in shared}


def test_where_nothing_was_tuned_the_rate_and_its_source_are_those_of_the_rule():
    lines = runs.read_records(sorted((ROOT / "benchmarks" / "results" / "h200").glob("*.jsonl"))).values()
    runs._register_sizes()
    record = lines_as_records.records_of(load_study(ROOT / "studies" / "ladder_h200"), lines)
    small, middle, large = (experiment.tuning for experiment in record.experiments)
    assert middle.rule == ""
    assert small.rule.startswith("twice the rate tuned at 17M parameters")
    assert large.rule.startswith("half the rate tuned at 17M parameters")
    for cell, tuned in middle.cells.items():
        assert (small.cells[cell].rate, large.cells[cell].rate) == (2 * tuned.rate, tuned.rate / 2)
    assert {cell for cell, tuned in large.cells.items() if tuned.trials} == {"softmax", "order 2"}
    assert len(record.runs) == 63
    assert {run.run.config["data"] for run in record.runs.values()} == {"prose.jsonl.xz"}


def test_a_study_whose_rates_are_not_those_of_the_rule_is_refused():
    rule = lines_as_records.Rule(rates={"exp/sum": 1e-3}, exponent=1, factor=0.5)
    with pytest.raises(ValueError, match=r"the rule gives 0\.001"):
        lines_as_records._by_rule(rule, {"attention": ("exp/sum",), "lr": 2e-3}, [])


def test_the_study_asks_for_what_the_plan_trains():
    experiment = load_study(Path(__file__).parents[2] / "studies" / "parts_h200").experiments[0]
    assert [cell.settings["attention"][0] for cell in experiment.cells] == runs.PARTS
    assert experiment.seeds == runs.FINAL_SEEDS
    assert sorted(experiment.tune.rates) == sorted(runs.RATES)
    shared = experiment.common.keys() & runs.COMMON.keys() - {"eval_every"}
    assert {key: experiment.common[key] for key in shared} == {key: runs.COMMON[key] for key in shared}
