"""`maclaurin report RUNS…`: the report of one or several studies."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of studies, or their records.json.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for the report; 'report' next to the first study by default."
        ),
    ] = None,
    pdf: Annotated[bool, typer.Option("--pdf/--no-pdf", help="Write figures as PDF too.")] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> None:
    """Write tables, figures and one self-contained page from the records of studies.

    Writes index.html (works offline), runs.csv, summary.csv, tables.md, and figures/ as SVG and PDF.
    It also works while a study is running. Claims are read from the current study.py.

    [bold]Examples[/]

        maclaurin report runs/mini --open

        maclaurin report runs/mini runs/interactions --out reports/both

        maclaurin report studies/paper_h200 --out reports/paper-h200
    """
    from maclaurin.report import write_report

    written = write_report(runs, out, pdf=pdf)
    console = Console(highlight=False)
    for line in written.findings:
        console.print(line, markup=False, soft_wrap=True)
    console.print(str(written.page), markup=False, soft_wrap=True)
    if open_page:
        webbrowser.open(written.page.resolve().as_uri())
