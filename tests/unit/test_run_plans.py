"""The plan of many runs on one GPU (benchmarks/h200_runs.py) and their corpus (benchmarks/corpus.py)."""

import importlib.util
import sys
from pathlib import Path

import pytest


def load(name):
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


runs, corpus = load("h200_runs"), load("corpus")


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
    tuned = [record["run"] for record in records[:5]]
    final = [record["run"] for record in records[5:]]
    assert sorted(run["lr"] for run in tuned) == sorted(runs.RATES)
    assert {run["seed"] for run in tuned} == {0}
    assert [(run["lr"], run["seed"]) for run in final] == [(2e-3, 1), (2e-3, 2), (2e-3, 3)]


@pytest.mark.parametrize(
    ("loss_of", "beyond"), [(lambda r: -r, [0.016, 0.032]), (lambda r: r, [2.5e-4, 1.25e-4])]
)
def test_the_grid_is_extended_while_the_best_rate_is_on_its_edge(loss_of, beyond):
    records = finished(runs.plan_named("parts", {}, ["exp/l2"]), loss_of)
    assert [record["run"]["lr"] for record in records[5:7]] == beyond
    assert {record["run"]["lr"] for record in records[7:]} == {beyond[-1]}


def test_a_diverged_run_is_never_the_best():
    records = finished(
        runs.plan_named("parts", {}, ["exp/l2"]), lambda rate: None if rate > 3e-3 else 1 - rate
    )
    assert {record["run"]["lr"] for record in records[5:]} == {2e-3}


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
