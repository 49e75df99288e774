"""`maclaurin study`: run a study and write its report; compare two studies; clean the pool."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from maclaurin.cli import command_of, table_console
from maclaurin.errors import InputError, MaclaurinError, load_extra
from maclaurin.study.find import known_studies, load_study, read_study_file
from maclaurin.wording import in_list

if TYPE_CHECKING:
    from maclaurin.study.pool import Pool
    from maclaurin.study.run_record import Plan
    from maclaurin.study.runner import Ending, Planner, Prepared

INTERRUPTED = 130


class _RunByDefault(TyperGroup):
    """`maclaurin study mini` is short for `maclaurin study run mini`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


class _SeveralWords(TyperCommand):
    """`--only a b c` takes all words up to the next option; none of them is the study's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        read: list[str] = []
        taking = False
        for word in args:
            if word == "--only":
                taking = True
            elif taking and not word.startswith("-"):
                read += ["--only", word]
            else:
                taking = False
                read.append(word)
        if taking and args[-1] == "--only":
            raise InputError("--only needs the name or notation of a cell.")
        return super().parse_args(ctx, read)


study_app = typer.Typer(
    cls=_RunByDefault,
    help="Run a study: train the runs that have no result yet, write records and the report.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@command_of(study_app, "run", cls=_SeveralWords)
def run_study(
    name: Annotated[str, typer.Argument(help="A name, or the path of a study.py or its folder.")] = "mini",
    show_list: Annotated[bool, typer.Option("--list", help="List the studies.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Only cells with this name or notation, and the baseline.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Factor for the steps of every run: 0.5x, 2x.")] = "1x",
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds per cell: the study's own, then more. Can extend a finished study."),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Choose the learning rates again; writes tuned.json next to study.py."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder of the study; runs/NAME by default, another for a partial study."
        ),
    ] = None,
    pool: Annotated[
        Path | None, typer.Option(help="Folder of runs shared between studies; OUT/../pool by default.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; by default one per core on a CPU, one per GPU.")
    ] = None,
    executor: Annotated[str, typer.Option(help="local, ray or slurm.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; $RAY_ADDRESS by default.")
    ] = None,
    slurm: Annotated[
        str | None, typer.Option(help='Options of submitit: "partition=gpu,timeout_min=600".')
    ] = None,
    torchrun: Annotated[
        str | None, typer.Option(help='Train each run through torchrun: "--nproc-per-node 8".')
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; overrides the study.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what the runs would cost, and which are done.")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Train every run for 5 steps at tiny width, to check that it starts."),
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run diverged and crashed runs again.")] = False,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep weights and checkpoints of the runs.")
    ] = False,
    time: Annotated[
        bool | None,
        typer.Option(
            "--time/--no-time",
            help="Measure the speed of each cell alone at the end; by default if it is quick.",
        ),
    ] = None,
    torch_version: Annotated[
        str | None,
        typer.Option("--torch", help="Use results of this version of torch, such as 2.11, from the pool."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Stop after this time; start no run that would not end by then."),
    ] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write the report at the end.")] = True,
) -> None:
    """Run a study: train the runs that have no result yet, write OUT/records.json and the report.

    Ctrl-C or --minutes stops it, and the same command continues it. The exit code is 1 if a run crashed.

    `maclaurin study diff` compares two studies, `maclaurin study clean` frees space in the pool.

    [bold]Examples[/]

        maclaurin study --list

        maclaurin study mini

        maclaurin study mini --budget 0.5x --only exp/sum exp/l2

        maclaurin study mini --seeds 5

        maclaurin study gap --minutes 30

        maclaurin study paper --torchrun "--nproc-per-node 8" --dry-run

        maclaurin study orders --executor ray --ray-address 10.0.0.1:6379

        maclaurin study orders --executor slurm --slurm partition=gpu,timeout_min=600
    """
    if show_list:
        _print_list()
        return
    if device not in (None, "auto", "cpu", "cuda"):
        raise InputError(f"--device is cpu or cuda, not {device!r}.")
    study, cells = load_study(name), only or []
    load_extra("transformers", "models", "this command")
    from maclaurin.study.executors import check_executor
    from maclaurin.study.live_table import make_view
    from maclaurin.study.plan_runs import read_scale
    from maclaurin.study.runner import prepare, run

    scale = read_scale(budget)
    if dry_run:
        check_executor(executor, torchrun)
        found = prepare(
            study, out=out, pool=pool, only=cells, scale=scale, seeds=seeds, smoke=smoke, device=device,
            torchrun=torchrun, torch_version=torch_version,
        )  # fmt: skip
        _print_plan(found, torchrun)
        return
    try:
        ending = run(
            study,
            out=out,
            pool=pool,
            only=cells,
            scale=scale,
            seeds=seeds,
            tune=tune,
            smoke=smoke,
            device=device,
            executor=executor,
            workers=workers,
            torchrun=torchrun,
            ray_address=ray_address,
            slurm=slurm,
            retry=retry,
            keep_models=keep_models,
            time=time,
            torch_version=torch_version,
            minutes=minutes,
            view=make_view(study.title, Console(stderr=True)),
        )
    except KeyboardInterrupt:
        _print_resume_command(None)
        raise typer.Exit(INTERRUPTED) from None
    _print_ending(ending)
    if ending.interrupted:
        _print_resume_command(ending.out)
        raise typer.Exit(INTERRUPTED)
    if report and not smoke:
        _write_report(ending.out)
    if ending.record.having("crashed", "stopped", "waiting"):
        raise typer.Exit(1)


def _print_list() -> None:
    table = Table(title="studies", title_justify="left")
    for column in ("name", "question", "runs", "budget"):
        table.add_column(column, overflow="fold")
    for name, file in known_studies().items():
        try:
            found = read_study_file(file)
        except InputError as problem:  # a broken study does not hide the others
            table.add_row(name, Text(str(problem), "red"), "", "")
            continue
        table.add_row(name, found.question, str(found.run_count), found.budget)
    table_console().print(table)


# ---------------------------------------------------------------------------------- --dry-run


def _print_plan(found: Prepared, torchrun: str | None) -> None:
    from maclaurin.study.cost import cost_of
    from maclaurin.study.pool import Pool
    from maclaurin.wording import duration

    done = _done(found.plan, Pool(found.pool))
    costs = {label: cost_of(record.run) for label, record in found.plan.items()}
    runs = {record.run.key: label for label, record in found.plan.items()}  # experiments may share a run
    left = [costs[label] for label in runs.values() if label not in done]
    table = Table(
        title=f"{found.study.title}: {len(runs)} runs, {len(runs) - len(left)} done", title_justify="left"
    )
    for column in ("experiment", "cell"):
        table.add_column(column, overflow="fold")
    for column in ("seed", "parameters", "tokens", "FLOP", "state bytes", "time here"):
        table.add_column(column, justify="right")
    for label, record in found.plan.items():
        cost = costs[label]
        table.add_row(
            label.experiment, label.cell, str(label.seed), f"{cost.parameters:,}", f"{cost.tokens:,}",
            f"{cost.flops:.2e}", _state(record.state_bytes), done.get(label) or duration(cost.seconds),
        )  # fmt: skip
    console = table_console()
    console.print(table)
    for task in dict.fromkeys(task for record in found.plan.values() for task in record.run.tasks):
        console.print(f"at the end of each run, the task {task.name}: {task.items} items, seed {task.seed}")
    console.print(
        f"left to do: {len(left)} runs, {sum(cost.tokens for cost in left):,} tokens, "
        f"{sum(cost.flops for cost in left):.2e} FLOP, about "
        f"{duration(sum(cost.seconds for cost in left))} on this machine (40% of the speed of a matrix "
        "product on one device)",
        soft_wrap=True,
    )
    if found.tuning_runs:
        console.print(
            f"before that, at least {found.tuning_runs} runs to choose learning rates: some cells have "
            "none yet",
            soft_wrap=True,
        )
    if torchrun is not None:
        _print_commands(found.plan, found.planner, found.out, Pool(found.pool), torchrun)


def _done(plan: Plan, pool: Pool) -> dict[Any, str]:
    """Label → status of runs with a result in the pool; fingerprints of data are not compared."""
    known = {}
    for entry in pool.entries():
        record = entry.record()
        if record is not None:
            known[dataclasses.replace(record.run, data="").key] = record.status
    return {label: known[r.run.key] for label, r in plan.items() if r.run.key in known}


def _state(size: int | None) -> str:
    if size is None:
        return "grows"
    return f"{size:,}" if size < 10**12 else f"{size:.1e}"


def _print_commands(plan: Plan, planner: Planner, out: Path, pool: Pool, torchrun: str) -> None:
    """Print one command per run and write its job file; the study later finds the results in the pool."""
    from maclaurin.study.executors import torchrun_command
    from maclaurin.study.pool import RunPlace
    from maclaurin.study.worker import Job

    place = RunPlace(pool=str(pool.root), code=planner.code)
    for label, record in plan.items():
        words = re.sub(r"[^A-Za-z0-9]+", "-", f"{label.experiment}-{label.cell}").strip("-")
        file = out / "jobs" / f"{words}-seed-{label.seed}-{record.run.key[:6]}.json"
        Job(record=record, place=place).write(file)
        print(shlex.join(torchrun_command(torchrun, file)))


# ------------------------------------------------------------------------------------ at the end


def _print_ending(ending: Ending) -> None:
    """Print how many runs have which status, and the errors."""
    console = Console(stderr=True, highlight=False)
    from maclaurin.study.run_record import error_line

    record = ending.record
    for label, run in record.having("diverged", "crashed"):
        place = f"{label.experiment}, {in_list(label.cell)}, seed {label.seed}"
        text = f"{run.status}: {place}: {error_line(run.message)}"
        console.print(text, markup=False, soft_wrap=True)
    counts = ", ".join(
        f"{len(found)} {status}"
        for status in ("finished", "diverged", "crashed", "stopped", "waiting")
        if (found := record.having(status))
    )
    if counts:
        print(f"{counts}; {ending.out / 'records.json'}")


def _print_resume_command(out: Path | None) -> None:
    command = shlex.join(["maclaurin", *sys.argv[1:]])
    kept = f"; finished runs and checkpoints are kept in {out}" if out else ""
    Console(stderr=True, highlight=False).print(
        f"stopped{kept}. Continue with: {command}", markup=False, soft_wrap=True
    )


def _write_report(out: Path) -> None:
    """Write the page next to the records; if the extra is missing, print how to install it."""
    console = Console(highlight=False)
    try:
        from maclaurin.report import write_report
    except MaclaurinError as problem:
        later = shlex.join(["maclaurin", "report", str(out / "records.json")])
        console.print(
            f"no page was written: {problem} To write it later, here or on another machine: {later}",
            markup=False,
            soft_wrap=True,
        )
        return
    written = write_report([out])
    for line in written.findings:
        console.print(line, markup=False, soft_wrap=True)
    console.print(str(written.page), markup=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------ diff


@command_of(study_app, "diff")
def diff_studies(
    before: Annotated[Path, typer.Argument(help="Folder or records.json of a study.")],
    after: Annotated[Path, typer.Argument(help="Another study, or the same one run again.")],
) -> None:
    """Compare two studies cell by cell: means over seeds, and what differs between the runs.

    The change has a 95 % interval (paired by seed) where both studies have two seeds or more in common.

    [bold]Examples[/]

        maclaurin study diff studies/mini runs/mini
    """
    from maclaurin.study.diff import diff_studies as compare
    from maclaurin.study.run_record import read_study

    table = Table(title=f"{before} → {after}", title_justify="left")
    for column in ("experiment", "cell", "metric"):
        table.add_column(column, overflow="fold")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    table.add_column("what differs", overflow="fold")
    for row in compare(read_study(before), read_study(after)):
        table.add_row(
            row.experiment, row.cell, row.metric, _mean(row.before), _mean(row.after),
            _change(row.by_seed), Text("; ".join(row.changed)),
        )  # fmt: skip
    table_console().print(table)


def _change(by_seed: Mapping[int, tuple[float, float]]) -> str:
    """The mean change over shared seeds with its interval, if the extra `report` is there to compute it."""
    if not by_seed:
        return ""
    mean = sum(new - old for old, new in by_seed.values()) / len(by_seed)
    try:
        from maclaurin.report.statistics import paired
    except ModuleNotFoundError:
        return f"{mean:+.4f}"
    old, new = ({seed: pair[place] for seed, pair in by_seed.items()} for place in (0, 1))
    difference = paired(new, old)
    bounds = None if difference is None else difference.bounds
    return f"{mean:+.4f}" + ("" if bounds is None else f" [{bounds[0]:.4f}, {bounds[1]:.4f}]")


def _mean(found: tuple[float, float | None, int] | None) -> str:
    if found is None:
        return "–"
    mean, deviation, count = found
    return f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}") + f" ({count})"


# ----------------------------------------------------------------------------------------- clean


@command_of(study_app, "clean")
def clean_pool(
    pool: Annotated[Path, typer.Argument(help="Folder of the pool.")] = Path("runs/pool"),
    models: Annotated[
        bool, typer.Option("--models", help="Delete weights and checkpoints of runs that have a result.")
    ] = False,
    unused: Annotated[
        bool, typer.Option("--unused", help="Delete runs that no study next to the pool uses.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Show what the pool holds and how much space it takes; delete what you choose.

    [bold]Examples[/]

        maclaurin study clean

        maclaurin study clean --unused --models
    """
    from maclaurin.report.formatting import counted, size
    from maclaurin.study.pool import Pool, pool_use

    if not pool.is_dir():
        raise InputError(f"there is no pool {pool}.")
    uses = pool_use(Pool(pool), pool.absolute().parent)
    console = table_console()
    groups: dict[str, list[Any]] = {}
    for use in uses:
        groups.setdefault(", ".join(use.studies) or "no study", []).append(use)
    table = Table(
        title=f"{pool}: {counted(len(uses), 'run')}, {size(sum(u.size for u in uses))}", title_justify="left"
    )
    for column, justify in (("used by", "left"), ("runs", "right"), ("size", "right"), ("weights", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, members in groups.items():
        weights = sum(use.model_bytes for use in members)
        table.add_row(name, str(len(members)), size(sum(use.size for use in members)), size(weights))
    console.print(table)
    idle = [use for use in uses if not use.is_busy]
    gone = [use for use in idle if unused and not use.studies]
    bare = [use for use in idle if models and use not in gone and use.model_bytes and use.has_result]
    if not gone and not bare:
        if not (models or unused):
            console.print("nothing was deleted; choose with --unused or --models.")
        else:
            console.print("there is nothing to delete.")
        return
    freed = size(sum(use.size for use in gone) + sum(use.model_bytes for use in bare))
    what = f"{counted(len(gone), 'run')} and the weights of {len(bare)} more, {freed}"
    if not yes and not typer.confirm(f"delete {what}?"):
        raise typer.Exit(1)
    for use in gone:
        shutil.rmtree(use.entry.path)
    for use in bare:
        use.entry.drop_models()
    console.print(f"deleted {what}.")
