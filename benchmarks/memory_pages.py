"""Pages, tables and figures of measured memories.

    python benchmarks/memory_pages.py FOLDER        (`make docs` writes them to build/reports/memory)

They are made from the memory.json of memory.py and the kvpress.json of kvpress_comparison.py in
benchmarks/results; docs/memory.md shows the tables.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maclaurin.conversion.memory_page import MemoryPage, Point, bytes_figure, html_of, memories_of
from maclaurin.report.formatting import Column, Entry, Table, markdown, plain, share

RESULTS = Path(__file__).parent / "results"
#: a right answer is one of four
CHANCE = 0.25
DISTANCES, LENGTHS = (256, 1024, 4096), (1024, 4096, 8192)
PRESSED, LIMITED = "after the prompt", "limited while reading"


def write_report(folder: Path, results: Path = RESULTS) -> None:
    """One page for goals whose memory was chosen by measuring and for kvpress; tables.md; figures."""
    memory, presses = (json.loads((results / name).read_text()) for name in ("memory.json", "kvpress.json"))
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name in ("memory.json", "kvpress.json"):
        shutil.copyfile(results / name, folder / name)
    pages = {**pages_of_bench(memory), "kvpress": page_of_presses(presses)}
    (folder / "index.html").write_text(html_of(list(pages.values()), "Small memories"), encoding="utf-8")
    for name, page in pages.items():
        (folder / "figures" / f"{name}.svg").write_text(bytes_figure(page).svg, encoding="utf-8")
    (folder / "tables.md").write_text(tables_md(memory, presses), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------ pages


def pages_of_bench(found: Mapping[str, Any], source: str = "memory.json") -> dict[str, MemoryPage]:
    """The pages of memory.py by file name."""
    goals = [goal for goal in found.get("chosen", {}) if goal in found["arms"]]
    return {
        goal.replace(" ", "-").replace("%", ""): page_of_bench(found, goal, source=source) for goal in goals
    }


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


# ----------------------------------------------------------------------------------------------------- tables


def tables_md(memory: Mapping[str, Any], presses: Mapping[str, Any]) -> str:
    """Every table under its heading."""
    tables = (*_tables_of_bench(memory), _speeds(memory["speed"]), _presses(presses))
    parts = [f"## {table.title}\n\n{markdown(table)}" for table in tables]
    return "# Small memories of SmolLM2-135M\n\n" + "\n".join(parts)


def _tables_of_bench(found: Mapping[str, Any]) -> Iterator[Table]:
    arms, chosen = found["arms"], found["chosen"]
    measured = [goal for goal in chosen if goal in arms]
    plans = {goal: chosen[goal]["plan"]["name"] for goal in measured}
    yield _recalls("Nothing trained", {"original": ""} | plans, arms, "original")
    rivals = {name: "" for name in arms for goal in measured if name.startswith(f"{goal}: ")}
    yield _recalls("Other memories of the same bytes", rivals, arms, "original", DISTANCES[1:])
    before = {name: "" for name in arms if name.endswith(", untrained")}
    yield _recalls("Before training", before, arms, "original")
    trained = {name: _training(arms[name]) for name in arms if name.endswith(", trained")}
    order = sorted(trained, key=lambda name: name != "original, trained")
    yield _recalls("Trained", {name: trained[name] for name in order}, arms, "original, trained")


def _training(arm: Mapping[str, Any]) -> str:
    training = arm["training"]
    return f"{training['kl_steps']} steps, {training['seconds']:.0f} s"


def _recalls(
    title: str,
    names: Mapping[str, str],
    arms: Mapping[str, Any],
    reference: str,
    distances: Sequence[int] = DISTANCES,
) -> Table:
    """A row for each arm: recall with the share of the reference's above chance, and relative perplexity."""
    columns = [Column("memory", "prose")]
    columns += [Column(f"recall at {distance:,}", "number") for distance in distances]
    columns += [Column(f"perplexity at {length:,}", "number") for length in LENGTHS]
    rows = []
    for name, aside in names.items():
        arm, is_own = arms[name], name == reference
        of = None if is_own else arms[reference]
        row = [Entry(name, aside=f"({aside})" if aside else "")]
        row += [Entry(_recall(arm, of, distance)) for distance in distances]
        row += [Entry(_perplexity(arm, of, length)) for length in LENGTHS]
        rows.append(tuple(row))
    return Table(title, tuple(columns), tuple(rows))


