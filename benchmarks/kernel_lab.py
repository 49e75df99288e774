"""Fused programs under development: right on this GPU, and how fast beside their peers, in a few minutes.

    python benchmarks/kernel_lab.py [linear …] [--out results.json] [--peers FOLDER]

Each subject is first compared with the plain form in float64 (outputs and every gradient, odd lengths,
uninitialised memory filled with NaN), then timed forward and forward + backward. With a folder of unpacked
wheels (--peers, or MACLAURIN_PEERS) fla's chunk_linear_attn is timed in the same run; its first call takes a
minute or two. Programs are compiled side by side before anything is timed. Milliseconds are medians over CUDA
events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import maclaurin
from maclaurin import parse
from maclaurin.programs.linear_attention import linear_rows
from maclaurin.programs.triton import first_order
from maclaurin.forms.attend import Form, attend
from maclaurin.forms.inputs import Inputs
from maclaurin.testing import Shape, random_tensors

DEVICE = "cuda"
RESULTS = Path(__file__).parent / "results" / "kernel_lab.json"
#: batch, tokens, heads, key-value heads, d
SIZES = {
    "B32 T1024": (32, 1024, 16, 16, 64),
    "B8 T4096": (8, 4096, 16, 16, 64),
    "B2 T16384": (2, 16384, 16, 16, 64),
    "B1 T65536 H8": (1, 65536, 8, 8, 64),
}
#: relative errors may be this much, for the largest of outputs and gradients (docs/gpu.md)
LIMITS = {torch.float32: 4e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Subject:
    """One program on one spec; `variant` changes settings while it runs."""

    name: str
    spec: str
    run: Callable[[Any, Inputs], Tensor]
    variant: Callable[[], Any] | None = None
    sizes: tuple[str, ...] = tuple(SIZES)
    checked: bool = True
    compiles: bool = True


# ------------------------------------------------------------------------------------------- what is run


def through_first_order(spec: Any, inputs: Inputs) -> Tensor:
    return linear_rows(spec, inputs, scale=spec.kernel.default_scale(inputs.q.shape[3]))[0]


def not_causal(spec: Any, inputs: Inputs) -> Tensor:
    return linear_rows(spec, inputs, scale=spec.kernel.default_scale(inputs.q.shape[3]), causal=False)[0]


def as_dispatched(spec: Any, inputs: Inputs) -> Tensor:
    named = {n: u for n, u in vars(inputs).items() if u is not None}
    return maclaurin.attention(spec=spec, **named)  # type: ignore[return-value]


@contextmanager
def settings(**changed: Any) -> Iterator[None]:
    """Module constants of first_order.py, changed for a while."""
    before = {name: getattr(first_order, name) for name in changed}
    for name, value in changed.items():
        setattr(first_order, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(first_order, name, value)


def warps(**changed: tuple[int, int]) -> Callable[[], Any]:
    """Warps and loads ahead of some programs for heads up to 64."""
    table = {**first_order.WARPS}
    for name, value in changed.items():
        key = name.replace("_", " ")
        table[key] = (value, table[key][1])
    return lambda: settings(WARPS=table)


TWO = ("B8 T4096", "B1 T65536 H8")


def elu1(name: str, variant: Callable[[], Any], *, checked: bool = False) -> Subject:
    """Other tiles for one spec."""
    return Subject(f"elu1/sum {name}", "linear(elu1)/sum", through_first_order, variant, TWO, checked)


LINEAR = [
    Subject("identity", "linear(identity)", through_first_order),
    Subject("elu1/sum", "linear(elu1)/sum", through_first_order),
    Subject("relu/len", "linear(relu)/len", through_first_order, sizes=TWO),
    Subject("cosine/l2", "linear(cosine)/l2", through_first_order, sizes=TWO),
    Subject("identity*forget", "linear(identity)*forget", through_first_order),
    Subject("elu1*in*forget/sum", "linear(elu1)*in*forget/sum", through_first_order, sizes=TWO),
    Subject("elu1/sum not causal", "linear(elu1)/sum", not_causal, sizes=("B8 T4096",)),
    Subject("identity today", "linear(identity)", as_dispatched, checked=False, compiles=False),
    elu1("gradients 8 warps", warps(gradients=(8, 1)), checked=True),
    elu1("rows 8 warps", warps(rows=(8, 1))),
    elu1("states 2 ahead", warps(states=(4, 2), gradient_states=(4, 2))),
    elu1("states 8 warps", warps(states=(8, 3), gradient_states=(8, 2))),
    elu1("512 walkers", lambda: settings(WALKERS=512)),
    elu1("2048 walkers", lambda: settings(WALKERS=2048)),
    elu1("chunks of 128", lambda: settings(CHUNK=128, WARPS=EIGHT_WARPS), checked=True),
]
EIGHT_WARPS = {n: ((8, stages), large) for n, ((_, stages), large) in first_order.WARPS.items()}
GROUPS = {"linear": LINEAR}


# -------------------------------------------------------------------------------------------- checking


def gradients(y: Tensor, leaves: dict[str, Tensor], direction: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(y, list(leaves.values()), direction.to(y.dtype))
    return {"y": y.detach(), **dict(zip(leaves, found, strict=True))}


def check(subject: Subject, dtype: torch.dtype, shape: Shape) -> dict[str, float]:
    """Relative errors around float64; gradients relative to a tenth of the largest at least."""
    spec = parse(subject.spec)
    case = random_tensors(spec, shape, 0, dtype, device=DEVICE)
    direction = torch.randn(
        shape.batch, shape.tokens, shape.heads, shape.e, dtype=torch.float64, device=DEVICE
    )
    wide = {n: u.double().requires_grad_() for n, u in case.tensors.items()}
    causal = subject.run is not not_causal
    options = {"scale": spec.kernel.default_scale(shape.d), "causal": causal, "chunk": 64, "state": None}
    gold_y, _ = attend(spec, Inputs(**wide), Form.PARALLEL, **options, return_state=False)
    gold = gradients(gold_y, wide, direction)
    leaves = {n: u.detach().requires_grad_() for n, u in case.tensors.items()}
    found = gradients(subject.run(spec, Inputs(**leaves)), leaves, direction)
    largest = max(float(g.norm()) for n, g in gold.items() if n != "y") / 10
    return {
        n: float((found[n].double() - g).norm()) / max(float(g.norm()), 1e-3 if n == "y" else largest)
        for n, g in gold.items()
    }


CHECKED = [
    (torch.bfloat16, Shape(2, 1000, 2, 2, 64, 64)),
    (torch.bfloat16, Shape(1, 4097, 2, 1, 64, 64)),
    (torch.bfloat16, Shape(1, 65, 2, 1, 128, 128)),
    (torch.bfloat16, Shape(1, 515, 1, 1, 40, 24)),
    (torch.float32, Shape(1, 300, 1, 2, 64, 32)),
    (torch.float16, Shape(1, 300, 1, 2, 64, 64)),
]


def check_all(subjects: list[Subject]) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN
    table: dict[str, Any] = {}
    for subject in subjects:
        if not subject.checked:
            continue
        with (subject.variant or settings)():
            for dtype, shape in CHECKED[: 2 if subject.variant else None]:
                key = f"{subject.name} {str(dtype)[6:]} T{shape.tokens} d{shape.d}"
                try:
                    errors = check(subject, dtype, shape)
                    worst = max(errors.values(), key=lambda x: float("inf") if x != x else x)
                    right = worst < LIMITS[dtype]
                    table[key] = {"right": right, "errors": errors}
                except Exception as problem:
                    table[key] = {
                        "right": False,
                        "problem": f"{type(problem).__name__}: {str(problem)[:300]}",
                    }
                    traceback.print_exc(limit=4)
                if not table[key]["right"]:
                    print("WRONG", key, table[key].get("problem") or shown(table[key]["errors"]), flush=True)
    torch.use_deterministic_algorithms(False)
    right = sum(entry["right"] for entry in table.values())
    print(f"checked: {right} of {len(table)} right", flush=True)
    return table


def shown(errors: dict[str, float]) -> str:
    return ", ".join(f"{n} {e:.1e}" for n, e in errors.items())


# --------------------------------------------------------------------------------------------- timing


def tensors(spec: Any, size: str) -> dict[str, Tensor]:
    batch, tokens, heads, kv_heads, d = SIZES[size]
    made = {n: torch.randn(batch, tokens, h, d, device=DEVICE, dtype=torch.bfloat16) for n, h in
            (("q", heads), ("k", kv_heads), ("v", kv_heads))}  # fmt: skip
    gates = {"input_gate": lambda u: u, "log_forget": lambda u: -0.1 * u, "output_gate": lambda u: u}
    for name in spec.gates:
        h = heads if name == "output_gate" else kv_heads
        made[name] = gates[name](torch.rand(batch, tokens, h, device=DEVICE)).to(torch.bfloat16)
    return {n: u.requires_grad_() for n, u in made.items()}


def median_ms(call: Callable[[], object], budget_ms: float = 60.0) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = max(1e3 * (time.perf_counter() - begun), 1e-2)
    count = int(min(100, max(5, budget_ms / once)))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def issue_ms(call: Callable[[], object]) -> float:
    """CPU time to issue one call, in a cold loop of ten."""
    call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        call()
    spent = time.perf_counter() - begun
    torch.cuda.synchronize()
    return 100 * spent


def kernel_ms(call: Callable[[], object]) -> dict[str, float]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    return {
        e.key[:48]: round(e.device_time_total / 3e3, 4)
        for e in found.key_averages()
        if e.device_time_total > 0
    }


def times(forward: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        ms = {"forward": median_ms(forward), "issue": issue_ms(forward)}
    direction = torch.randn_like(forward().detach())

    def both() -> object:
        return torch.autograd.grad(forward(), leaves, direction)

    ms |= {"both": median_ms(both), "kernels": kernel_ms(both)}
    ms["busy"] = round(sum(ms["kernels"].values()), 4)
    return ms


def time_subject(subject: Subject, size: str) -> dict[str, Any]:
    spec = parse(subject.spec)
    given = tensors(spec, size)
    with (subject.variant or settings)():
        return times(lambda: subject.run(spec, Inputs(**given)), list(given.values()))


def time_sdpa(size: str) -> dict[str, Any]:
    given = tensors(parse("exp/sum"), size)
    q, k, v = (u.transpose(1, 2) for u in given.values())

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return times(forward, list(given.values()))


def time_fla(size: str) -> dict[str, Any]:
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    given = tensors(parse("linear(identity)"), size)
    return times(lambda: chunk_linear_attn(*given.values(), normalize=False)[0], list(given.values()))


def time_all(subjects: list[Subject], peers: str | None) -> dict[str, Any]:
    jobs: list[tuple[str, tuple[str, ...], Callable[[str], dict[str, Any]]]] = []
    if peers:
        sys.path.insert(0, peers)
        jobs.append(("fla chunk_linear_attn", tuple(SIZES), time_fla))
    jobs.append(("cuDNN SDPA", tuple(SIZES), time_sdpa))
    jobs += [(s.name, s.sizes, lambda size, s=s: time_subject(s, size)) for s in subjects]
    table: dict[str, Any] = {}
    for name, sizes, job in jobs:
        for size in sizes:
            try:
                table.setdefault(name, {})[size] = job(size)
            except Exception as problem:
                table.setdefault(name, {})[size] = {
                    "problem": f"{type(problem).__name__}: {str(problem)[:300]}"
                }
                traceback.print_exc(limit=4)
            torch.cuda.empty_cache()
        print_row(name, table[name])
    return table


def print_row(name: str, found: dict[str, Any]) -> None:
    cells = []
    for size in SIZES:
        ms = found.get(size)
        if ms is None:
            cells.append(" " * 22 + "–")
        elif "problem" in ms:
            cells.append(f"{ms['problem'][:22]:>23}")
        else:
            cells.append(f"{ms['forward']:6.3f}/{ms['both']:6.3f} ({ms['busy']:6.3f})")
    issue = next((ms["issue"] for ms in found.values() if "issue" in ms), float("nan"))
    print(f"{name:26} {' '.join(cells)}  issue {issue:.2f}", flush=True)


# ----------------------------------------------------------------------------------- compiling ahead


def compile_ahead(group: str, name: str) -> str | None:
    """All programs of a subject into triton's cache, in a process that has no GPU."""
    from maclaurin.programs.triton.compile_only import compiled_for

    subject = next(s for s in GROUPS[group] if s.name == name)
    spec = parse(subject.spec)
    try:
        with (subject.variant or settings)(), compiled_for(90, describe=False):
            for batch, tokens, heads in ((8, 4096, 16), (1, 65536, 8)):
                made = {n: torch.empty(batch, tokens, heads, 64, dtype=torch.bfloat16) for n in "qkv"}
                made |= {n: torch.empty(batch, tokens, heads, dtype=torch.bfloat16) for n in spec.gates}
                made = {n: u.requires_grad_() for n, u in made.items()}
                y = subject.run(spec, Inputs(**made))
                torch.autograd.grad(y, list(made.values()), y)
    except Exception as problem:
        return f"{name}: {type(problem).__name__}: {str(problem)[:200]}"
    return None


@dataclass
class Report:
    """What the JSON file holds."""

    machine: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    times: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", default=list(GROUPS), choices=[*GROUPS, []])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--peers", default=os.environ.get("MACLAURIN_PEERS"))
    options = parser.parse_args()
    begun = time.perf_counter()
    subjects = [s for group in options.groups for s in GROUPS[group]]
    ahead = [(group, s.name) for group in options.groups for s in GROUPS[group] if s.compiles]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        problems = [p for p in pool.map(compile_ahead, *zip(*ahead, strict=True)) if p]
    print(*problems, f"compiled ahead after {time.perf_counter() - begun:.0f} s", sep="\n", flush=True)
    import triton

    report = Report()
    report.machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    report.checks = check_all(subjects)
    print(
        f"checked after {time.perf_counter() - begun:.0f} s; forward/both (kernels of both) in ms:",
        flush=True,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(vars(report), indent=1) + "\n")
    report.times = time_all(subjects, options.peers)
    options.out.write_text(json.dumps(vars(report), indent=1) + "\n")
    print(f"done after {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
