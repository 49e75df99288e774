"""Where each figure and table comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from maclaurin.report.numbers import listed
from maclaurin.report.tables import Column, Entry, Table
from maclaurin.study.record import RunRecord

FACTS = ("commit", "code", "data", "machine", "versions", "date")


@final
@dataclass
class Register:
    """Numbers figures and tables as they appear, and remembers the runs behind each."""

    items: list[tuple[str, str, tuple[RunRecord, ...]]] = field(default_factory=list)

    def figure(self, title: str, runs: Iterable[RunRecord]) -> str:
        """Figure 3."""
        return self._add("Figure", title, runs)

    def table(self, title: str, runs: Iterable[RunRecord]) -> str:
        """Table 2."""
        return self._add("Table", title, runs)

    def _add(self, kind: str, title: str, runs: Iterable[RunRecord]) -> str:
        label = f"{kind} {1 + sum(name.startswith(kind) for name, *_ in self.items)}"
        self.items.append((label, title, tuple(runs)))
        return label


def told(value: Any) -> str:
    """Any fact in one line."""
    if value is None or value == "":
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {told(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(told(part) for part in value)
    return str(value)


def brief(name: str, value: Any) -> str:
    """The same, with long digests cut."""
    if name == "data" and isinstance(value, Mapping):
        return " ".join(_cut(told(part)) for part in value.values())
    return _cut(told(value)) if name in ("commit", "code") else told(value)


def _cut(text: str) -> str:
    long = len(text) > 20 and all(letter in "0123456789abcdef" for letter in text)
    return text[:12] if long else text


def figures_table(register: Register) -> Table:
    """One line per figure and table of the page."""
    columns = (
        Column("what"),
        Column("title", "prose"),
        Column("experiment", "prose"),
        Column("runs", "number"),
        Column("seeds"),
        *(Column(name, "prose") for name in FACTS),
        Column("keys", "folded"),
    )
    rows = []
    for label, title, runs in register.items:
        seeds = sorted({run.seed for run in runs})
        facts = (_all(name, runs) for name in FACTS)
        keys = list(dict.fromkeys(run.key[:12] for run in runs))
        rows.append(
            (
                Entry(label),
                Entry(title),
                Entry(", ".join(dict.fromkeys(run.experiment for run in runs)) or "–"),
                Entry(str(len(runs)), len(runs)),
                Entry(", ".join(map(str, seeds)) or "–"),
                *(Entry(fact) for fact in facts),
                Entry(" ".join(keys), len(keys), f"{len(keys)} keys" if keys else ""),
            )
        )
    return Table("where each figure and table comes from", columns, tuple(rows))


def _all(name: str, runs: tuple[RunRecord, ...]) -> str:
    found = sorted({brief(name, run.provenance.get(name)) for run in runs} - {"–"})
    if name == "date" and len(found) > 1:
        return f"{found[0]} – {found[-1]}"
    return "; ".join(found) or "–"


def runs_table(runs: Iterable[RunRecord]) -> Table:
    """Every run with all that is known of where it came from."""
    columns = (
        Column("run", "code"),
        Column("experiment"),
        Column("cell"),
        Column("seed", "number"),
        Column("status"),
        *(Column(name, "prose") for name in FACTS),
    )
    rows = tuple(
        (
            Entry(run.key[:16], run.key),
            Entry(run.experiment, run.experiment),
            Entry(run.cell, run.cell),
            Entry(str(run.seed), run.seed),
            Entry(run.status, run.status),
            *(Entry(brief(name, value := run.provenance.get(name)), told(value)) for name in FACTS),
        )
        for run in runs
    )
    return Table("every run", columns, rows)


def mixtures(runs: Iterable[RunRecord]) -> list[str]:
    """Sentences on finished runs of one experiment that differ in more than their cell and seed."""
    done = [run for run in runs if run.status == "finished"]
    sentences = []
    for name, what in (("code", "versions of the code"), ("machine", "machines")):
        found = {told(run.provenance.get(name)) for run in done} - {"–"}
        if len(found) > 1:
            sentences.append(f"These runs come from {len(found)} {what}.")
    prints: dict[tuple[str, int], set[str]] = {}
    for run in done:
        data = run.provenance.get("data")
        if isinstance(data, Mapping):
            prints.setdefault((told(data.get("name")), run.seed), set()).add(told(data.get("fingerprint")))
    mixed = sorted({name for (name, _), found in prints.items() if len(found) > 1})
    if mixed:
        sentences.append(f"Not all runs with one seed saw the same state of {listed(mixed)}.")
    return sentences
