"""`maclaurin list`: the catalogue."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from maclaurin.errors import MaclaurinError, did_you_mean
from maclaurin.spec.catalogue import Entry, catalogue


def list_entries(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Show only entries with these words in name, notation or source."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything about them, as JSON.")] = False,
) -> None:
    """Every published variant under its short name, with its notation and source.

    [bold]Examples[/]

        maclaurin list

        maclaurin list taylor

        maclaurin list softmax_divS_gate --json
    """
    chosen = [entry for entry in catalogue if all(_has(entry, word) for word in words or [])]
    if not chosen:
        asked = " ".join(words or [])
        raise MaclaurinError(
            f"no entry of the catalogue has {asked!r} in it." + did_you_mean(asked, catalogue.names())
        )
    if as_json:
        print(json.dumps([_as_data(entry) for entry in chosen], indent=2, ensure_ascii=False))
        return
    table = Table(title=f"{len(chosen)} of {len(catalogue)} published variants", title_justify="left")
    for column in ("name", "notation", "recurrent form", "source", "the paper's code calls it"):
        table.add_column(column, overflow="fold")
    for entry in chosen:
        table.add_row(
            entry.name, entry.notation, _state(entry), entry.source, "\n".join(entry.aliases), style=None
        )
    Console().print(table)


def _has(entry: Entry, word: str) -> bool:
    text = " ".join([*entry.names, entry.notation, entry.source, entry.note])
    return word.lower() in text.lower()


def _state(entry: Entry) -> str:
    spec = entry.spec
    if spec.has_finite_state:
        return f"order {max(spec.orders, default=0)}"
    return "series" if spec.has_series else "none"


def _as_data(entry: Entry) -> dict[str, object]:
    default = type(entry.extras)()
    extras = {
        field.name: getattr(value, "name", value)
        for field in dataclasses.fields(entry.extras)
        if (value := getattr(entry.extras, field.name)) != getattr(default, field.name)
    }
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "notation": entry.notation,
        "spec": entry.spec.to_dict(),
        "formula": entry.formula,
        "source": entry.source,
        "note": entry.note,
        "layer": extras,
    }
