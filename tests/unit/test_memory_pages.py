"""Pages of a chosen memory, and of the memory benchmarks (benchmarks/memory_pages.py)."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from maclaurin.conversion.conversion_record import (
    ChosenPlan,
    MeasuredOriginal,
    MeasuredPlan,
    MemoryBudget,
    MemoryChoice,
)
from maclaurin.conversion.memory_page import page_of_choice

FILE = Path(__file__).parents[2] / "benchmarks" / "memory_pages.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_memory_pages", FILE)
pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pages)


def bench_results():
    """What benchmarks/memory.py writes, for a model of one layer with two heads."""
    recall = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "log_odds_less_prior": 1.0}
    return {
        "chosen": {
            "30% at 4k": {
                "attention": ["0: exp/sum; 1: poly(0)+window(16,sinks=4,kept=48)/sum"],
                "budget": {"bytes": 300, "at": 4096, "constant": False, "original": 1000},
                "plan": {
                    "name": "1 heads exp/sum, others 68 exact keys",
                    "bytes": 299,
                    "cost": 0.1,
                    "kind": "every key in some heads",
                },
                "heads": {"score": [[0.9, 0.1]]},
            }
        },
        "arms": {
            "original": {"recall 4096": recall, "perplexity 8192": 50.0},
            "30% at 4k": {"recall 4096": recall, "perplexity 8192": 51.0},
            "30% at 4k: window": {"bytes": 298, "perplexity 8192": 80.0},
            "10% at 8k, trained": {"perplexity 8192": 49.0},
        },
        "summary": ["original  4096: 0.5", "10% at 8k, trained"],
    }


def test_a_bench_is_drawn_by_the_same_page():
    page = pages.page_of_bench(bench_results(), "30% at 4k")
    assert {(p.method, p.bytes) for p in page.points} == {
        ("full softmax", 1000), ("every key in some heads", 299), ("window", 298)
    }  # fmt: skip
    assert page.findings == ("original  4096: 0.5",)
    assert page.memories == [["exp/sum", "poly(0)+window(16,sinks=4,kept=48)/sum"]]
    html = page.html()
    assert "after the whole prompt was read" not in html
    assert "<svg" in html


def test_presses_are_drawn_at_their_bytes():
    row = {"accuracy": 0.4, "low": 0.3, "high": 0.5, "perplexity": 60.0, "share": 0.25}
    methods = {
        "KeyDiffPress": {**row, "kind": "kvpress"},
        "ours, pressed": {**row, "kind": "every key in some heads"},
    }
    page = pages.page_of_presses(
        {"bytes": 1000, "questions": 60, "tokens": 1280, "distance": 1024, "methods": methods}
    )
    assert [p.bytes for p in page.points] == [250, 250]
    assert "KeyDiffPress: 0.400" in page.findings[0]
    assert "after the whole prompt was read" in page.html()


def test_the_report_of_the_shipped_results_has_every_table_and_page(tmp_path):
    pages.write_report(tmp_path)
    tables = (tmp_path / "tables.md").read_text()
    headings = [line for line in tables.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Nothing trained", "## Other memories of the same bytes", "## Before training", "## Trained",
        "## Speed", "## Compared with kvpress",
    ]  # fmt: skip
    assert "| KeyDiff (kvpress), after the prompt |" in tables
    html = (tmp_path / "index.html").read_text()
    for name, title in {"30-at-4k": "30% at 4k", "constant-53-MB": "53 MB", "kvpress": "kvpress"}.items():
        assert title in html
        assert (tmp_path / "figures" / f"{name}.svg").read_text().startswith("<svg")


def test_recall_is_relative_to_what_the_original_has_above_chance():
    arm, original = ({"recall 1024": {"accuracy": share}} for share in (0.4, 0.55))
    assert pages._recall(original, None, 1024) == "0.550"
    assert pages._recall(arm, original, 1024) == "0.400 (50 %)"
    assert pages._recall({"recall 1024": {"accuracy": 0.2}}, original, 1024) == "0.200 (0 %)"
    assert pages._recall({}, original, 1024) == "–"


ATTENTION = ["0: exp/sum; 1: poly(0)+window(16,sinks=4,kept=48)/sum"]


def chosen():
    plan = MeasuredPlan("best", 290, 1.1, 0.5, 0.75, 0.1, 0.01, 64, "every key in some heads")
    plain = MeasuredPlan("windows", 295, 1.4, -1.0, 0.25, 0.4, 0.05, 12, "window")
    return MemoryChoice(
        budget=MemoryBudget(300, 4096, False, 1000),
        plan=ChosenPlan("best", 290, 0.1),
        original=MeasuredOriginal(1.0, 0.7, 0.8, 64),
        measured=(plan,),
        heads={"score": [[0.9, 0.1]]},
        references=(plain,),
    )


def test_a_choice_is_drawn_with_its_references_and_shares_of_right_answers():
    page = page_of_choice("model", chosen(), ATTENTION)
    assert page.recall_title == "share of right answers"
    original, best, windows = page.points
    assert (original.recall, best.recall, windows.recall) == (0.8, 0.75, 0.25)
    assert (windows.low, windows.high) == pytest.approx((0.0889, 0.5323), abs=1e-4)  # Wilson's, of 3 in 12
    assert windows.high - windows.low > best.high - best.low, "fewer questions"
    assert [p.is_reference for p in page.points] == [False, False, True]
    assert (windows.method, windows.questions, windows.log_odds) == ("window", 12, -1.0)
    assert "0.75 (0.63 … 0.84) of the answers right" in page.findings[1]
    assert "References are simple plans" in page.html()


def test_a_record_without_counted_answers_is_drawn_by_log_odds():
    old = chosen()
    plan = dataclasses.replace(old.measured[0], recall=None, questions=None)
    old = dataclasses.replace(old, original=MeasuredOriginal(1.0, 0.7), measured=(plan,), references=())
    page = page_of_choice("model", old, ATTENTION)
    assert page.recall_title == "log-odds of the right answer"
    assert [p.recall for p in page.points] == [0.7, 0.5]
    assert all(p.low is None for p in page.points)
    assert "References" not in page.html()
