"""`maclaurin show SPEC`: everything about one spec."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from maclaurin.spec import AttentionSpec
from maclaurin.spec.catalogue import Entry, catalogue, resolve

HEAD_SIZES = (16, 32, 64, 128)


def show(
    spec: Annotated[str, typer.Argument(help="A notation such as 'taylor(2)/sum', or a name such as based.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show one spec: its formula, recurrence, state and forms, and the parts that cancel.

    [bold]Examples[/]

        maclaurin show exp/l2

        maclaurin show "taylor(2,about=mean)+window(64,sinks=1)/sum"

        maclaurin show gated_softmax --json
    """
    parsed = resolve(spec)
    entries = [e for e in catalogue if spec in e.names] or [e for e in catalogue if e.spec == parsed]
    if as_json:
        print(json.dumps(_as_data(parsed, entries), indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{parsed}[/]", markup=True)
    for title, text in _paragraphs(parsed, entries):
        console.print(f"\n[bold cyan]{title}[/]")
        console.print(text, markup=False, soft_wrap=True)
    if parsed.has_finite_state:
        console.print()
        console.print(_state_table(parsed))


def _paragraphs(spec: AttentionSpec, entries: list[Entry]) -> list[tuple[str, str]]:
    paragraphs = [
        ("formula", spec.formula),
        ("LaTeX", spec.latex),
        ("as a recurrent network", spec.recurrence),
        ("forms", "\n".join(_forms(spec))),
        ("gates it needs", ", ".join(spec.gates) or "none"),
    ]
    if spec.denominator is not None:
        answer = (
            "can vanish; the output of such a row is 0" if spec.denominator_can_vanish else "never vanishes"
        )
        paragraphs.append(("denominator", answer))
    if spec.cancelled_parts:
        paragraphs.append(("cancelled by the norm", f"{', '.join(map(str, spec.cancelled_parts))}"))
    if (simpler := spec.simplified()) != spec:
        paragraphs.append(("equal and simpler", str(simpler)))
    for entry in entries:
        known = f"{entry.name}: {entry.source}"
        known += f"\nalso called {', '.join(entry.aliases)}" if entry.aliases else ""
        known += f"\n{entry.note}" if entry.note else ""
        known += "".join(f"\nlayer: {line}" for line in _extras(entry))
        paragraphs.append(("in the catalogue", known))
    return paragraphs


def _forms(spec: AttentionSpec) -> list[str]:
    if spec.has_finite_state:
        return ["parallel", "chunked, linear in the length", "recurrent, in constant memory"]
    blocks = "chunked, as blocks of the parallel form"
    if spec.has_series:
        return ["parallel", blocks, "recurrent, as its series up to an order certified from the scores"]
    return ["parallel", blocks]


def _extras(entry: Entry) -> list[str]:
    default = type(entry.extras)()
    lines = []
    for field in dataclasses.fields(entry.extras):
        value = getattr(entry.extras, field.name)
        if value != getattr(default, field.name):
            lines.append(f"{field.name.replace('_', ' ')} = {_written(value)}")
    return lines


def _written(value: object) -> str:
    """An entry of a layer in words: pairs of gates and their recipes, a recipe, a switch or a number."""
    if isinstance(value, tuple):
        return ", ".join(f"{gate}: {recipe.value}" for gate, recipe in value)
    return str(getattr(value, "value", value))


def _state_table(spec: AttentionSpec) -> Table:
    table = Table(
        title="state per sequence and key-value head, for values of the same size", title_justify="left"
    )
    for column in ("head size", "features", "numbers", "bytes in fp32"):
        table.add_column(column, justify="right")
    for d in HEAD_SIZES:
        size = spec.state_size(d, d)
        table.add_row(str(d), _count(spec.features(d)), _count(size), _count(4 * size))
    return table


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**12 else f"{number:.2e}"


def _as_data(spec: AttentionSpec, entries: list[Entry]) -> dict[str, object]:
    return {
        "notation": str(spec),
        "spec": spec.to_dict(),
        "formula": spec.formula,
        "latex": spec.latex,
        "recurrence": spec.recurrence,
        "forms": _forms(spec),
        "gates": list(spec.gates),
        "denominator_can_vanish": spec.denominator_can_vanish,
        "cancelled_parts": [str(part) for part in spec.cancelled_parts],
        "simplified": str(spec.simplified()),
        "state": [
            {"head_size": d, "features": spec.features(d), "numbers": spec.state_size(d, d)}
            for d in HEAD_SIZES
        ]
        if spec.has_finite_state
        else None,
        "catalogue": [entry.name for entry in entries],
    }
