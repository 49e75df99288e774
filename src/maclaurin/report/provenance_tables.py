"""Where figures, tables and runs come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from maclaurin.report.formatting import NOTHING, Column, Entry, Table, in_one_line
from maclaurin.report.outcome import Outcome
from maclaurin.study.run_record import RunRecord, StudyRecord

FACTS = ("commit", "data", "machine", "versions", "date")


@final
@dataclass(frozen=True)
class Source:
    """A figure or table of the page, and the runs it was made from."""

    label: str
    title: str
    records: tuple[RunRecord, ...]


def figures_table(sources: Sequence[Source]) -> Table:
    """One line per figure and table of the page."""
    columns = (
        Column("what"),
        Column("title", "prose"),
        Column("runs", "number"),
        Column("seeds"),
        *(Column(name, "prose") for name in FACTS),
        Column("keys", "folded"),
    )
    rows = []
    for source in sources:
        records = source.records
        seeds = sorted({record.run.seed for record in records})
        keys = list(dict.fromkeys(record.key[:12] for record in records))
        rows.append(
            (
                Entry(source.label),
                Entry(source.title),
                Entry(str(len(records)), len(records)),
                Entry(", ".join(map(str, seeds)) or NOTHING),
                *(Entry(_all(name, records)) for name in FACTS),
                Entry(" ".join(keys), len(keys), f"{len(keys)} keys" if keys else ""),
            )
        )
    return Table("where each figure and table comes from", columns, tuple(rows))


def _all(name: str, records: tuple[RunRecord, ...]) -> str:
    found = sorted({in_one_line(record.provenance.get(name)) for record in records} - {NOTHING})
    if name == "date" and len(found) > 1:
        return f"{found[0]} – {found[-1]}"
    return "; ".join(found) or NOTHING


def runs_table(study: StudyRecord) -> Table:
    """Every run with its provenance."""
    columns = (
        Column("run", "code"),
        Column("experiment"),
        Column("cell"),
        Column("seed", "number"),
        Column("status"),
        Column("torch"),
        Column("numerics", "number"),
        *(Column(name, "prose") for name in FACTS),
    )
    rows = tuple(
        (
            Entry(record.key[:16], record.key),
            Entry(label.experiment, label.experiment),
            Entry(label.cell, label.cell),
            Entry(str(label.seed), label.seed),
            Entry(record.status, record.status),
            Entry(record.run.torch),
            Entry(str(record.run.numerics), record.run.numerics),
            *(Entry(in_one_line(record.provenance.get(name))) for name in FACTS),
        )
        for label, record in study.labelled()
    )
    return Table("every run", columns, rows)


def mixtures(outcome: Outcome) -> list[str]:
    """Sentences on finished runs of one experiment that differ in more than their cell and seed."""
    done = [record for record in outcome.records if record.status == "finished"]
    readers: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
        ("versions of torch or of our numerics", lambda r: f"{r.run.torch} {r.run.numerics}"),
        ("machines", lambda r: in_one_line(r.provenance.get("machine"))),
    )
    sentences = []
    for what, read in readers:
        found = {read(record) for record in done} - {NOTHING}
        if len(found) > 1:
            sentences.append(f"These runs come from {len(found)} {what}.")
    by_seed: dict[int, set[str]] = {}
    for record in done:
        by_seed.setdefault(record.run.seed, set()).add(record.run.data)
    if any(len(found) > 1 for found in by_seed.values()):
        names = sorted({in_one_line(record.provenance.get("data")) for record in done})
        sentences.append(f"Runs with the same seed did not all see the same version of {', '.join(names)}.")
    return sentences
