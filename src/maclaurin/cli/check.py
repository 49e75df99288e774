"""`maclaurin check`: whether the forms agree, softmax is torch's softmax, and the series converges."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from maclaurin.errors import InputError, load_extra
from maclaurin.files import require_file, require_writable_file
from maclaurin.plain_data import finite, to_plain
from maclaurin.spec import AttentionSpec
from maclaurin.spec.catalogue import catalogue, resolve

if TYPE_CHECKING:
    from maclaurin.testing.agreement import Agreement, ConvergencePoint
    from maclaurin.testing.cases import TensorCase

#: states with more features take too long to check
MOST_FEATURES = 1100
#: most specs named in a note
MOST_NAMED = 4


def check(
    specs: Annotated[
        list[str] | None,
        typer.Argument(help="Notations or catalogue names; all of the catalogue by default."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16.")] = "float64",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the random inputs.")] = 32,
    key_size: Annotated[int, typer.Option("--key-size", min=1, help="Size d of a key.")] = 4,
    score_size: Annotated[
        float,
        typer.Option(
            min=0.0, help="Typical size of the scores. Larger scores need higher orders of the series."
        ),
    ] = 0.25,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random inputs.")] = 0,
    inputs: Annotated[
        Path | None,
        typer.Option(help="A safetensors file with q, k, v (and gates) to use instead of random ones."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The results as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the convergence of the series to this file (png, svg, pdf).")
    ] = None,
) -> None:
    """Compare the three forms in values and gradients, softmax with torch's, and the series with softmax.

    Exits with 1 if a form differs from the parallel one by more than the tolerance of the dtype. A dash is a
    form that a spec does not have; the notes below the table say why.

    [bold]Examples[/]

        maclaurin check

        maclaurin check exp/l2 based

        maclaurin check exp/l2 "taylor(2,about=mean)/sum" --dtype float32

        maclaurin check softmax --score-size 1 --plot series.svg

        maclaurin check "power(2)/sum" --inputs qkv.safetensors --json
    """
    from maclaurin.testing.agreement import convergence, softmax_against_torch
    from maclaurin.testing.cases import Shape

    kind = _dtype(dtype)
    if plot is not None:
        _require_plot(plot)
    chosen = [resolve(text) for text in specs] if specs else _catalogue_specs(key_size)
    shape = Shape(batch=1, tokens=tokens, kv_heads=2, group=2, d=key_size, e=key_size + 1)
    cases = [_case(spec, shape, seed, kind, score_size, inputs) for spec in dict.fromkeys(chosen)]
    rows = _agreements(cases, quiet=as_json)
    torch_errors = softmax_against_torch(shape, seed, kind, score_size)
    points = convergence(shape, list(range(0, 25, 2)), seed, score_size)
    if plot is not None:
        _draw(points, score_size, plot)
    failed = [row for row in rows if row.holds is False]
    softmax_holds = max(torch_errors.values()) <= _tolerance(kind)
    if as_json:
        _print_json(rows, torch_errors, points, failed == [] and softmax_holds)
    else:
        _print_tables(rows, torch_errors, points, score_size, plot)
    if failed or not softmax_holds:
        raise typer.Exit(1)


def _dtype(name: str) -> Any:
    from maclaurin.testing.tolerances import TOLERANCE

    known = {str(kind).removeprefix("torch."): kind for kind in TOLERANCE}
    if name not in known:
        raise InputError(f"unknown dtype {name!r}; use one of {', '.join(known)}.")
    return known[name]


def _tolerance(kind: Any) -> float:
    from maclaurin.testing.tolerances import TOLERANCE

    return TOLERANCE[kind]


def _catalogue_specs(d: int) -> list[AttentionSpec]:
    """All entries whose state stays small at this key size."""
    specs = [entry.spec for entry in catalogue]
    return [s for s in specs if not s.has_finite_state or s.features(d) <= MOST_FEATURES]


def _case(
    spec: AttentionSpec, shape: Any, seed: int, kind: Any, size: float, inputs: Path | None
) -> TensorCase:
    from maclaurin.testing.cases import TensorCase, random_tensors

    if inputs is None:
        return random_tensors(spec, shape, seed, kind, size=size)
    safetensors = load_extra("safetensors", "state", "--inputs")
    require_file(inputs, "inputs")
    try:
        stored = load_extra("safetensors.torch", "state", "--inputs").load_file(str(inputs))
    except (safetensors.SafetensorError, OSError) as problem:
        raise InputError(
            f"--inputs: {inputs} is not a safetensors file ({problem}). Save q, k, v and gates with "
            "safetensors.torch.save_file."
        ) from None
    needed = ("q", "k", "v", *spec.gates)
    if missing := [name for name in needed if name not in stored]:
        raise InputError(
            f"{spec} needs {', '.join(needed)}; {inputs} has {', '.join(stored)}, so {missing[0]} is missing."
        )
    return TensorCase(spec, {name: stored[name].to(kind) for name in needed})


def _agreements(cases: list[TensorCase], quiet: bool) -> list[Agreement]:
    from maclaurin.progress_bar import report_progress
    from maclaurin.testing.agreement import agreement

    rows: list[Agreement] = []
    with report_progress("comparing forms", enabled=not quiet) as report:
        for number, case in enumerate(cases, start=1):
            rows += agreement(case, chunk_size=16)
            report(number / len(cases), str(case.spec))
    return rows


def _print_json(
    rows: list[Agreement], torch_errors: dict[str, float], points: list[ConvergencePoint], holds: bool
) -> None:
    data = {
        "holds": holds,
        "forms": [{**to_plain(row), "holds": row.holds} for row in rows],
        "softmax_against_torch": torch_errors,
        "convergence": finite(to_plain(points)),
    }
    print(json.dumps(data, indent=2, allow_nan=False))


def _print_tables(
    rows: list[Agreement],
    torch_errors: dict[str, float],
    points: list[ConvergencePoint],
    score_size: float,
    plot: Path | None,
) -> None:
    console = Console(highlight=False)
    console.print("relative errors against the parallel form")
    console.print(_forms_table(rows))
    for note, specs in _notes(rows).items():
        named = ", ".join(specs[:MOST_NAMED])
        more = f" and {len(specs) - MOST_NAMED} more" if len(specs) > MOST_NAMED else ""
        console.print(f"{named}{more}: {note}", markup=False)
    errors = ", ".join(f"{form} {error:.1e}" for form, error in torch_errors.items())
    console.print(f"\nexp/sum against torch's scaled_dot_product_attention in float64: {errors}\n")
    if any(resolve(row.spec).has_series for row in rows):
        console.print(f"taylor(N)/sum against softmax, relative to max|v|; scores of size {score_size:g}")
        console.print(_series_table(points))
        console.print("A dash: no bound yet, since the row sum could vanish at this order.\n")
    if plot is not None:
        console.print(f"figure written to {plot}", markup=False)
    disagreeing = [row for row in rows if row.holds is False]
    compared = sum(row.holds is not None for row in rows)
    if disagreeing:
        console.print(f"[bold red]{len(disagreeing)} of {compared} comparisons disagree[/]")
    else:
        console.print(f"[bold green]all {compared} comparisons agree[/]")


def _forms_table(rows: list[Agreement]) -> Table:
    """One row per spec: values and gradients of the chunked and of the recurrent form."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("chunked", "gradients", "recurrent", "gradients"):
        table.add_column(column, justify="right")
    forms: dict[str, dict[str, Agreement]] = {}
    for row in rows:
        forms.setdefault(row.spec, {})[row.form] = row
    for spec, found in forms.items():
        errors = [
            _error(error, found[form].tolerance)
            for form in ("chunked", "recurrent")
            for error in (found[form].value_error, found[form].gradient_error)
        ]
        table.add_row(escape(spec), *errors)
    return table


