"""`maclaurin study`: every run of a study, then its report."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from maclaurin.cli.extras import requires_extra
from maclaurin.errors import InputError
from maclaurin.study.design import Study
from maclaurin.study.find import known_studies, load_study, read_study_file

if TYPE_CHECKING:
    from maclaurin.study.plan import PlannedRun
    from maclaurin.study.pool import Pool
    from maclaurin.study.runner import Ending, Task

INTERRUPTED = 130


@dataclass(frozen=True)
class _Options:
    """What was asked for, beside the study itself."""

    workers: int | None
    scale: float
    out: Path
    pool: Path
    executor: str
    ray_address: str | None
    retry: bool
    keep_models: bool
    smoke: bool
    torchrun: str | None
    device: str | None


def study(
    name: Annotated[str, typer.Argument(help="A name, or the path of a study.py or its folder.")] = "mini",
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the studies.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; the cores on a CPU, 1 on a GPU by default.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Times the steps of every run: 0.5x, 2x.")] = "1x",
    only: Annotated[
        list[str] | None, typer.Option(help="Only cells of this name or notation, and the baseline.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the study; runs/NAME by default.")
    ] = None,
    pool: Annotated[
        Path | None, typer.Option(help="Folder of runs shared between studies; OUT/../pool by default.")
    ] = None,
    executor: Annotated[str, typer.Option(help="local or ray.")] = "local",
    ray_address: Annotated[str | None, typer.Option(help="Of a Ray cluster; else $RAY_ADDRESS.")] = None,
    torchrun: Annotated[
        str | None, typer.Option(help='Train each run through torchrun: "--nproc-per-node 8".')
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda, whatever the study says.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what the runs would take.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Every run for 5 steps at tiny width, to see that it starts.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Do diverged and crashed runs again.")] = False,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep weights and checkpoints of the runs.")
    ] = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write the report at the end.")] = True,
) -> None:
    """Run a study: train what is not there yet, write OUT/records.json and the report.

    Ctrl-C stops it, the same command goes on. Ends with 1 if a run crashed.

    [bold]Examples[/]

        maclaurin study --list

        maclaurin study mini

        maclaurin study mini --budget 0.5x --only exp/sum exp/l2

        maclaurin study paper --torchrun "--nproc-per-node 8" --dry-run

        maclaurin study orders --executor ray --ray-address 10.0.0.1:6379
    """
    from maclaurin.study.budget import read_scale
    from maclaurin.study.select import select

    if show_list:
        _print_list()
        return
    chosen = _chosen_cells(name, only, more)
    if executor not in ("local", "ray"):
        raise InputError(f"--executor is local or ray, not {executor!r}.")
    if device not in (None, "auto", "cpu", "cuda"):
        raise InputError(f"--device is cpu or cuda, not {device!r}.")
    if torchrun is not None and executor == "ray":
        raise InputError(
            "--torchrun starts processes on this machine, so it does not go with --executor ray."
        )
    scale = read_scale(budget)
    wanted = select(load_study(name), chosen)
    folder = out or Path("runs") / wanted.name
    if smoke:
        folder = folder / "smoke"
        pool = folder / "pool"
    options = _Options(
        workers=workers,
        scale=scale,
        out=folder,
        pool=pool or folder.parent / "pool",
        executor=executor,
        ray_address=ray_address,
        retry=retry,
        keep_models=keep_models,
        smoke=smoke,
        torchrun=torchrun,
        device=device,
    )
    with requires_extra("models", "transformers"):
        if dry_run:
            _print_plan(wanted, options)
            return
        _run(wanted, options, report and not smoke)


def _chosen_cells(name: str, only: list[str] | None, more: list[str] | None) -> list[str]:
    """`--only a b c` gives the option one word and leaves the others behind the name."""
    if more and not only:
        raise InputError(
            f"one study at a time: {name!r}, and then what is {' '.join(more)!r}? "
            "Cells are chosen with --only."
        )
    return [*(only or ()), *(more or ())]


def _print_list() -> None:
    table = Table(title="studies", title_justify="left")
    for column in ("name", "question", "runs", "budget"):
        table.add_column(column, overflow="fold")
    for name, file in known_studies().items():
        try:
            found = read_study_file(file)
        except InputError as problem:  # one that cannot be read does not hide the others
            table.add_row(name, Text(str(problem), "red"), "", "")
            continue
        runs = sum(len(e.cells) * len(e.seeds) for e in found.experiments)
        table.add_row(name, found.question, str(runs), found.budget)
    _wide_console().print(table)


# ---------------------------------------------------------------------------------- --dry-run


def _print_plan(wanted: Study, options: _Options) -> None:
    from maclaurin.study.dry_run import estimate_runs
    from maclaurin.study.view import duration

    runs = _planned(wanted, options)
    found = estimate_runs(runs)
    table = Table(title=f"{wanted.title}: {len(runs)} runs", title_justify="left")
    for column in ("experiment", "cell"):
        table.add_column(column, overflow="fold")
    for column in ("seed", "parameters", "tokens", "FLOP", "state bytes", "time here"):
        table.add_column(column, justify="right")
    for row in found:
        run, state = row.run, row.run.facts.state_bytes
        table.add_row(
            run.experiment, run.cell.name, str(run.seed), f"{row.parameters:,}", f"{row.tokens:,}",
            f"{row.flops:.2e}", _state(state), duration(row.seconds),
        )  # fmt: skip
    console = _wide_console()
    console.print(table)
    console.print(
        f"in all {sum(row.tokens for row in found):,} tokens, {sum(row.flops for row in found):.2e} FLOP, "
        f"about {duration(sum(row.seconds for row in found))} on this machine "
        "(40% of the speed of a matrix product on one device)",
        soft_wrap=True,
    )
    if options.torchrun is not None:
        _print_commands(runs, options)


def _wide_console() -> Console:
    """In a file or a pipe, wide enough for the tables."""
    is_narrow = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=140 if is_narrow else None)


def _state(size: int | None) -> str:
    if size is None:
        return "grows"
    return f"{size:,}" if size < 10**12 else f"{size:.1e}"


def _print_commands(runs: list[PlannedRun], options: _Options) -> None:
    """Each line works by itself: its job file is written now, and a study finds its result in the pool."""
    from maclaurin.study.job_file import job_file
    from maclaurin.study.pool import Pool
    from maclaurin.study.prepare import make_job
    from maclaurin.study.torchrun_executor import torchrun_command

    for run in runs:
        job = make_job(run, Pool(options.pool), keep_models=options.keep_models)
        file = job_file(options.out, job)
        job.write(file)
        print(shlex.join(torchrun_command(options.torchrun or "", file)))


# --------------------------------------------------------------------------------- for real


def _planned(wanted: Study, options: _Options) -> list[PlannedRun]:
    from maclaurin.study.plan import plan_runs
    from maclaurin.study.smoke import smoke_runs
    from maclaurin.study.torchrun_executor import processes_of

    runs = plan_runs(wanted, options.scale, options.device)
    return smoke_runs(runs, options.out, processes_of(options.torchrun or "")) if options.smoke else runs


def _run(wanted: Study, options: _Options, report: bool) -> None:
    from maclaurin.study.lifeline import living_study
    from maclaurin.study.local_executor import warm_up

    if options.executor == "ray":
        from maclaurin.study.ray_executor import require_ray

        require_ray()
    lock = options.out / "lock"
    with living_study(lock):
        warm_up("maclaurin.cli.main")
        try:
            ending = _train_all(wanted, options, lock)
        except KeyboardInterrupt:
            _say_how_to_go_on(options.out)
            raise typer.Exit(INTERRUPTED) from None
    _tell(ending, options.out)
    if ending.interrupted:
        _say_how_to_go_on(options.out)
        raise typer.Exit(INTERRUPTED)
    if report:
        _write_report(options.out)
    if ending.having("crashed") or ending.unfinished:
        raise typer.Exit(1)


def _train_all(wanted: Study, options: _Options, lock: Path) -> Ending:
    from maclaurin.study.choose_executor import choose_executor
    from maclaurin.study.forms_check import FormsCheck
    from maclaurin.study.pool import Pool
    from maclaurin.study.prepare import make_tasks
    from maclaurin.study.runner import Runner
    from maclaurin.study.view import make_view

    pool, runs = Pool(options.pool), _planned(wanted, options)
    executor = choose_executor(
        options.executor,
        runs,
        workers=options.workers,
        ray_address=options.ray_address,
        torchrun=options.torchrun,
        out=options.out,
    )
    tasks = make_tasks(
        wanted, runs, pool, study_lock=lock, threads=executor.threads, keep_models=options.keep_models
    )
    if options.retry:
        _forget_failures(pool, tasks)
    forms = FormsCheck(options.out / "forms.json")
    forms.start()
    view = make_view(wanted.title, Console(stderr=True))
    runner = Runner(
        wanted, options.scale, tasks, out=options.out, pool=pool, executor=executor, view=view, forms=forms
    )
    return runner.run()


def _forget_failures(pool: Pool, tasks: list[Task]) -> None:
    for key in {task.key for task in tasks}:
        entry = pool.entry(key)
        record = entry.record()
        if record is not None and record.status != "finished":
            entry.forget()


def _tell(ending: Ending, out: Path) -> None:
    """What there is now, and what went wrong."""
    console = Console(stderr=True, highlight=False)
    for run in (*ending.having("diverged"), *ending.having("crashed")):
        words = (run.message or "").strip().splitlines() or [""]
        reason = words[0] if run.status == "diverged" else f"{words[0]}: {words[-1]}"
        console.print(
            f"{run.status}: {run.experiment}, {run.cell}, seed {run.seed}: {reason}",
            markup=False,
            soft_wrap=True,
        )
    counts = ", ".join(
        f"{len(found)} {status}"
        for status in ("finished", "diverged", "crashed", "stopped", "waiting")
        if (found := ending.having(status))
    )
    print(f"{counts}; {out / 'records.json'}")


def _say_how_to_go_on(out: Path) -> None:
    command = shlex.join(["maclaurin", *sys.argv[1:]])
    Console(stderr=True, highlight=False).print(
        f"stopped; nothing is lost in {out}. Go on with: {command}", markup=False, soft_wrap=True
    )


def _write_report(out: Path) -> None:
    """The page beside the records."""
    from maclaurin.report import write_report

    written = write_report([out], None)
    console = Console(highlight=False)
    for line in written.findings:
        console.print(line, markup=False, soft_wrap=True)
    console.print(str(written.page), markup=False, soft_wrap=True)
