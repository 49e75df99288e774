"""The cells of an experiment: results, differences to the baseline, and cost."""

from __future__ import annotations

import math

from maclaurin.report.formatting import (
    NOTHING,
    Column,
    Entry,
    Table,
    Tone,
    interval,
    many,
    plain,
    signed,
    size,
)
from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.report.statistics import Difference
from maclaurin.wording import duration


def parts_table(outcome: Outcome) -> Table:
    """Mean, difference to the baseline and standing of every cell, best first."""
    unit = f" in {outcome.difference_unit}" if outcome.difference_unit else ""
    columns = (
        Column("cell", "named"),
        Column(outcome.metric, "number", "mean ± standard deviation over the seeds"),
        Column(
            f"minus {outcome.experiment.baseline}{unit}", "number", "seed by seed, with its 95 % interval"
        ),
        Column("against it"),
        Column("seeds", "number"),
    )
    rows = tuple(_parts_row(outcome, outcome.cells[name]) for name in outcome.best_first())
    return Table(f"{outcome.metric} by cell", columns, rows)


def _parts_row(outcome: Outcome, cell: CellOutcome) -> tuple[Entry, ...]:
    decimals = decimals_of(outcome)
    is_baseline = cell.name == outcome.experiment.baseline
    return (
        Entry(cell.name, cell.name, ", ".join(cell.attention)),
        spread_entry(cell, decimals),
        Entry(NOTHING) if is_baseline else difference_entry(outcome.differences[cell.name], decimals),
        standing_entry(outcome, cell),
        Entry(str(len(cell.values)), len(cell.values)),
    )


def decimals_of(outcome: Outcome) -> int:
    """Digits after the point that are above the noise."""
    known = [
        c.spread.deviation for c in outcome.cells.values() if c.spread and c.spread.deviation is not None
    ]
    means = [abs(c.spread.mean) for c in outcome.cells.values() if c.spread]
    if means and min(means) >= 1000:
        return 0
    return 4 if known and max(known) < 5e-4 else 3


def spread_entry(cell: CellOutcome, decimals: int) -> Entry:
    """2.521 ± 0.011."""
    if cell.spread is None:
        return Entry(NOTHING)
    deviation = cell.spread.deviation
    sd = "" if deviation is None else f"± {plain(deviation, decimals)}"
    return Entry(plain(cell.spread.mean, decimals), cell.spread.mean, sd)


def difference_entry(difference: Difference | None, decimals: int) -> Entry:
    """+0.104 [0.081, 0.127]."""
    if difference is None:
        return Entry(NOTHING)
    if math.isinf(difference.value):
        return Entry("diverged", difference.value, tone="bad")
    return Entry(signed(difference.value, decimals), difference.value, interval(difference.bounds, decimals))


def standing_entry(outcome: Outcome, cell: CellOutcome) -> Entry:
    """The standing of a cell, and the runs that did not finish."""
    standing = outcome.standing(cell.name)
    tones: dict[str, Tone] = {"behind": "bad", "ahead": "good", "undecided": "unsure"}
    words = {"one seed": "one seed: no conclusion", "not run": "no finished run"}
    planned = len(outcome.experiment.seeds)
    asides = []
    if cell.diverged:
        asides.append(f"diverged in {len(cell.diverged)} of {planned}")
    if cell.crashed:
        asides.append(f"crashed in {len(cell.crashed)} of {planned}")
    text = words.get(standing, standing)
    return Entry(text, text, f"({'; '.join(asides)})" if asides else "", tones.get(standing, "muted"))


def cost_table(outcome: Outcome) -> Table:
    """The cost of each cell: means over its finished runs."""
    columns = (
        Column("cell"),
        Column("tokens/s", "number", "of training alone on the machine, a few steps after the study"),
        Column("state", "number", "recurrent state of all layers in fp32"),
        Column(
            "kept", "number", "at the trained length, in fp32: the state, or keys and values where it grows"
        ),
        Column("parameters", "number"),
        Column("training FLOPs", "number"),
        Column("time", "number", "with evaluation, while other runs share the machine"),
        Column("peak GPU memory", "number"),
    )
    rows = []
    for cell in outcome.cells.values():
        if not cell.finished():
            continue
        speed = cell.tokens_per_second
        memory, seconds = cell.average("peak_gpu_bytes"), cell.average("seconds")
        parameters, flops = cell.average("parameters"), cell.average("training_flops")
        state, kept = cell.state_bytes, cell.memory_bytes
        rows.append(
            (
                Entry(cell.name, cell.name),
                Entry(many(speed), speed),
                Entry(
                    "grows" if state is None else size(state),
                    math.inf if state is None else state,
                ),
                Entry(NOTHING if kept is None else size(kept), kept),
                Entry(many(parameters), parameters),
                Entry(NOTHING if flops is None else f"{flops:.2e}", flops),
                Entry(NOTHING if seconds is None else duration(seconds), seconds),
                Entry(size(memory), memory),
            )
        )
    return Table("cost by cell", columns, tuple(rows))
