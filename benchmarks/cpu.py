"""Speed and memory of the plain forms on this CPU, each as a ratio within this run.

    python benchmarks/cpu.py            # or: make bench

Every case is checked against the parallel form in float64 before it is timed; a wrong one is not
timed. Results go to benchmarks/results/cpu.json.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import stamp
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import maclaurin
from maclaurin.testing import Shape, TensorCase, random_tensors, relative_error

RESULTS = Path(__file__).parent / "results" / "cpu.json"


@dataclass
class Figure:
    """A measured ratio and its target."""

    what: str
    measured: float
    target: str
    holds: bool


def paired_ratio(one: Callable[[], object], other: Callable[[], object], repeats: int) -> float:
    """The median of one/other, timed in turns so that changes of the machine affect both."""
    one()
    other()
    ratios = []
    for _ in range(repeats):
        start = time.perf_counter()
        one()
        middle = time.perf_counter()
        other()
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return statistics.median(ratios)


def case_of(notation: str, tokens: int, d: int, e: int, heads: int = 1) -> TensorCase:
    shape = Shape(batch=1, tokens=tokens, kv_heads=heads, group=1, d=d, e=e)
    return random_tensors(maclaurin.resolve(notation), shape, 0, torch.float32)


def refuse_wrong(case: TensorCase, form: str) -> None:
    """Exit if the answer is wrong, so that it is not timed."""
    short = case.tokens(0, min(case.length, 700))
    wide = short.map(torch.Tensor.double).output(form="parallel")
    error = relative_error(short.output(form=form), wide)
    if error > 1e-4:
        raise SystemExit(f"{case.spec} {form} is wrong by {error:.1e}: not timed")


def forward_and_backward(case: TensorCase, form: str) -> Callable[[], object]:
    case = case.with_gradients()

    def run() -> object:
        return case.gradients(case.output(form=form).sum())

    return run


def growth(notation: str, form: str) -> float:
    """time(T=16384)/time(T=4096), forward and backward."""
    short, long = (case_of(notation, tokens, 16, 64) for tokens in (4096, 16384))
    refuse_wrong(short, form)
    return paired_ratio(forward_and_backward(long, form), forward_and_backward(short, form), 5)


def parallel_growth(notation: str) -> float:
    short, long = (case_of(notation, tokens, 16, 64) for tokens in (2048, 8192))
    one, other = (forward_and_backward(c, "parallel") for c in (long, short))
    return paired_ratio(one, other, 3)


def peak_bytes(form: str) -> int:
    """The increase of the peak resident set during one pass, in a separate process."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from cpu import *\n"
        "case = case_of('taylor(2)/sum', 8192, 16, 64)\n"
        "forward_and_backward(case.tokens(0, 256), sys.argv[2])()\n"
        "Path('/proc/self/clear_refs').write_text('5')  # the high-water mark starts again here\n"
        "before = resident('VmRSS')\n"
        "forward_and_backward(case, sys.argv[2])()\n"
        "print(resident('VmHWM') - before)\n"
    )
    arguments = [sys.executable, "-c", script, str(Path(__file__).parent), form]
    return int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)


def resident(which: str) -> int:
    """VmRSS, the resident set now, or VmHWM, its largest so far, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return 1024 * int(line.split()[1])
    raise SystemExit("resident memory is read from /proc, which this system does not have")


def import_seconds() -> float:
    """What `import maclaurin` and its attention cost beyond torch and numpy."""
    script = (
        "import numpy, torch, time; start = time.perf_counter(); import maclaurin; maclaurin.attention; "
        "print(time.perf_counter() - start)"
    )
    runs = [
        float(
            subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(5)
    ]
    return statistics.median(runs)


def softmax_ratio(notation: str) -> float:
    """attention(…) over torch's own call on the same tensors."""
    case = case_of(notation, 1024, 64, 64, heads=8)
    refuse_wrong(case, "parallel")
    q, k, v = (case.tensors[n] for n in "qkv")

    def own() -> object:
        return scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        ).transpose(1, 2)

    return paired_ratio(lambda: case.output(form="parallel"), own, 41)


def figures() -> list[Figure]:
    found: list[Figure] = []

    def note(what: str, measured: float, target: str, holds: bool) -> None:
        found.append(Figure(what, measured, target, holds))
        Console(stderr=True).print(f"{what}: {measured:.3g} ({target})", highlight=False)

    for name, notation in (("order 1", "linear(elu1)/sum"), ("order 2, d=16", "taylor(2)/sum")):
        ratio = growth(notation, "chunked")
        note(f"chunked {name}: time(T=16384)/time(T=4096)", ratio, "≤ 4.6, linear is 4", ratio <= 4.6)
    ratio = parallel_growth("taylor(2)/sum")
    note("parallel order 2, d=16: time(T=8192)/time(T=2048)", ratio, "quadratic is 16", ratio > 8)
    case = case_of("taylor(2)/sum", 8192, 16, 64)
    refuse_wrong(case, "chunked")
    parallel, chunked = (forward_and_backward(case, form) for form in ("parallel", "chunked"))
    ratio = paired_ratio(parallel, chunked, 3)
    note("order 2, d=16, e=64, T=8192: parallel time/chunked time", ratio, "≥ 3", ratio >= 3)
    ratio = peak_bytes("parallel") / peak_bytes("chunked")
    note("the same: parallel peak memory/chunked peak memory", ratio, "≥ 8", ratio >= 8)
    for notation, most in (("exp/sum", 1.1), ("exp/l2", 1.3)):
        ratio = softmax_ratio(notation)
        note(f"{notation}: time/torch's SDPA time", ratio, f"≤ {most}", ratio <= most)
    seconds = import_seconds()
    note("seconds to import beyond torch", seconds, "≤ 0.3", seconds <= 0.3)
    return found


def main() -> None:
    torch.manual_seed(0)
    found = figures()
    table = Table(title="on this CPU, ratios within one run", title_justify="left")
    for column in ("figure", "measured", "aim", ""):
        table.add_column(column)
    for figure in found:
        table.add_row(
            figure.what,
            f"{figure.measured:.3g}",
            figure.target,
            "[green]✓[/]" if figure.holds else "[red]✗[/]",
        )
    Console().print(table)
    RESULTS.write_text(
        json.dumps({"machine": stamp(), "figures": [asdict(f) for f in found]}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