def _series_table(points: list[ConvergencePoint]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("order N", "about 0", "about the mean", "certified bound, about 0"):
        table.add_column(column, justify="right")
    for point in points:
        bound = None if math.isinf(point.certificate) else point.certificate
        table.add_row(str(point.order), *(_number(e) for e in (point.about_zero, point.about_mean, bound)))
    return table


def _notes(rows: list[Agreement]) -> dict[str, list[str]]:
    """Note → the specs that have it."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(_plain(row.note), []).append(row.spec)
    return notes


def _plain(note: str) -> str:
    """The note in words for the user."""
    if note.startswith("none: no finite state"):
        return "no recurrent form, since no finite state computes the kernel"
    return f"{note}; try a smaller --score-size" if note.startswith("no order") else note


def _error(value: float | None, tolerance: float) -> str:
    if value is None:
        return "–"
    return f"{value:.1e}" if value <= tolerance else f"[bold red]{value:.1e} ✗[/]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _require_plot(path: Path) -> None:
    """Raise before any work if the figure cannot be drawn."""
    load_extra("matplotlib", "plot", "--plot")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(
            f"--plot draws png, svg or pdf, not {path.suffix or 'a file without an extension'!r}."
        )
    require_writable_file(path, "plot")


def _draw(points: list[ConvergencePoint], score_size: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    orders = [p.order for p in points]
    axes.semilogy(orders, [p.about_zero for p in points], "o-", label="taylor(N)/sum, about 0")
    axes.semilogy(orders, [p.about_mean for p in points], "s-", label="taylor(N)/sum, about the row's mean")
    bounded = [p for p in points if p.certificate < 10]
    axes.semilogy(
        [p.order for p in bounded], [p.certificate for p in bounded], "k--", label="certified bound"
    )
    axes.set_xlabel("order N")
    axes.set_ylabel("largest output error / max|v|")
    axes.set_title(f"The series of exp becomes softmax (scores of size {score_size:g})")
    axes.set_ylim(1e-17, 10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
