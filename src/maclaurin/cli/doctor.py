"""`maclaurin doctor`: versions, devices, and whether every program computes correctly on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from maclaurin.files import require_writable_file

if TYPE_CHECKING:
    import torch

    from maclaurin.bench.check_programs import Finding


def doctor(
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: the GPU if there is one.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the findings to this JSON file too.")] = None,
) -> None:
    """Show versions and the device, then check every program against float64, gradients included.

    It takes less than two minutes. Exits with 1 if a program is wrong on this machine.

    [bold]Examples[/]

        maclaurin doctor

        maclaurin doctor --device cpu --out doctor.json
    """
    import torch

    from maclaurin.bench.check_programs import examine
    from maclaurin.device import usable_device
    from maclaurin.machine import BENCHMARKED_PACKAGES, provenance
    from maclaurin.progress_bar import report_progress

    if out is not None:
        require_writable_file(out, "out")
    chosen, console = torch.device(usable_device(device)), Console(highlight=False)
    about = provenance(BENCHMARKED_PACKAGES)
    for line in _machine_lines(about, chosen):
        console.print(line, markup=False, soft_wrap=True)
    with report_progress("checking programs") as report:
        findings = examine(chosen, report)
    console.print(_table(findings))
    for line in _advice(findings, chosen):
        console.print(line, soft_wrap=True)
    if out is not None:
        _write(out, about, findings)
    if not all(finding.is_right for finding in findings):
        raise typer.Exit(1)


def _machine_lines(about: dict[str, Any], device: torch.device) -> list[str]:
    import torch

    from maclaurin.programs import triton as gpu

    versions = about["versions"]
    lines = [
        f"maclaurin {versions['maclaurin']}, torch {versions['torch']}, python {about['python']}, "
        f"triton {versions['triton'] or 'not installed'}",
        f"{about['processor']}, {about['cores']} cores",
    ]
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        lines.append(
            f"{found.name}: compute capability {found.major}.{found.minor}, "
            f"{found.total_memory / 2**30:.0f} GiB, CUDA {versions['cuda']}, cuDNN {versions['cudnn']}"
        )
    why = gpu.why_not_on(device)
    lines.append(f"Triton programs on {device}: {'yes' if why is None else f'no, {why}'}.")
    return lines


def _table(findings: list[Finding]) -> Table:
    """A row for every program, spec and shape, a column for every dtype; it fits into 80 characters."""
    dtypes = {f.dtype: f.limit for f in findings}
    rows: dict[tuple[str, str], dict[str, Finding]] = {}
    for f in findings:
        rows.setdefault((f.program, f.title), {})[f.dtype] = f
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("largest relative error\nlimit", no_wrap=True)
    for dtype, limit in dtypes.items():
        table.add_column(f"{dtype}\n{limit:.0e}", justify="right", no_wrap=True)
    last = None
    for (program, title), found in rows.items():
        if program != last:
            table.add_row(f"[bold]{program}[/]")
            last = program
        cells = (_cell(found.get(dtype)) for dtype in dtypes)
        table.add_row("  " + title.replace("[", r"\["), *cells)
    return table


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return "–"
    if finding.problem:
        return "[bold red]failed[/]"
    error = f"{finding.largest_error:.1e}"
    return error if finding.is_right else f"[bold red]WRONG {error}[/]"


def _advice(findings: list[Finding], device: torch.device) -> list[str]:
    """One line if all checks pass; else what to do about each program."""
    wrong: dict[str, list[Finding]] = {}
    for finding in findings:
        if not finding.is_right:
            wrong.setdefault(finding.program, []).append(finding)
    if not wrong:
        return [f"[bold green]all {len(findings)} checks pass on {device}[/]"]
    lines = []
    for program, found in wrong.items():
        problems = {f.problem for f in found if f.problem}
        what = "; ".join(sorted(problems)) or "gives wrong results"
        where = ", ".join(f"{f.title} in {f.dtype}{_amount(f)}" for f in found)
        lines.append(f"[bold red]{program}[/] {what} ({where}).")
    names = ",".join(wrong)
    lines += [
        "Errors above the limit mean that outputs or gradients of training are wrong on this machine.",
        f'Disable these programs with MACLAURIN_WITHOUT="{names}" in the environment, or install another '
        "version of triton; then run maclaurin doctor again. Please report it with this output.",
    ]
    return lines


def _amount(finding: Finding) -> str:
    errors = {"output": finding.output_error, "gradients": finding.gradient_error}
    return "".join(
        f", {name} off by {e:.1e}" for name, e in errors.items() if e is not None and e > finding.limit
    )


def _write(out: Path, about: dict[str, Any], findings: list[Finding]) -> None:
    from maclaurin.plain_data import to_plain, write_json

    rows = [{**to_plain(f), "right": f.is_right} for f in findings]
    write_json(out, {**about, "findings": rows})