def _recall(arm: Mapping[str, Any], reference: Mapping[str, Any] | None, distance: int) -> str:
    found = arm.get(f"recall {distance}")
    if found is None:
        return "–"
    if reference is None:
        return plain(found["accuracy"])
    above = (found["accuracy"] - CHANCE) / (reference[f"recall {distance}"]["accuracy"] - CHANCE)
    return f"{plain(found['accuracy'])} ({share(max(0.0, above))})"


def _perplexity(arm: Mapping[str, Any], reference: Mapping[str, Any] | None, length: int) -> str:
    found = arm.get(f"perplexity {length}")
    if found is None or reference is None:
        return plain(found, 2)
    return f"× {found / reference[f'perplexity {length}']:.4f}"


def _speeds(found: Mapping[str, Any]) -> Table:
    """Rows of times, with a column for each memory."""
    first = "reading 1 x 8192, "
    names = [name.removeprefix(first) for name in found if name.startswith(first)]
    steps = "tokens/s after 65536, "
    theirs = found[f"{steps}transformers, static cache, recorded"]
    rows = [
        (
            Entry("tokens/s after 65,536 tokens", aside=f"(transformers' static cache: {theirs:.0f})"),
            *(Entry(f"{found[steps + name]['tokens_per_second']:.0f}") for name in names),
        ),
        (
            Entry("megabytes of the cache then"),
            *(Entry(f"{found[steps + name]['cache_bytes'] / 1e6:,.1f}") for name in names),
        ),
    ]
    for text, title in {
        "8 x 8192": "8 × 8,192", "1 x 8192": "1 × 8,192", "1 x 65536": "1 × 65,536"
    }.items():  # fmt: skip
        times = [found[f"reading {text}, {name}"] for name in names]
        rows.append(
            (Entry(f"ms to read {title} tokens"), *(Entry(f"{1e3 * row['seconds']:.0f}") for row in times))
        )
    columns = (Column("", "prose"), *(Column(name, "number") for name in names))
    return Table("Speed", columns, tuple(rows))


def _presses(written: Mapping[str, Any]) -> Table:
    """Recall with its interval, log-odds and perplexity of every method, with a column for each share."""
    columns = (Column("method", "prose"), Column("a quarter of the bytes"), Column("an eighth"))
    by_name: dict[str, dict[float, str]] = {}
    for name, row in written["methods"].items():
        asked = "" if row["questions"] == written["questions"] else f", {row['questions']} questions"
        by_name.setdefault(_method(name) + asked, {})[row["share"]] = _cell(row)
    original = by_name.pop("original")[1.0]
    rows = [(Entry("original, every key"), Entry(original), Entry(original))]
    rows += [
        (Entry(name), Entry(cells.get(0.25, "–")), Entry(cells.get(0.125, "–")))
        for name, cells in by_name.items()
    ]
    return Table("Compared with kvpress", columns, tuple(rows))


def _cell(row: Mapping[str, Any]) -> str:
    odds = f"{row['log_odds']:+.2f}".replace("-", "−")
    return f"{row['accuracy']:.3f} ({row['low']:.2f} … {row['high']:.2f}), {odds}; {row['perplexity']:.2f}"


def _method(name: str) -> str:
    """KeyDiffPress 0.25 → KeyDiff (kvpress), after the prompt; Maclaurin 25%: …, pressed … → ours, …"""
    if name == "original":
        return name
    how = LIMITED if LIMITED in name else PRESSED
    if name.startswith("Maclaurin"):
        plan = name.partition(": ")[2].partition(" exp/sum")[0]
        return f"ours, {plan} with every key, {how}"
    return f"{name.partition('Press')[0]} (kvpress), {how}"


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
