"""Pages of measured memories: the memory.json of memory.py and the results of kvpress_comparison.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maclaurin.conversion.memory_page import MemoryPage, Point, memories_of


def page_of_bench(
    found: Mapping[str, Any],
    goal: str,
    *,
    distance: int = 4096,
    length: int = 8192,
    source: str = "memory.json",
) -> MemoryPage:
    """One goal of memory.py: every arm with its bytes, at one distance and one length."""
    chosen = found["chosen"][goal]
    budget = chosen["budget"]
    points = []
    for name, arm in found["arms"].items():
        of_goal = (
            name == "original" or name == goal or name.startswith(f"{goal}:") or name == f"{goal}, trained"
        )
        if not of_goal:
            continue
        recall = arm.get(f"recall {distance}", {})
        size = budget["original"] if name == "original" else arm.get("bytes", chosen["plan"]["bytes"])
        label = chosen["plan"]["name"] if name == goal else name.removeprefix(f"{goal}: ")
        kind = label if name.startswith(f"{goal}:") else chosen["plan"]["kind"]  # a rival is its kind
        points.append(
            Point(
                "full softmax" if name == "original" else kind,
                label,
                size,
                arm.get(f"perplexity {length}"),
                recall.get("accuracy"),
                recall.get("low"),
                recall.get("high"),
            )
        )
    findings = tuple(line for line in found.get("summary", ()) if line.startswith((goal, "original")))
    return MemoryPage(
        title=f"SmolLM2-135M, {goal}",
        facts=f"{budget['bytes']:,} bytes at {budget['at']:,} tokens; recall at {distance:,}, perplexity at "
        f"{length:,} tokens, on text and questions not used for calibration.",
        findings=findings,
        points=tuple(points),
        recall_title=f"recall from {distance:,} tokens ago",
        source=source,
        scores=chosen["heads"]["score"],
        memories=memories_of(chosen["attention"], len(chosen["heads"]["score"][0])),
    )


def page_of_presses(written: Mapping[str, Any], source: str = "kvpress.json") -> MemoryPage:
    """The results of kvpress_comparison.py: methods of kvpress and ours at the same bytes."""
    whole = written["bytes"]
    points = [
        Point(
            row["kind"],
            name,
            round(row["share"] * whole),
            row["perplexity"],
            row["accuracy"],
            row["low"],
            row["high"],
        )
        for name, row in written["methods"].items()
    ]
    best = max((p for p in points if p.method == "kvpress"), key=lambda p: p.recall or 0.0)
    return MemoryPage(
        title="SmolLM2-135M compared with kvpress",
        facts=f"{written['questions']} questions after {written['tokens']:,} tokens, and perplexity of "
        "what follows so much of a novel.",
        findings=(f"The best method of kvpress in recall is {best.name}: {best.recall:.3f}.",),
        points=tuple(points),
        recall_title=f"recall from {written['distance']:,} tokens ago",
        source=source,
    )
