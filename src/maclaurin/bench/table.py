"""A benchmark as tables and sentences, from its record alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from maclaurin.bench.bench_record import BenchRecord, CaseRecord, Figures, Verdict
from maclaurin.report.formatting import NOTHING, Column, Entry, Table, counted, listed, markdown, power, size

_MARKS = {True: "✓", False: "✗", None: NOTHING}


def line_of(case: CaseRecord) -> str:
    """One case in one line."""
    if case.status != "measured":
        return f"{case.name}: {case.own.note}"
    parts = [f"{case.name}: {_times(case.own)}"]
    if case.share_of_copy is not None:
        parts.append(f"{100 * case.share_of_copy:.0f} % of a device copy")
    parts += [f"{peer.name} {_times(peer)}" for peer in case.peers.values() if peer.forward_ms is not None]
    return "; ".join([*parts, *_remarks(case)])


def tables_of(record: BenchRecord) -> list[Table]:
    """One for each group of cases, in the order they were measured."""
    groups: dict[str, list[CaseRecord]] = {}
    for case in record.cases:
        groups.setdefault(case.group, []).append(case)
    return [_without_empty_columns(_table(group, cases)) for group, cases in groups.items()]


def heading(record: BenchRecord) -> str:
    """The machine, versions and units."""
    made = record.made
    where = made.get("gpu") if record.device == "cuda" else made.get("processor")
    dtypes = listed(sorted({case.dtype for case in record.cases})) or "nothing yet"
    shapes = "" if record.full_shapes else ", small shapes"
    return (
        f"{where}, {dtypes}, causal{shapes}; torch {_torch(made)}, commit {made.get('commit') or 'unknown'}, "
        f"{made.get('date', '')[:10]}. Forward and forward+backward in ms, medians; memory beyond inputs and "
        "outputs."
        + (
            " CPU µs: from a forward call until it returns; after a pause, per call of ten."
            if _has_issue_times(record)
            else ""
        )
    )


def _torch(made: Mapping[str, Any]) -> str | None:
    """Older records have torch's version beside those of other packages."""
    return made.get("torch") or made.get("versions", {}).get("torch")


def _has_issue_times(record: BenchRecord) -> bool:
    return any(case.own.issue_us is not None for case in record.cases)


def summary(record: BenchRecord) -> list[str]:
    """How many targets are reached, which results are wrong, which cases were left out."""
    verdicts = [verdict for case in record.cases for verdict in case.verdicts]
    counts = [sum(v.reached is mark for v in verdicts) for mark in (True, False, None)]
    lines = [f"Of {counted(len(verdicts), 'target')}, {counts[0]} reached, {counts[1]} missed"]
    lines[0] += f", {counts[2]} without a verdict." if counts[2] else "."
    if record.roofs is not None:
        roofs = record.roofs
        lines.append(
            f"A copy moves {roofs.copy_bytes_per_s / 1e9:,.0f} GB/s, a product of matrices in "
            f"{roofs.matmul_dtype} does {roofs.matmul_flops_per_s / 1e12:.3g} TFLOP/s."
        )
    lines += [f"{case.name}: {case.own.note}" for case in record.cases if case.status != "measured"]
    if record.left_out:
        lines.append(f"Left out: {'; '.join(record.left_out)}.")
    return lines


def markdown_of(record: BenchRecord) -> str:
    """Everything as a page of the docs."""
    parts = [heading(record), *summary(record)]
    for table in tables_of(record):
        parts += [f"### {table.title}", markdown(table).rstrip("\n")]
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------- one table


def _table(group: str, cases: Iterable[CaseRecord]) -> Table:
    columns = (
        Column("case", "code"),
        Column("program"),
        Column("error", "number"),
        Column("first call s", "number"),
        Column("forward", "number"),
        Column("forward+backward", "number"),
        Column("CPU µs", "number"),
        Column("memory", "number"),
        Column("peers", "prose"),
        Column("targets", "prose"),
    )
    return Table(group, columns, tuple(_row(case) for case in cases))


def _without_empty_columns(table: Table) -> Table:
    used = [
        place
        for place in range(len(table.columns))
        if any(row[place].text not in ("", NOTHING) for row in table.rows)
    ]
    rows = tuple(tuple(row[place] for place in used) for row in table.rows)
    return Table(table.title, tuple(table.columns[place] for place in used), rows)


def _row(case: CaseRecord) -> tuple[Entry, ...]:
    own = case.own
    program = f"{case.form}, {case.backend}" if case.backend else ""
    peers = "; ".join(_peer(each) for each in case.peers.values())
    if case.status != "measured":
        return (Entry(case.name), Entry(program), *(Entry("") for _ in range(6)), Entry(""), Entry(own.note))
    return (
        Entry(case.name),
        Entry(program),
        Entry(power(own.error)),
        Entry(NOTHING if own.first_call_s is None else f"{own.first_call_s:.2g}"),
        Entry(_with_graph(own.forward_ms, own.graph_ms)),
        Entry(_with_graph(own.forward_backward_ms, own.graph_forward_backward_ms)),
        Entry(_issued(own) or NOTHING),
        Entry(size(own.peak_bytes)),
        Entry(peers),
        Entry("; ".join(_remarks(case))),
    )


def _peer(figures: Figures) -> str:
    if figures.forward_ms is None:
        return f"{figures.name}: {figures.note}"
    memory = "" if figures.peak_bytes is None else f", {size(figures.peak_bytes)}"
    memory += f", CPU {issued} µs" if (issued := _issued(figures)) else ""
    note = f" ({figures.note})" if figures.note else ""
    return f"{figures.name} {_times(figures)}{memory}{note}"


def _issued(figures: Figures) -> str:
    """CPU microseconds of a call, and after a pause: 41; 96."""
    found = (figures.issue_us, figures.cold_issue_us)
    return "; ".join(f"{value:.0f}" for value in found if value is not None)


def _times(figures: Figures) -> str:
    """Times of forward and of both passes: 0.65 (0.63 as a graph) / 2.48 ms."""
    found = [_with_graph(figures.forward_ms, figures.graph_ms)]
    if figures.forward_backward_ms is not None:
        found.append(_with_graph(figures.forward_backward_ms, figures.graph_forward_backward_ms))
    return f"{' / '.join(found)} ms"


def _with_graph(called: float | None, replayed: float | None) -> str:
    """A time, and that of its CUDA graph: 0.65 (0.63 as a graph)."""
    graph = "" if replayed is None else f" ({milliseconds(replayed)} as a graph)"
    return f"{milliseconds(called)}{graph}"


def _remarks(case: CaseRecord) -> list[str]:
    """The verdicts, and the note of a case that was measured."""
    note = [case.own.note] if case.own.note else []
    return [*(_judgement(verdict) for verdict in case.verdicts if _is_shown(verdict)), *note]


def _judgement(verdict: Verdict) -> str:
    value = "" if verdict.value is None else f": {verdict.value:.3g}"
    note = f" ({verdict.note})" if verdict.note else ""
    return f"{_MARKS[verdict.reached]} {verdict.target}{value}{note}"


def _is_shown(verdict: Verdict) -> bool:
    """First calls have their own column; here they are shown only if they take too long."""
    return verdict.reached is False or (
        verdict.reached is True and not verdict.target.startswith("first call")
    )


def milliseconds(value: float | None) -> str:
    """Three digits: 0.649, 35.1, 1,234."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def list_rows(cases: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Group, name and targets of cases that are yet to be measured."""
    return [(c.group, c.name, "; ".join(target.text for target in c.targets)) for c in cases]
