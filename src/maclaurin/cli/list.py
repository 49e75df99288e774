"""`maclaurin list`: the catalogue."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from maclaurin.cli import table_console
from maclaurin.errors import MaclaurinError
from maclaurin.spec.catalogue import Entry, catalogue
from maclaurin.wording import did_you_mean


def list_entries(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Only entries with these words in name, notation or source."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the full entries as JSON.")] = False,
) -> None:
    """List the published variants: short name, notation and source.

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
    console = table_console(200)
    console.print(f"{len(chosen)} of {len(catalogue)} published variants")
    console.print(_table(chosen, console.width))


#: (heading, narrowest terminal that shows the column)
_COLUMNS = (
    ("name", 0),
    ("notation", 0),
    ("recurrent", 0),
    ("source", 115),
    ("the paper's code calls it", 160),
)


def _table(entries: list[Entry], width: int) -> Table:
    """Names and notations are never broken; columns that do not fit a narrow terminal are left out."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown = [place for place, (_, narrowest) in enumerate(_COLUMNS) if width >= narrowest]
    for place in shown:
        table.add_column(_COLUMNS[place][0], no_wrap=True)
    for entry in entries:
        cells = (entry.name, entry.notation, _state(entry), entry.source, ", ".join(entry.aliases))
        table.add_row(*(escape(cells[place]) for place in shown))
    if len(shown) < len(_COLUMNS):
        table.caption = "A wider terminal also shows sources and the paper's names; --json has everything."
        table.caption_justify = "left"
    return table


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
