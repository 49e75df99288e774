"""Figures and tables of docs/convert.md, from the results of conversion.py and recovery.py.

    python benchmarks/draw_conversion.py docs/figures/conversion

Writes speed.svg, memory.svg, recovery.svg and table.md; every number in them is in benchmarks/results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from maclaurin.report.figure import DASHES, INK, MARKERS, PALETTE, STYLE, WIDTH

_FIGURES = ("original", "window_only", "converted", "recovered", "recovered_tail_off")
RESULTS = Path(__file__).parent / "results"
#: title of a trained model, by its arm in recovery.json
ARMS = {
    "softmax": "the original, trained alike",
    "tail": "window and order-2 tail, trained",
    "window": "window alone, trained alike",
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("give the folder to write to: python benchmarks/draw_conversion.py docs/figures/conversion")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    speeds = json.loads((RESULTS / "conversion.json").read_text())["cuda"]
    recoveries = json.loads((RESULTS / "recovery.json").read_text())
    with matplotlib.rc_context(STYLE):
        for name, figure in (
            ("speed", _against_context(speeds["found"], "tokens_per_second_recorded", 1, "tokens/s")),
            ("memory", _against_context(speeds["found"], "cache_bytes", 1e6, "cache, MB")),
            ("recovery", _perplexities(next(iter(recoveries.values())))),
        ):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    lines = list(_speed_table(speeds))
    for name, found in recoveries.items():
        lines += ["", *_recovery_table(name, found)]
    (folder / "table.md").write_text("\n".join(lines) + "\n")


def _against_context(found: dict[str, Any], what: str, unit: float, label: str) -> Figure:
    figure = Figure(figsize=(WIDTH * 0.7, 2.8), layout="constrained")
    axes = figure.add_subplot()
    contexts = [int(context) for context in found["original"]]
    for place, (name, by_context) in enumerate(found.items()):
        if any(figures[what] is None for figures in by_context.values()):
            continue  # a step that cannot be recorded
        values = [figures[what] / unit for figures in by_context.values()]
        look: dict[str, Any] = {"color": PALETTE[place], "linestyle": DASHES[place], "marker": MARKERS[place]}
        axes.plot(contexts, values, markersize=4, label=_named(name).strip("`"), **look)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_xlabel("tokens read before")
    axes.set_ylabel(label)
    figure.legend(loc="outside lower center", ncols=1)
    return figure


def _perplexities(found: dict[str, Any]) -> Figure:
    """Perplexity by length of the text: untrained in grey, then the three trained models."""
    figure = Figure(figsize=(WIDTH * 0.7, 3.0), layout="constrained")
    axes = figure.add_subplot()
    tail = found["arms"]["tail"]["perplexity"]
    bars = {
        "the original": ("#bfc6cc", [by["original"] for by in tail.values()]),
        "window alone": ("#8d979f", [by["window_only"] for by in tail.values()]),
        "window and order-2 tail": ("#5d6770", [by["converted"] for by in tail.values()]),
    }
    for place, (arm, name) in enumerate(ARMS.items()):
        measured = found["arms"][arm]["perplexity"].values()
        bars[name] = (PALETTE[place], [by["recovered"] for by in measured])
    width = 0.8 / len(bars)
    for place, (name, (colour, values)) in enumerate(bars.items()):
        at = [n + (place - (len(bars) - 1) / 2) * width for n in range(len(values))]
        drawn = axes.bar(at, values, width * 0.92, color=colour, label=name)
        axes.bar_label(drawn, fmt="%.0f", fontsize=6, color=INK)
    axes.set_xticks(range(len(tail)), [f"{int(length):,} tokens" for length in tail])
    axes.set_ylabel("perplexity")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _speed_table(speeds: dict[str, Any]) -> Iterator[str]:
    machine, shape, dtype = speeds["machine"], speeds["shape"], speeds["dtype"].removeprefix("torch.")
    yield (
        f"A model of SmolLM2-135M's shape ({shape['num_hidden_layers']} layers), {dtype}, one "
        f"text; {machine['gpu']}, torch {_torch(machine)}, {machine['date'][:10]}."
    )
    yield ""
    yield "| attention | tokens read before | cache, MB | tokens/s, recorded | tokens/s, step by step |"
    yield "|---|---:|---:|---:|---:|"
    for name, by_context in speeds["found"].items():
        for context, figures in by_context.items():
            yield (
                f"| {_named(name)} | {int(context):,} | {figures['cache_bytes'] / 1e6:,.1f} "
                f"| {_whole(figures['tokens_per_second_recorded'])} "
                f"| {_whole(figures['tokens_per_second'])} |"
            )


def _recovery_table(name: str, found: dict[str, Any]) -> Iterator[str]:
    settings, arms, machine = found["settings"], found["arms"], found["machine"]
    tokens = settings["batch_size"] * settings["length"]
    yield (
        f"{name}: {settings['match_steps']} steps of matching attention and {settings['text_steps']} of next "
        f"tokens, {tokens:,} tokens each; {settings['about']}. {machine['gpu']}, "
        f"{arms['tail']['seconds_of_training']:.0f} s of training, in parallel with the two others, "
        f"{machine['date'][:10]}."
    )
    for kind, unit in (("perplexity", "tokens"), ("recall", "tokens ago")):
        yield ""
        yield (
            f"| {kind}, {unit} | original | window alone | with tail | trained | tail switched off "
            "| window alone, trained | original, trained | gap closed | among trained |"
        )
        yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
        for at, by in arms["tail"][kind].items():
            own = [by[name] for name in _FIGURES]
            alone, softmax = (arms[arm][kind][at]["recovered"] for arm in ("window", "softmax"))
            shares = [_share(found["gap_closed"][kind][at][which]) for which in ("trained", "among_trained")]
            cells = [*(f"{value:.2f}" for value in (*own, alone, softmax)), *shares]
            yield f"| {int(at):,} | " + " | ".join(cells) + " |"


def _torch(machine: dict[str, Any]) -> str:
    """Older results have torch's version beside those of other packages."""
    return machine.get("torch") or machine["versions"]["torch"]


def _named(attention: str) -> str:
    return "the original (transformers)" if attention == "original" else f"`{attention}`"


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


if __name__ == "__main__":
    main()
