"""`maclaurin bench`: speed and memory compared with peers; each result is checked before it is timed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from maclaurin.cli import table_console
from maclaurin.errors import InputError, load_extra
from maclaurin.files import require_writable_folder, write_file

if TYPE_CHECKING:
    from maclaurin.bench.bench_record import BenchRecord
    from maclaurin.bench.bench_run import Ending
    from maclaurin.bench.setting import Setting

INTERRUPTED = 130
RESULTS = Path("benchmarks") / "results"


def bench(
    case: Annotated[
        list[str] | None, typer.Option(help="Only cases whose name or group contains this; may be repeated.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small shapes, timed briefly; on a CPU shapes are always small.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1 …, or auto: a GPU if there is one.")
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File of the results [dim]\\[benchmarks/results/gpu_bench.json or cpu_bench.json][/].",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip cases the file already has for this machine and code.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Start no new case after this many minutes.")
    ] = None,
    prepare: Annotated[
        int,
        typer.Option(
            min=0, help="Before timing, call every case once in this many processes, to fill compile caches."
        ),
    ] = 0,
    prepare_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds that --prepare may take; slower peers are left out.")
    ] = 180.0,
    without_peer: Annotated[
        list[str] | None,
        typer.Option(help="Leave out this peer, such as power_retention; may be repeated."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for figures (SVG) and table.md, made from the results.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="Measure nothing: print the results in this file.", show_default=False)
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the cases and their targets.")] = False,
    peers: Annotated[
        Path | None,
        typer.Option(
            envvar="MACLAURIN_PEERS",
            help="Folder of unpacked wheels of peers (fla, retention) that are not installed.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare time and memory of every form with its peers, in one run.

    Each result is compared with float64 first; a wrong one is not timed. Results are written after every
    case. Exits with 1 if a result was wrong or a case failed.

    [bold]Examples[/]

        maclaurin bench --list

        maclaurin bench --quick --case exp/l2 --case decode

        maclaurin bench --minutes 5 --plots docs/figures/bench

        maclaurin bench --resume

        maclaurin bench --device cuda --prepare 16 --without-peer power_retention --minutes 8

        maclaurin bench --device cuda --case "order one" --peers ~/peers

        maclaurin bench --table benchmarks/results/gpu_bench.json --plots docs/figures/bench
    """
    if plots is not None:
        _require_plots(plots)
    if peers is not None:
        _add_peers(peers)
    if table is not None:
        _show_file(table, plots)
    elif show_list:
        _print_list(case or [], quick)
    else:
        begins = _Beginning(resume, minutes, _known_peers(without_peer or []), prepare, prepare_seconds)
        _measure(case or [], quick, device, out, begins, plots)


def _add_peers(folder: Path) -> None:
    """Put a folder of unpacked wheels, and their data folders, on the import path."""
    if not folder.is_dir():
        raise InputError(
            f"--peers: {folder} is not a folder. Download wheels with `pip download --no-deps` and unpack "
            "them into one folder."
        )
    sys.path += [str(folder), *map(str, folder.glob("*.data/purelib"))]


def _show_file(file: Path, plots: Path | None) -> None:
    from maclaurin.bench.bench_record import read_bench

    record = read_bench(file)
    _print_tables(record)
    if plots is not None:
        _draw(record, plots)


def _print_list(wanted: list[str], small: bool) -> None:
    from maclaurin.bench.table import list_rows
    from maclaurin.bench.workloads import all_cases, chosen_cases

    found = Table(title="cases", title_justify="left")
    for column in ("group", "case", "targets"):
        found.add_column(column, overflow="fold")
    for row in list_rows(chosen_cases(all_cases(small=small), wanted)):
        found.add_row(*row)
    table_console(180).print(found)


class _Beginning(NamedTuple):
    """What is measured, and what happens before."""

    resume: bool
    minutes: float | None
    without: list[str]
    prepare: int
    prepare_seconds: float


def _known_peers(names: list[str]) -> list[str]:
    """The names, or an error with those that exist."""
    from maclaurin.bench.targets import PEER_TITLES

    for name in names:
        if name not in PEER_TITLES:
            raise InputError(
                f"--without-peer: there is no peer {name!r}; the peers are {', '.join(PEER_TITLES)}."
            )
    return names


def _measure(
    wanted: list[str], quick: bool, device: str, out: Path | None, begins: _Beginning, plots: Path | None
) -> None:
    from maclaurin.bench.bench_run import BenchRun
    from maclaurin.bench.preparation import Preparation
    from maclaurin.bench.setting import make_setting
    from maclaurin.bench.workloads import all_cases, chosen_cases
    from maclaurin.device import usable_device

    setting = make_setting(usable_device(device), quick=quick)
    cases = chosen_cases(all_cases(small=not setting.full_shapes), wanted)
    file = out or _default_file(setting)
    if file.is_dir():
        raise InputError(f"--out: {file} is a folder; name a file, such as {file / 'bench.json'}.")
    require_writable_folder(file.parent)
    console = Console(stderr=True, highlight=False)
    ahead = Preparation(begins.prepare, begins.prepare_seconds) if begins.prepare else None
    run = BenchRun(cases, setting, file, resume=begins.resume, without=begins.without, preparation=ahead)
    for line in run.notes:
        console.print(line, markup=False, soft_wrap=True)
    try:
        ending = run.run(begins.minutes)
    except KeyboardInterrupt:
        again = shlex.join(["maclaurin", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
        console.print(
            f"stopped; results so far are in {file}. Continue with: {again}", markup=False, soft_wrap=True
        )
        raise typer.Exit(INTERRUPTED) from None
    _print_tables(ending.record)
    if plots is not None:
        _draw(ending.record, plots)
    print(file)
    _end(ending, {case.name for case in cases})


def _end(ending: Ending, asked: set[str]) -> None:
    """Exit with 1 unless every chosen case was measured."""
    if ending.trouble:
        raise InputError(
            f"the last case broke the GPU's context ({ending.trouble}), so no further case can run; "
            "results so far are kept. Run the command again with --resume to continue with the next case."
        )
    if any(case.status != "measured" for case in ending.record.cases if case.name in asked):
        raise typer.Exit(1)


def _default_file(setting: Setting) -> Path:
    """A quick run on a GPU has its own file, so that it does not replace the full one."""
    if setting.device.type == "cpu":
        return RESULTS / "cpu_bench.json"
    return RESULTS / ("gpu_bench.json" if setting.full_shapes else "gpu_quick_bench.json")


def _print_tables(record: BenchRecord) -> None:
    from maclaurin.bench.table import heading, summary, tables_of

    console = table_console(180)
    for each in tables_of(record):
        shown = Table(title=each.title, title_justify="left")
        for column in each.columns:
            shown.add_column(
                column.title, justify="right" if column.kind == "number" else "left", overflow="fold"
            )
        for row in each.rows:
            shown.add_row(*(Text(str(entry)) for entry in row))
        console.print(shown)
    for line in (heading(record), *summary(record)):
        console.print(line, markup=False, soft_wrap=True)


def _draw(record: BenchRecord, folder: Path) -> None:
    from maclaurin.bench.figures import draw_figures
    from maclaurin.bench.table import markdown_of

    written, missing = draw_figures(record, folder)
    page = folder / "table.md"
    write_file(page, markdown_of(record))
    for line in (*missing, *map(str, written), str(page)):
        print(line)


def _require_plots(folder: Path) -> None:
    """Raise before any work if figures cannot be drawn."""
    load_extra("matplotlib", "plot", "--plots")
    require_writable_folder(folder, "plots")
